"""An object store behind one small face."""

import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from memstore.errors import (
    CorruptMemory,
    MemoryClosed,
    MemstoreError,
    ObjectNotFound,
    StoreUnavailable,
)
from memstore.share.objects.daemon_threads import at_once, begin, wait_for
from memstore.share.objects.object_errors import object_error
from memstore.share.objects.sizes import OBJECT_BYTES

T = TypeVar("T")

GAP = 256 << 10  # bytes between two ranges that are read rather than asked for apart
_DELETED_AT_ONCE = 500
_asked_by: int | None = None  # the process that did first
_LOCAL_LEFTOVER = re.compile(r".*#\d+")  # what a local store was writing when it was killed


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


class ObjectStore:
    """Objects by name ("a/b"), each written whole or not at all, in one of obstore's stores. May be
    used by several threads.

    url: without credentials. identity: the URL and the endpoint that it is asked at: one store, one
    identity. Every call raises StoreUnavailable where the store is away or refuses, and
    MemoryClosed in a fork of a process that has made one; reading what is not there raises
    ObjectNotFound, and what is no regular file of a directory CorruptMemory.
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
        one.
        """
        self.url, self.store = url, store
        self.identity = f"{url} {endpoint}".rstrip()
        self._ordered, self._directory = ordered, directory
        import obstore
        import obstore.exceptions

        self._obstore: Any = obstore

    def _check_process(self) -> None:
        """obstore's threads are not there in a fork of their process: it would wait for ever."""
        global _asked_by
        if _asked_by is None:
            _asked_by = os.getpid()
        if _asked_by != os.getpid():
            raise MemoryClosed(
                f"{self.url}: process {_asked_by} had asked object stores when this one was forked "
                "from it; open it in one that is spawned instead"
            )

    def get(self, name: str, most: int = OBJECT_BYTES) -> memoryview:
        """An object. One of more than `most` bytes is CorruptMemory, and not read."""
        self._check_process()
        self._check_regular(name)

        def read() -> memoryview:
            found = self._obstore.get(self.store, name)  # its head; the rest is not read yet
            if found.meta["size"] > most:
                raise CorruptMemory(
                    f"{self.url}: {name} is damaged (it has {found.meta['size']:,} bytes, which "
                    f"should be {most:,} at most); restore it from a copy, or publish to another "
                    "prefix"
                )
            return memoryview(found.bytes())

        return self._asked(read, name)

    def _asked(self, work: Callable[[], T], name: str) -> T:
        """What a request returns; Ctrl-C, which only the main thread hears, does not wait for
        it.
        """
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

    def _check_regular(self, name: str) -> None:
        """Is this no pipe or device of a directory, which would be waited for? Raises
        CorruptMemory.
        """
        if self._directory is None:
            return
        with suppress(OSError, ValueError):  # what else is wrong with it, reading tells
            mode = os.stat(self._directory / name).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise CorruptMemory(
                    f"{self.url}: {name} is damaged (it is no regular file); restore it from a "
                    "copy, or publish to another prefix"
                )

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Parts of an object, each (first byte, length), of just that length."""
        self._check_process()
        self._check_regular(name)
        # Not by obstore's get_ranges, which panics where an object has become shorter.
        requests = coalesced(ranges)
        held = at_once(partial(self._range, name), requests)
        parts = {}
        for request, data in zip(requests, held):
            for which in request.ranges:
                start, length = ranges[which]
                parts[which] = data[start - request.start : start - request.start + length]
        return [parts[which] for which in range(len(ranges))]

    def _range(self, name: str, request: "Request") -> memoryview:
        start, end = request.start, request.end
        found = self._asked(
            lambda: self._obstore.get_range(self.store, name, start=start, end=end), name
        )
        if len(found) != end - start:
            raise StoreUnavailable(f"{self.url}: {name} was truncated on its way; try again")
        return memoryview(found)

    def create(self, name: str, data: bytes) -> bool:
        """Write a new object; False, and nothing is changed, where there is one already."""
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
        """Write an object, in place of another."""
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
                return ()  # a directory that is not there has none

        while page := self._asked(read, prefix):
            for found in page:
                yield Found(found["path"], found["size"], found["last_modified"].timestamp())

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
        self._check_process()
        self._asked(lambda: self._obstore.delete(self.store, names), names[0])

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
