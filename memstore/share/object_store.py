"""A small interface to an object store, whose errors are memstore's own: one line each, without
credentials.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from memstore.errors import (
    CorruptMemory,
    MemoryClosed,
    MemoryNotFound,
    MemstoreError,
    ObjectNotFound,
    StoreUnavailable,
)
from memstore.share.parallel import at_once, interruptible
from memstore.share.ranges import OBJECT_BYTES

T = TypeVar("T")

_asked_by: int | None = None  # id of the process that first called an object store


class Found(NamedTuple):
    """An object in a listing."""

    name: str
    size: int  # bytes
    modified: float  # seconds since 1970, by the store's clock


class ObjectStore:
    """Objects by name ("a/b"), each written whole or not at all, in one of obstore's stores, which
    retries failed requests and has timeouts. Safe for several threads.

    url: without credentials. identity: the URL and its endpoint, one for each store. Every call
    raises StoreUnavailable if the store is unavailable or refuses, and MemoryClosed in a fork of a
    process that has called a store; reading a missing object raises ObjectNotFound.
    """

    def __init__(self, url: str, store: Any, *, endpoint: str = "", ordered: bool = False) -> None:
        """Use open_object_store. ordered: are listings in order of names."""
        import obstore.exceptions

        self.url, self.store = url, store
        self.identity = f"{url} {endpoint}".rstrip()
        self._ordered, self._obstore = ordered, obstore

    def get(self, name: str) -> memoryview:
        """The bytes of an object. Raises CorruptMemory, without reading it, above OBJECT_BYTES."""

        def read() -> memoryview:
            found = self._obstore.get(self.store, name)  # metadata; bytes() reads the object
            if found.meta["size"] > OBJECT_BYTES:
                raise CorruptMemory(
                    f"{self.url}: {name} is damaged (it has {found.meta['size']:,} bytes, which "
                    f"should be {OBJECT_BYTES:,} at most); restore it from a copy, or publish to "
                    "another prefix"
                )
            return memoryview(found.bytes())

        return self._asked(read, name)

    def get_range(self, name: str, offset: int, length: int) -> memoryview:
        """Exactly `length` bytes of an object. Raises CorruptMemory if it ends before."""
        found = self._asked(
            lambda: self._obstore.get_range(self.store, name, start=offset, length=length), name
        )
        if len(found) != length:
            raise CorruptMemory(f"{self.url}: {name} is truncated; publish it again with --check")
        return memoryview(found)

    def create(self, name: str, data: bytes) -> bool:
        """Write a new object; return False, and change nothing, if it exists already."""
        exceptions = self._obstore.exceptions
        taken = (FileExistsError, exceptions.AlreadyExistsError, exceptions.PreconditionError)

        def write() -> bool:
            try:
                self._obstore.put(self.store, name, data, mode="create", use_multipart=False)
            except taken:
                return False
            return True

        return self._asked(write, name)

    def put(self, name: str, data: bytes) -> None:
        """Write an object, replacing an existing one."""
        self._asked(lambda: self._obstore.put(self.store, name, data, use_multipart=False), name)

    def names(self, prefix: str) -> Iterator[Found]:
        """The objects below a prefix ("a" has "a/b"), in any order."""
        list_pages = self._obstore.list
        pages = self._asked(lambda: iter(list_pages(self.store, prefix, chunk_size=1000)), prefix)

        def read() -> Sequence[Any]:
            try:
                return next(pages, ())
            except FileNotFoundError:
                return ()  # a missing directory has no objects

        while page := self._asked(read, prefix):
            for found in page:
                if found["path"] != prefix:  # an empty object "a/", with which tools mark a folder
                    yield Found(found["path"], found["size"], found["last_modified"].timestamp())

    def first(self, prefix: str) -> str | None:
        """The object below a prefix whose name sorts first."""
        found = (entry.name for entry in self.names(prefix))
        return next(found, None) if self._ordered else min(found, default=None)

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; missing ones are ignored."""
        at_once(self._delete, names)

    def _delete(self, name: str) -> None:
        with suppress(ObjectNotFound):
            self._asked(lambda: self._obstore.delete(self.store, name), name)

    def _asked(self, work: Callable[[], T], name: str) -> T:
        """The result of a request."""
        global _asked_by
        if _asked_by is None:
            _asked_by = os.getpid()
        if _asked_by != os.getpid():  # a fork lacks obstore's threads, and would hang
            raise MemoryClosed(
                f"{self.url}: process {_asked_by} used an object store before it forked this one; "
                "start processes that use one with spawn, not fork"
            )
        try:
            return interruptible(work)
        except MemstoreError:
            raise
        except Exception as error:
            raise object_error(error, self.url, name) from error


# Errors

CREDENTIALS = {  # variables of the environment, by scheme
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_SECRET = re.compile("KEY|SECRET|TOKEN|PASSWORD|SAS|CREDENTIAL")
_FILE = re.compile("_(FILE|PATH)$|^GOOGLE_APPLICATION_CREDENTIALS$")  # paths, not secrets
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "specified bucket does not exist")
_TOO_SHORT = ("range was invalid", "invalid range", "status code: 416")  # range beyond the end
_REFUSED = (
    "403 Forbidden", "401 Unauthorized", "AccessDenied", "InvalidAccessKeyId", "ermission denied",
    "169.254.169.254", "latest/api/token", "metadata.google", "redential", "NoAuth",
)  # fmt: skip


def object_error(error: Exception, url: str, name: str) -> MemstoreError:
    """The error for an object, or a prefix of objects, of the object store at a URL."""
    from obstore import exceptions

    text = str(error)
    if any(sign in text.lower() for sign in _TOO_SHORT):
        return CorruptMemory(f"{url}: {name} is truncated; publish it again with --check")
    if any(sign in text for sign in _NO_BUCKET):
        return MemoryNotFound(f"{url}: the bucket does not exist; create it, or name another")
    if isinstance(error, (FileNotFoundError, exceptions.NotFoundError)):
        return ObjectNotFound(
            f"{url}: there is no {name}; try again, or publish again with --check"
        )
    if any(sign in text for sign in _REFUSED):
        scheme = url.partition(":")[0]
        return StoreUnavailable(
            f"{url}: access is refused, or there are no credentials; set them in the environment, "
            f"as for the store's own SDK ({CREDENTIALS.get(scheme, 'or its mode')})"
        )
    return StoreUnavailable(f"{url}: {first_line(error)}; try again, or check the address")


def first_line(error: Exception) -> str:
    """The first line of a message, without secrets of the environment."""
    text = str(error).strip().split("\n", 1)[0].split(": <?xml")[0]
    secrets = [
        value
        for name, value in os.environ.items()
        if len(value) >= 4 and _SECRET.search(name.upper()) and not _FILE.search(name.upper())
    ]
    for value in sorted(secrets, key=len, reverse=True):  # one may be a prefix of another
        text = text.replace(value, "***")
    return without_credentials(text)[:300].rstrip(".") or type(error).__name__


def without_credentials(text: str) -> str:
    """The text, with users, passwords and queries removed from its URLs."""
    # a password may contain a slash or an @ that should have been encoded
    text = re.sub(r"(?<=://)([^/\s]*:\S*@|[^/\s]*@)", "", text)
    return re.sub(r"((?<=\w)|(?<=/))\?\S*", "", text)
