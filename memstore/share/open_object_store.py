"""The object store at a URL: a prefix of an S3, Google or Azure bucket, a directory, or this
process's memory.

Credentials come from the environment variables of the store's own SDK, and are never written to a
URL, file or message.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from memstore.disk.files import DATA
from memstore.errors import InvalidInput, MemoryNotFound, install_extra
from memstore.share.object_store import CREDENTIALS, ObjectStore, first_line, without_credentials
from memstore.share.publication_options import is_url

SCHEMES = ("s3", "gs", "az", "file", "memory")
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL", "STORAGE_EMULATOR_HOST"),
}
_in_process: dict[str, Any] = {}  # stores of memory://


def open_object_store(url: str, *, make: bool = False, timeout: float = 60.0) -> ObjectStore:
    """The object store at a URL.

    make: create a missing directory (file://). timeout: seconds of a request, and of its retries.
    Raises InvalidInput (an unusable URL), MemoryNotFound (no such directory).
    """
    try:
        if not is_url(url):  # such as file:path or S3://, which readers take for a directory
            raise ValueError
        parts = urlsplit(url)
    except ValueError:
        raise InvalidInput(
            f"{without_credentials(str(url))}: not a URL; give s3://bucket/prefix or file:///path"
        ) from None
    if parts.scheme not in SCHEMES:
        raise InvalidInput(
            f"{without_credentials(url)}: unknown scheme {parts.scheme!r}; use one of "
            f"{', '.join(f'{scheme}://' for scheme in SCHEMES)}"
        )
    # a bucket has no colon; the user before a password with a slash has one
    user = "@" in parts.netloc or (":" in parts.netloc and parts.scheme in _ENDPOINTS)
    if user or parts.query or parts.fragment:
        raise InvalidInput(
            f"{without_credentials(url)}: give no credentials or options in a URL; set them "
            "in the environment, as for the store's own SDK"
        )
    url = url.rstrip("/") if parts.path.strip("/") or parts.netloc else url
    try:
        from obstore.store import MemoryStore
    except ImportError as error:
        raise InvalidInput(f"published memories need obstore: {install_extra('share')}") from error
    if parts.scheme == "memory":
        return ObjectStore(url, _in_process.setdefault(url, MemoryStore()), ordered=True)
    if parts.scheme == "file":
        if parts.netloc == "~":
            url = f"file://{quote(str(Path.home()))}{parts.path}"
            parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or not parts.path.strip("/"):
            raise InvalidInput(f"{url}: name a directory of this machine, as file:///path/of/it")
        return _local(url, Path(unquote(parts.path)), make)
    if not parts.netloc:
        raise InvalidInput(f"{url}: name a bucket, as {parts.scheme}://bucket/prefix")
    return _remote(url, parts.scheme, timeout)


def _local(url: str, path: Path, make: bool) -> ObjectStore:
    from obstore.store import LocalStore

    try:
        if (path / DATA).exists():
            raise InvalidInput(f"{url} is a memory's directory; publish to another directory")
        if make:
            path.mkdir(parents=True, exist_ok=True)
        elif not path.is_dir():
            raise MemoryNotFound(f"{url}: there is no such directory; publish a memory there")
        return ObjectStore(url, LocalStore(prefix=path, automatic_cleanup=True))
    except OSError as error:
        raise InvalidInput(f"{url}: {error.strerror}; name another directory") from error


def _remote(url: str, scheme: str, timeout: float) -> ObjectStore:
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    endpoint = next(filter(None, map(os.environ.get, _ENDPOINTS[scheme])), "")
    client: Any = {"timeout": timedelta(seconds=timeout), "connect_timeout": "5s"}
    if endpoint.startswith("http://"):
        client["allow_http"] = True  # as the store's own SDK does
    retry: Any = {
        "max_retries": 4,
        "retry_timeout": timedelta(seconds=timeout),
        "backoff": {"init_backoff": timedelta(milliseconds=100), "base": 2,
                    "max_backoff": timedelta(seconds=5)},
    }  # fmt: skip
    try:
        store = from_url(url, client_options=client, retry_config=retry)
    except (ValueError, BaseError) as error:
        raise InvalidInput(
            f"{url}: {first_line(error)}; give it as {scheme}://bucket/prefix, with credentials in "
            f"the environment ({CREDENTIALS[scheme]})"
        ) from error
    return ObjectStore(url, store, endpoint=endpoint, ordered=True)
