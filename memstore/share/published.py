"""A publication as one manifest has it: its documents, read page by page as asked for; and the
newest manifest of each object store that was read, by which an older one in its place is noticed.
"""

import fcntl
import os
import struct
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path

from memstore.errors import CorruptMemory, MemoryNotFound, StaleMemory
from memstore.share.calls import at_once
from memstore.share.entries import Entry
from memstore.share.manifest import (
    Manifest,
    PageRef,
    manifest_name,
    newest_number,
    read_manifest,
    read_page,
)
from memstore.share.object_store import ObjectStore

Seen = tuple[int, bytes]
"""Number and id of a manifest."""

_SEEN = struct.Struct("<Q16s")
_lock = threading.Lock()
_newest: dict[str, Seen] = {}  # by identity of the object store, in this process


class Published:
    """A publication as one manifest has it. May be used by several threads."""

    def __init__(
        self, objects: ObjectStore, manifest: Manifest, before: "Published | None" = None
    ) -> None:
        """Use Published.open. before: an earlier one, whose pages are not read again."""
        self.objects, self.manifest = objects, manifest
        held: dict[str, list[Entry]] = {} if before is None else before._pages
        self._pages: dict[str, list[Entry]] = {
            page.name: held[page.name] for page in manifest.pages if page.name in held
        }

    @classmethod
    def open(
        cls, objects: ObjectStore, *, folder: Path | None = None, at_least: int | None = None
    ) -> "Published":
        """The newest.

        folder: remembers which that is. at_least: its number, whatever was read before. Raises
        MemoryNotFound, CorruptMemory, StaleMemory, NewerFormat, StoreUnavailable.
        """
        found = cls.newest(objects, folder=folder, at_least=at_least)
        if found is None:
            raise MemoryNotFound(
                f"{objects.url} holds no published memory; memstore share push makes one"
            )
        return found

    @classmethod
    def newest(
        cls, objects: ObjectStore, *, folder: Path | None = None, at_least: int | None = None
    ) -> "Published | None":
        """The newest, or None where nothing was published. Raises as `open` does."""
        before = newest_seen(objects.identity, folder)
        number = newest_number(objects)
        if number is None:
            return None
        found = cls.at(objects, number)
        _check_newest(objects.url, found.seen, before, at_least)
        note_newest(objects.identity, found.seen, folder, reset=at_least is not None)
        return found

    @property
    def seen(self) -> Seen:
        """Which manifest it is."""
        return self.manifest.number, self.manifest.id

    @classmethod
    def at(
        cls, objects: ObjectStore, number: int, before: "Published | None" = None
    ) -> "Published":
        """The memory as manifest `number` has it. before: an earlier one, whose pages are not read
        again. Raises as `open` does, and ObjectNotFound.
        """
        name = manifest_name(number)
        manifest = read_manifest(objects, number)
        if manifest.number != number:
            raise CorruptMemory(
                f"{objects.url}: {name} is another manifest; restore it from a copy"
            )
        return cls(objects, manifest, before)

    def documents(self) -> list[Entry]:
        """Every document, in order of names."""
        return [entry for page in self.read_pages(self.manifest.pages) for entry in page]

    def entry(self, name: str) -> Entry | None:
        """One document by name, or None."""
        return self.entries([name]).get(name)

    def entries(self, names: Sequence[str]) -> dict[str, Entry]:
        """Documents by name; those that there are. Reads the pages that may hold them alone."""
        wanted = {*names}
        pages = sorted({self.page_of(name) for name in wanted} - {-1})
        found = self.read_pages([self.manifest.pages[page] for page in pages])
        return {e.row.name: e for page in found for e in page if e.row.name in wanted}

    def page_of(self, name: str) -> int:
        """Which page may hold a document; -1 for none."""
        return bisect_right(self._firsts, name) - 1

    @cached_property
    def _firsts(self) -> list[str]:
        return [page.first for page in self.manifest.pages]

    def read_pages(self, pages: Sequence[PageRef]) -> list[list[Entry]]:
        """The documents of pages, all missing ones read at the same time."""
        missing = [page for page in pages if page.name not in self._pages]
        for page, entries in zip(missing, at_once(partial(read_page, self.objects), missing)):
            self._pages[page.name] = entries
        return [self._pages[page.name] for page in pages]


# Rollback


def newest_seen(identity: str, folder: Path | None = None) -> Seen | None:
    """The newest manifest of an object store that was read, by this process or, as a folder
    remembers it, by an earlier one.
    """
    with _lock:
        here = _newest.get(identity)
    there = None
    if folder is not None:
        with suppress(OSError), _remembered(folder, identity, os.O_RDONLY) as file:
            there = _unpacked(os.pread(file, _SEEN.size, 0))
    return max(filter(None, (here, there)), key=lambda seen: seen[0], default=None)


def note_newest(
    identity: str, seen: Seen, folder: Path | None = None, *, reset: bool = False
) -> None:
    """Remember that a manifest was read, also in a folder; reset: forget a newer one."""
    with _lock:
        if reset or identity not in _newest or _newest[identity][0] < seen[0]:
            _newest[identity] = seen
    if folder is None:
        return
    with (
        suppress(OSError),  # a full disk remembers nothing
        _remembered(folder, identity, os.O_RDWR | os.O_CREAT) as file,
    ):
        before = _unpacked(os.pread(file, _SEEN.size, 0))
        if reset or before is None or before[0] < seen[0]:
            os.pwrite(file, _SEEN.pack(*seen), 0)


@contextmanager
def _remembered(folder: Path, identity: str, flags: int) -> Iterator[int]:
    """The locked file in which a folder remembers the newest manifest of an object store."""
    name = f"newest-{blake2b(identity.encode(), digest_size=20).hexdigest()}"
    file = os.open(folder / name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)


def _unpacked(data: bytes) -> Seen | None:
    return _SEEN.unpack(data) if len(data) == _SEEN.size else None


def _check_newest(url: str, found: Seen, before: Seen | None, at_least: int | None) -> None:
    """Is the newest manifest of an object store as new as was asked for, or, where nothing was, as
    what was read before? Raises StaleMemory.
    """
    number = found[0]
    if at_least is not None:
        if number < at_least:
            raise StaleMemory(
                f"{url}: its newest manifest is {number}, and one of {at_least} at least was asked "
                "for; publish the newer state again, or ask for less"
            )
        return
    if before is None or number > before[0] or found == before:
        return
    what = f"manifest {number}"
    if number == before[0]:
        what = f"another manifest {number}"
    raise StaleMemory(
        f"{url}: its newest is {what}, but manifest {before[0]} was read before, so somebody has "
        f"put back an older state; publish again, or accept it by --at-least {number}"
    )
