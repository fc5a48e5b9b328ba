"""A place of objects behind one small face: a prefix of an S3, Google or Azure bucket, a directory,
or this process's memory, by its URL.

Credentials are the engine's own: they come from the environment as its SDK has them, and stand in
no URL, no file and no message.
"""

import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from memstore.disk.files import DATA
from memstore.errors import InvalidInput, MemoryNotFound, ObjectNotFound, StoreUnavailable

SCHEMES = ("s3", "gs", "az", "file", "memory")
AT_ONCE = 16  # requests
GAP = 256 << 10  # bytes between two ranges that are read rather than asked for apart
_DELETED_AT_ONCE = 500
_LOCAL_LEFTOVER = re.compile(r".*#\d+")  # what a local store was writing when it was killed
_SECRET = re.compile("KEY|SECRET|TOKEN|PASSWORD|SAS|CREDENTIAL")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "specified bucket does not exist")
_NO_CREDENTIALS = ("169.254.169.254", "latest/api/token", "metadata.google", "redential", "NoAuth")
_INCOMPLETE = ("Account must be specified", "Missing", "service account", "redential")
_KEYS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_REFUSED = ("403 Forbidden", "401 Unauthorized", "AccessDenied", "InvalidAccessKeyId")
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL", "STORAGE_EMULATOR_HOST"),
}
_in_process: dict[str, Any] = {}  # stores of memory://, as long as the process lives


class Found(NamedTuple):
    """An object in a listing."""

    name: str
    size: int  # bytes
    modified: float  # seconds since 1970, by the store's clock


class Request(NamedTuple):
    """Parts of an object that are asked for as one."""

    start: int
    end: int
    ranges: list[int]  # which


def coalesced(ranges: Sequence[tuple[int, int]], gap: int = GAP) -> list[Request]:
    """Few requests for many ranges (first byte, length): one for those that lie up to `gap` bytes
    from each other.
    """
    requests: list[Request] = []
    for which in sorted(range(len(ranges)), key=lambda which: ranges[which]):
        start, length = ranges[which]
        if requests and start <= requests[-1].end + gap:
            last = requests[-1]
            last.ranges.append(which)
            requests[-1] = last._replace(end=max(last.end, start + length))
        else:
            requests.append(Request(start, start + length, [which]))
    return requests


