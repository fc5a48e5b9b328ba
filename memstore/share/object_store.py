"""An object store behind one small interface; its errors are errors of memstore, each one line
without credentials.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from memstore.errors import (
    CorruptMemory,
    MemoryClosed,
    MemoryNotFound,
    MemstoreError,
    ObjectNotFound,
    StoreUnavailable,
)
from memstore.share.calls import begin, wait_for

T = TypeVar("T")

OBJECT_BYTES = 256 << 20  # of any object that is read whole; segments of 32 MB are the largest
_DELETED_AT_ONCE = 500
_asked_by: int | None = None  # the first process that called an object store
_LOCAL_LEFTOVER = re.compile(r".*#\d+")  # a file that a killed process was writing


class Found(NamedTuple):
    """An object in a listing."""

    name: str
    size: int  # bytes
    modified: float  # seconds since 1970, by the store's clock


class Extent(NamedTuple):
    """Consecutive bytes of an object."""

    name: str
    offset: int
    length: int


class ObjectStore:
    """Objects by name ("a/b"), each written whole or not at all, in one of obstore's stores. May be
    used by several threads.

    url: without credentials. identity: the URL and its endpoint; one store has one identity. Every
    call raises StoreUnavailable where the store is unavailable or refuses, and MemoryClosed in a
    fork of a process that has called one; reading a missing object raises ObjectNotFound.
    """

    def __init__(
        self,
        url: str,
        store: Any,
        *,
        endpoint: str = "",
        ordered: bool = False,
        directory: Path | None = None,
    ) -> None:
        """Use open_object_store. ordered: listings are in order of names. directory: of a local
        store.
        """
        self.url, self.store = url, store
        self.identity = f"{url} {endpoint}".rstrip()
        self._ordered, self._directory = ordered, directory
        import obstore
        import obstore.exceptions

        self._obstore: Any = obstore

    def _check_process(self) -> None:
        """A fork of a process lacks obstore's threads, and would wait for ever: MemoryClosed."""
        global _asked_by
        if _asked_by is None:
            _asked_by = os.getpid()
        if _asked_by != os.getpid():
            raise MemoryClosed(
                f"{self.url}: process {_asked_by} had asked object stores when this one was forked "
                "from it; open it in one that is spawned instead"
            )

    def get(self, name: str, most: int = OBJECT_BYTES) -> memoryview:
        """An object. One of more than `most` bytes raises CorruptMemory, and is not read."""
        self._check_process()

        def read() -> memoryview:
            found = self._obstore.get(self.store, name)  # its head alone
            if found.meta["size"] > most:
                raise CorruptMemory(
                    f"{self.url}: {name} is damaged (it has {found.meta['size']:,} bytes, which "
                    f"should be {most:,} at most); restore it from a copy, or publish to another "
                    "prefix"
                )
            return memoryview(found.bytes())

        return self._asked(read, name)

    def _asked(self, work: Callable[[], T], name: str) -> T:
        """What a request returns. Ctrl-C, which only the main thread gets, does not wait for it."""
        try:
            if threading.current_thread() is threading.main_thread():
                asked = begin(lambda _: work(), [None], name="memstore-object")
                wait_for(asked)
                return asked[0].result()
            return work()
        except MemstoreError:
            raise
        except Exception as error:
            raise object_error(error, self.url, name) from error

    def get_range(self, name: str, offset: int, length: int) -> memoryview:
        """Part of an object, of exactly this length."""
        self._check_process()
        found = self._asked(
            lambda: self._obstore.get_range(self.store, name, start=offset, length=length), name
        )
        if len(found) != length:
            raise StoreUnavailable(f"{self.url}: {name} was truncated on its way; try again")
        return memoryview(found)

    def create(self, name: str, data: bytes) -> bool:
        """Write a new object; return False, and change nothing, where there is one already."""
        self._check_process()
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
        """Write an object, in place of any other of this name."""
        self._check_process()
        self._asked(lambda: self._obstore.put(self.store, name, data, use_multipart=False), name)

    def names(self, prefix: str) -> Iterator[Found]:
        """The objects below a prefix ("a" has "a/b"), in no order."""
        self._check_process()
        pages = iter(self._obstore.list(self.store, prefix, chunk_size=1000))

        def read() -> Sequence[Any]:
            try:
                return next(pages, ())
            except FileNotFoundError:
                return ()  # a missing directory has none

        while page := self._asked(read, prefix):
            for found in page:
                yield Found(found["path"], found["size"], found["last_modified"].timestamp())

    def first(self, prefix: str) -> str | None:
        """The object below a prefix whose name sorts first."""
        found = (entry.name for entry in self.names(prefix))
        return next(found, None) if self._ordered else min(found, default=None)

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; missing ones are passed over."""
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
        self._check_process()
        self._asked(lambda: self._obstore.delete(self.store, names), names[0])

    def sweep(self, seconds: float) -> int:
        """Remove half-written files that are older than so many seconds from a directory."""
        if self._directory is None:
            return 0
        removed, before = 0, time.time() - seconds
        for folder, _, files in os.walk(self._directory, topdown=False):
            for file in filter(_LOCAL_LEFTOVER.fullmatch, files):
                with suppress(OSError):  # another process removed it, or owns it
                    path = Path(folder, file)
                    if path.stat().st_mtime <= before:
                        path.unlink()
                        removed += 1
            with suppress(OSError):  # it is in use
                if Path(folder) != self._directory and os.stat(folder).st_mtime <= before:
                    os.rmdir(folder)
        return removed


# Errors

CREDENTIALS = {  # in the environment
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_SECRET = re.compile("KEY|SECRET|TOKEN|PASSWORD|SAS|CREDENTIAL")
_FILE = re.compile("_(FILE|PATH)$|^GOOGLE_APPLICATION_CREDENTIALS$")  # a path of secrets
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "specified bucket does not exist")
_NO_CREDENTIALS = ("169.254.169.254", "latest/api/token", "metadata.google", "redential", "NoAuth")
_REFUSED = ("403 Forbidden", "401 Unauthorized", "AccessDenied", "InvalidAccessKeyId")


def object_error(error: Exception, url: str, name: str) -> MemstoreError:
    """The error for an object, or a prefix of objects, of the object store at a URL."""
    from obstore import exceptions

    text = str(error)
    if any(sign in text for sign in _NO_BUCKET):
        return MemoryNotFound(f"{url}: there is no such bucket; make it, or name another")
    if isinstance(error, (FileNotFoundError, exceptions.NotFoundError)):
        return ObjectNotFound(f"{url}: there is no {name}; another process removed it")
    if any(sign in text for sign in _NO_CREDENTIALS):
        return StoreUnavailable(
            f"{url}: no credentials; set them in the environment, as for the engine's own "
            f"SDK ({CREDENTIALS.get(url.partition(':')[0], 'see docs/sharing.md')}, say)"
        )
    refusals = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError)
    if isinstance(error, refusals) or any(sign in text for sign in _REFUSED):
        return StoreUnavailable(
            f"{url}: access is refused; check the credentials in the environment and the "
            "bucket's policy, or the directory's mode"
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
    for value in sorted(secrets, key=len, reverse=True):  # one may begin with another
        text = text.replace(value, "***")
    return without_credentials(text)[:300].rstrip(".") or type(error).__name__


def without_credentials(text: str) -> str:
    """The text, with users, passwords and queries removed from its URLs."""
    # A password may hold a slash or an @ that should have been encoded.
    text = re.sub(r"(?<=://)([^/\s]*:\S*@|[^/\s]*@)", "", text)
    return re.sub(r"((?<=\w)|(?<=/))\?\S*", "", text)