class Place(Protocol):
    """Objects by name ("a/b"), each written whole or not at all.

    Every call raises StoreUnavailable where the store is away or refuses; reading what is not
    there raises ObjectNotFound.
    """

    url: str  # without credentials
    identity: str  # the URL and the endpoint that it is asked at: one store, one identity

    def get(self, name: str) -> memoryview:
        """An object."""

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Parts of an object, each (first byte, length), of just that length."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a new object; False, and nothing is changed, where there is one already."""

    def put(self, name: str, data: bytes) -> None:
        """Write an object, in place of another."""

    def names(self, prefix: str) -> Iterator[Found]:
        """The objects below a prefix ("a" has "a/b"), in no order."""

    def first(self, prefix: str) -> str | None:
        """The object below a prefix whose name sorts first."""

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; those that are not there are passed over."""

    def sweep(self, seconds: float) -> int:
        """Remove what writers that were killed so long ago left half written, where the store does
        not do so itself; how many.
        """


def open_place(
    url: str, *, make: bool = False, timeout: float = 30.0, retries: int = 4
) -> "ObjectPlace":
    """The place at a URL.

    make: a directory (file://) is made where there is none. timeout: seconds that a request may
    take; retries: of a request that failed in passing. Raises InvalidInput (a URL that cannot be
    used), MemoryNotFound (no such directory).
    """
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise InvalidInput(
            f"{_without_credentials(url)}: unknown scheme {parts.scheme!r}; use one of "
            f"{', '.join(f'{scheme}://' for scheme in SCHEMES)}"
        )
    if parts.username or parts.password or parts.query or parts.fragment:
        raise InvalidInput(
            f"{_without_credentials(url)}: a URL carries no credentials and no options; set them "
            "in the environment, as for the engine's own SDK"
        )
    url = url.rstrip("/") if parts.path.strip("/") or parts.netloc else url
    if parts.scheme == "memory":
        return ObjectPlace(url, _memory(url), ordered=True)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.strip("/"):
            raise InvalidInput(f"{url}: name a directory of this machine, as file:///path/of/it")
        return _local(url, Path(unquote(parts.path)), make)
    if not parts.netloc:
        raise InvalidInput(f"{url}: name a bucket, as {parts.scheme}://bucket/prefix")
    return _remote(url, parts.scheme, timeout, retries)


def _obstore() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise InvalidInput(
            "published memories need obstore: pip install 'memstore[share]'"
        ) from error
    return obstore


def _memory(url: str) -> Any:
    if url not in _in_process:
        _in_process[url] = _obstore().store.MemoryStore()
    return _in_process[url]


def _local(url: str, path: Path, make: bool) -> "ObjectPlace":
    store = _obstore().store.LocalStore
    try:
        if (path / DATA).exists():
            raise InvalidInput(f"{url} is a memory's own directory; name another for what it holds")
        if make:
            path.mkdir(parents=True, exist_ok=True)
        elif not path.is_dir():
            raise MemoryNotFound(f"{url}: there is no such directory; publish a memory there")
        return ObjectPlace(url, store(prefix=path), directory=path)
    except OSError as error:
        raise InvalidInput(f"{url}: {error.strerror}; name another directory") from error


def _remote(url: str, scheme: str, timeout: float, retries: int) -> "ObjectPlace":
    obstore = _obstore()
    endpoint = next(filter(None, map(os.environ.get, _ENDPOINTS[scheme])), "")
    client: dict[str, Any] = {"timeout": timedelta(seconds=timeout), "connect_timeout": "5s"}
    if endpoint.startswith("http://"):
        client["allow_http"] = True  # who says so means it, as with the engine's own SDK
    more: dict[str, Any] = {}
    if scheme == "s3" and (provider := _aws_profile()) is not None:
        more["credential_provider"] = provider
    try:
        store = obstore.store.from_url(
            url,
            client_options=client,
            retry_config={
                "max_retries": retries,
                "retry_timeout": timedelta(seconds=timeout),
                "backoff": {"init_backoff": timedelta(milliseconds=100), "base": 2,
                            "max_backoff": timedelta(seconds=5)},
            },
            **more,
        )  # fmt: skip
    except (ValueError, obstore.exceptions.BaseError) as error:
        if any(sign in str(error) for sign in _INCOMPLETE):
            raise StoreUnavailable(
                f"{url}: incomplete credentials ({_line(error)}); set {_KEYS[scheme]} in the "
                "environment"
            ) from error
        raise InvalidInput(f"{url}: {_line(error)}; give it as {scheme}://bucket/prefix") from error
    return ObjectPlace(url, store, endpoint=endpoint, ordered=True)


def _aws_profile() -> Any:
    """Credentials of a profile or a login, by boto3 where that is installed; the keys of the
    environment, roles of machines and tokens are read without it.
    """
    names = (
        "AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    )  # fmt: skip
    if any(os.environ.get(name) for name in names):
        return None
    configured = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    if not (os.environ.get("AWS_PROFILE") or Path(configured).expanduser().is_file()):
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider

        return Boto3CredentialProvider()
    except ImportError as error:
        raise InvalidInput(
            "credentials of a profile need boto3 (pip install boto3); or set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        ) from error
    except Exception as error:  # boto3's own, of every kind
        raise StoreUnavailable(f"no credentials: {_line(error)}; set AWS_PROFILE") from error


class ObjectPlace:
    """A Place over one of obstore's stores. May be used by several threads."""

    def __init__(
        self,
        url: str,
        store: Any,
        *,
        endpoint: str = "",
        ordered: bool = False,
        directory: Path | None = None,
    ) -> None:
        """Use open_place. ordered: listings are in order of names; directory: of a local one."""
        self.url, self.store = url, store
        self.identity = f"{url} {endpoint}".rstrip()
        self._ordered, self._directory = ordered, directory
        self._obstore = _obstore()

    def get(self, name: str) -> memoryview:
        """An object."""
        try:
            return memoryview(self._obstore.get(self.store, name).bytes())
        except Exception as error:
            raise self._named(error, name) from error

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Parts of an object, each (first byte, length), of just that length."""
        # Not by obstore's get_ranges, which panics where an object has become shorter.
        requests = coalesced(ranges)
        if len(requests) == 1:
            held = [self._range(name, requests[0])]
        else:
            held = list(self._pool.map(lambda request: self._range(name, request), requests))
        parts = {}
        for request, data in zip(requests, held):
            for which in request.ranges:
                start, length = ranges[which]
                parts[which] = data[start - request.start : start - request.start + length]
        return [parts[which] for which in range(len(ranges))]

    def _range(self, name: str, request: "Request") -> memoryview:
        start, end = request.start, request.end
        try:
            found = self._obstore.get_range(self.store, name, start=start, end=end)
        except Exception as error:
            raise self._named(error, name) from error
        if len(found) != end - start:
            raise StoreUnavailable(f"{self.url}: {name} was truncated on its way; try again")
        return memoryview(found)

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(AT_ONCE, thread_name_prefix="memstore-place")

    def create(self, name: str, data: bytes) -> bool:
        """Write a new object; False, and nothing is changed, where there is one already."""
        try:
            self._obstore.put(self.store, name, data, mode="create", use_multipart=False)
        except Exception as error:
            exceptions = self._obstore.exceptions
            taken = (FileExistsError, exceptions.AlreadyExistsError, exceptions.PreconditionError)
            if isinstance(error, taken):
                return False
            raise self._named(error, name) from error
        return True

    def put(self, name: str, data: bytes) -> None:
        """Write an object, in place of another."""
        try:
            self._obstore.put(self.store, name, data, use_multipart=False)
        except Exception as error:
            raise self._named(error, name) from error

    def names(self, prefix: str) -> Iterator[Found]:
        """The objects below a prefix, in no order."""
        try:
            for page in self._obstore.list(self.store, prefix, chunk_size=1000):
                for found in page:
                    yield Found(found["path"], found["size"], found["last_modified"].timestamp())
        except FileNotFoundError:
            return  # a directory that is not there has none
        except Exception as error:
            raise self._named(error, prefix) from error

    def first(self, prefix: str) -> str | None:
        """The object below a prefix whose name sorts first."""
        found = (entry.name for entry in self.names(prefix))
        return next(found, None) if self._ordered else min(found, default=None)

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; those that are not there are passed over."""
        for at in range(0, len(names), _DELETED_AT_ONCE):
            some = list(names[at : at + _DELETED_AT_ONCE])
            try:
                self._delete(some)
            except ObjectNotFound:
                for name in some:
                    try:
                        self._delete([name])
                    except ObjectNotFound:
                        continue

    def _delete(self, names: list[str]) -> None:
        try:
            self._obstore.delete(self.store, names)
        except Exception as error:
            raise self._named(error, names[0]) from error

    def sweep(self, seconds: float) -> int:
        """Remove what writers that were killed so long ago left half written in a directory."""
        if self._directory is None:
            return 0
        removed, before = 0, time.time() - seconds
        for folder, _, files in os.walk(self._directory, topdown=False):
            for file in filter(_LOCAL_LEFTOVER.fullmatch, files):
                with suppress(OSError):  # another swept, or it is none of ours
                    path = Path(folder, file)
                    if path.stat().st_mtime <= before:
                        path.unlink()
                        removed += 1
            with suppress(OSError):  # it is in use
                if Path(folder) != self._directory and os.stat(folder).st_mtime <= before:
                    os.rmdir(folder)
        return removed

    def _named(self, error: Exception, name: str) -> Exception:
        """What went wrong, in one line that holds no credentials."""
        exceptions, text = self._obstore.exceptions, str(error)
        if any(sign in text for sign in _NO_BUCKET):
            return MemoryNotFound(f"{self.url}: there is no such bucket; make it, or name another")
        if isinstance(error, (FileNotFoundError, exceptions.NotFoundError)):
            return ObjectNotFound(f"{self.url}: there is no {name}; it was removed meanwhile")
        if any(sign in text for sign in _NO_CREDENTIALS):
            return StoreUnavailable(
                f"{self.url}: no credentials; set them in the environment, as for the engine's own "
                f"SDK ({_KEYS.get(self.url.partition(':')[0], 'see docs/share.md')}, say)"
            )
        refusals = (
            exceptions.PermissionDeniedError,
            exceptions.UnauthenticatedError,
            PermissionError,
        )
        if isinstance(error, refusals) or any(sign in text for sign in _REFUSED):
            return StoreUnavailable(
                f"{self.url}: access is refused; check the credentials in the environment and the "
                "bucket's policy, or the directory's mode"
            )
        return StoreUnavailable(f"{self.url}: {_line(error)}; try again, or check the address")


def _line(error: Exception) -> str:
    """The first line of a message, without what the environment keeps secret."""
    text = str(error).strip().split("\n", 1)[0].split(": <?xml")[0][:300]
    for name, value in os.environ.items():
        path = value.startswith("/") and Path(value).parent != Path("/")  # to a file of them
        if len(value) >= 4 and not path and _SECRET.search(name.upper()):
            text = text.replace(value, "***")
    return _without_credentials(text).rstrip(".") or type(error).__name__


def _without_credentials(text: str) -> str:
    """A text whose URLs have neither users, passwords nor queries."""
    text = re.sub(r"(?<=://)[^/@\s]*@", "", text)
    return re.sub(r"(?<=\w)\?\S*", "", text)
