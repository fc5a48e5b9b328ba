"""The manifests of a published memory: numbered, each written once, each naming all that the memory
holds; the newest is the memory.

Manifest n is the object `manifests/` and 2**64 - 1 - n in 16 hexadecimal digits, so that the newest
is first in a listing. It holds the memory's signature, codec and selector, and where the pages of
its table of documents are; a page (`pages/` and a random number) holds the rows of up to 256
documents that are neighbours by name, and their pieces. A change writes the pages that it touches,
then manifest n + 1, by a create that fails where there is one: the loser of a race reads the
winner's and tries again. So readers see a change whole or not at all, and none is lost.
"""

import os
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from memstore.decode import Amount, Positive
from memstore.disk.format.index_spec import IndexSpec
from memstore.disk.format.signature import Signature
from memstore.errors import CorruptMemory, InvalidConfig, MemoryNotFound, StoreUnavailable
from memstore.share.format.document_pages import (
    PAGE_ENTRIES,
    Entry,
    Name,
    PageRef,
    read_page,
    write_pages,
)
from memstore.share.format.packed_objects import open_packed, pack
from memstore.share.format.rollback import Remembering, Seen, check_newest, newest_seen, note_newest
from memstore.share.objects.daemon_threads import at_once
from memstore.share.objects.object_store import Place
from memstore.share.objects.sizes import PACKED_BYTES

FORMAT = 4
MANIFESTS = "manifests"
_MANIFEST = b"mRmanife"
_LAST = (1 << 64) - 1
_DIGITS = re.compile("[0-9a-f]{16}")
_TRIES = 100


class _Manifest(msgspec.Struct, forbid_unknown_fields=True):
    number: Positive
    id: Annotated[bytes, Meta(min_length=16, max_length=16)]
    published: Amount  # seconds since 1970
    signature: dict[str, Any]
    codec: Name
    created: Amount
    selector: dict[str, Any] | None
    pages: list[PageRef]


@dataclass(frozen=True)
class Manifest:
    """A published memory as one manifest has it."""

    number: int
    id: bytes  # random
    published: float  # when
    signature: Signature
    codec: str  # of the first publisher; records say their own
    created: float
    selector: IndexSpec | None
    pages: tuple[PageRef, ...]  # in order of names

    @property
    def documents(self) -> int:
        """How many."""
        return sum(page.documents for page in self.pages)

    def encode(self) -> bytes:
        """The object."""
        selector = None if self.selector is None else self.selector.to_dict()
        values = {name: getattr(self, name) for name in ("number", "id", "published", "codec")}
        values |= {"signature": self.signature.to_dict(), "created": self.created}
        values |= {"selector": selector, "pages": self.pages}
        return pack(_MANIFEST, FORMAT, values)

    @classmethod
    def decode(cls, data: bytes | memoryview, what: str) -> "Manifest":
        """The manifest of an object. Raises CorruptMemory, NewerFormat."""
        held = open_packed(_MANIFEST, FORMAT, data, _Manifest, what)
        try:
            form = None if held.selector is None else IndexSpec.decode(held.selector)
            names = [page.first for page in held.pages]
            if names != sorted(set(names)):
                raise ValueError("its pages are not in order")
            return cls(
                held.number, held.id, held.published, Signature.from_dict(held.signature),
                held.codec, held.created, form, tuple(held.pages),
            )  # fmt: skip
        except (ValueError, IndexError, InvalidConfig) as error:
            raise CorruptMemory(
                f"{what} is damaged ({error}); restore it from a copy, or publish to another prefix"
            ) from error


def manifest_name(number: int) -> str:
    """The object of a manifest."""
    return f"{MANIFESTS}/{_LAST - number:016x}"


def manifest_number(name: str) -> int:
    """The number of a manifest by its object. Raises ValueError."""
    folder, _, digits = name.rpartition("/")
    if folder != MANIFESTS or not _DIGITS.fullmatch(digits):
        raise ValueError(f"{name} is no manifest")
    return _LAST - int(digits, 16)


def newest_number(place: Place) -> int | None:
    """The number of the newest manifest, by one listing; None where there is none. Raises
    StoreUnavailable, MemoryNotFound (no bucket).
    """
    name = place.first(MANIFESTS)
    if name is None:
        return None
    try:
        return manifest_number(name)
    except ValueError as error:
        raise CorruptMemory(f"{place.url}: {error}; keep other objects elsewhere") from error


class Published:
    """A published memory as one manifest has it, and its table of documents as far as it was read.
    May be used by several threads.
    """

    def __init__(self, place: Place, manifest: Manifest, before: "Published | None" = None) -> None:
        """Use Published.open. before: an earlier one, whose pages are not read again."""
        self.place, self.manifest = place, manifest
        held: dict[str, list[Entry]] = {} if before is None else before._pages
        self._pages: dict[str, list[Entry]] = {
            page.name: held[page.name] for page in manifest.pages if page.name in held
        }

    @classmethod
    def open(
        cls, place: Place, *, cache: Remembering | None = None, at_least: int | None = None
    ) -> "Published":
        """The newest.

        cache: remembers which that is. at_least: its number, whatever was read before. Raises
        MemoryNotFound, CorruptMemory, StaleMemory, NewerFormat, StoreUnavailable.
        """
        found = cls.newest(place, cache=cache, at_least=at_least)
        if found is None:
            raise MemoryNotFound(
                f"{place.url} holds no published memory; memstore publish makes one"
            )
        return found

    @classmethod
    def newest(
        cls, place: Place, *, cache: Remembering | None = None, at_least: int | None = None
    ) -> "Published | None":
        """The newest, or None where nothing was published. Raises as `open` does."""
        before = newest_seen(place.identity, cache)
        number = newest_number(place)
        if number is None:
            return None
        found = cls.at(place, number)
        check_newest(place.url, found.seen, before, at_least)
        note_newest(place.identity, found.seen, cache, anew=at_least is not None)
        return found

    @property
    def seen(self) -> Seen:
        """Which manifest it is."""
        return self.manifest.number, self.manifest.id

    @classmethod
    def at(cls, place: Place, number: int, before: "Published | None" = None) -> "Published":
        """The memory as manifest `number` has it. before: an earlier one, whose pages are not read
        again. Raises as `open` does, and ObjectNotFound.
        """
        name = manifest_name(number)
        manifest = _read(place, number)
        if manifest.number != number:
            raise CorruptMemory(f"{place.url}: {name} is another manifest; restore it from a copy")
        return cls(place, manifest, before)

    def documents(self) -> list[Entry]:
        """Every document, in order of names."""
        return [entry for page in self._read(self.manifest.pages) for entry in page]

    def entry(self, name: str) -> Entry | None:
        """One document by name, or None."""
        return self.entries([name]).get(name)

    def entries(self, names: Sequence[str]) -> dict[str, Entry]:
        """Documents by name; those that there are. Reads the pages that may hold them alone."""
        wanted = {*names}
        pages = sorted({self.page_of(name) for name in wanted} - {-1})
        found = self._read([self.manifest.pages[page] for page in pages])
        return {e.row.name: e for page in found for e in page if e.row.name in wanted}

    def page_of(self, name: str) -> int:
        """Which page may hold a document; -1 for none."""
        return bisect_right(self._firsts, name) - 1

    @cached_property
    def _firsts(self) -> list[str]:
        return [page.first for page in self.manifest.pages]

    def read(self, page: PageRef) -> list[Entry]:
        """The documents of one page, as it lies there."""
        return self._read([page])[0]

    def _read(self, pages: Sequence[PageRef]) -> list[list[Entry]]:
        missing = [page for page in pages if page.name not in self._pages]
        for page, entries in zip(missing, at_once(partial(read_page, self.place), missing)):
            self._pages[page.name] = entries
        return [self._pages[page.name] for page in pages]


class Change(NamedTuple):
    """What a publisher wants of the next manifest."""

    entries: Mapping[str, Entry | None]  # by name; None for one that goes
    selector: IndexSpec | None = None
    new_selector: bool = False


def commit(
    place: Place, change: Callable[[Published | None], tuple[Manifest, Change] | None]
) -> Published | None:
    """Write the next manifest.

    change: what the newest is to become: told the newest (None where there is none), it returns the
    manifest to begin from and what changes, or None where nothing does; asked again where another
    publisher was faster. Return the newest.

    Raises StoreUnavailable; the memory is then as it was, or has all of the change.
    """
    for _ in range(_TRIES):
        newest = Published.newest(place)
        wanted = change(newest)
        if wanted is None:
            return newest
        base, changes = wanted
        pages = _changed_pages(place, newest, changes.entries)
        form = changes.selector if changes.new_selector else base.selector
        manifest = replace(
            base,
            number=1 if newest is None else newest.manifest.number + 1,
            id=os.urandom(16),
            published=time.time(),
            selector=form,
            pages=tuple(pages),
        )
        if _create(place, manifest):
            published = Published(place, manifest)
            note_newest(place.identity, published.seen, anew=manifest.number == 1)
            return published
    raise StoreUnavailable(
        f"{place.url}: {_TRIES} others published meanwhile, one after the other; try again"
    )


def _create(place: Place, manifest: Manifest) -> bool:
    """Write a manifest; False where another has its number.

    A create whose answer was lost may have been done: then its own is there.
    """
    name = manifest_name(manifest.number)
    try:
        if place.create(name, manifest.encode()):
            return True
    except StoreUnavailable:
        try:
            if _read(place, manifest.number).id == manifest.id:
                return True
        except (StoreUnavailable, CorruptMemory):
            pass
        raise
    return _read(place, manifest.number).id == manifest.id


def _read(place: Place, number: int) -> Manifest:
    name = manifest_name(number)
    return Manifest.decode(place.get(name, PACKED_BYTES), f"{place.url}: {name}")


def _changed_pages(
    place: Place, newest: Published | None, changes: Mapping[str, Entry | None]
) -> list[PageRef]:
    """The pages of the table with these documents in it, or out of it; writes those that are
    new.
    """
    old = () if newest is None else newest.manifest.pages
    touched: dict[int, dict[str, Entry | None]] = {}
    for name, entry in changes.items():
        number = 0 if newest is None else max(0, newest.page_of(name))
        touched.setdefault(number, {})[name] = entry
    pages: list[PageRef] = []
    carried: dict[str, Entry] = {}  # of pages that became small: the next takes them in
    if newest is not None:
        newest.entries([old[number].first for number in touched if number < len(old)])
    for number in range(max(len(old), 1)):
        mine = touched.get(number)
        if mine is None and not carried:
            if number < len(old):
                pages.append(old[number])
            continue
        held = dict(carried)
        if newest is not None and number < len(old):
            held |= {entry.row.name: entry for entry in newest.read(old[number])}
        for name, entry in (mine or {}).items():
            if entry is None:
                held.pop(name, None)
            else:
                held[name] = entry
        carried = {}
        if len(held) < PAGE_ENTRIES // 4 and number + 1 < len(old):
            carried = held
            continue
        pages += write_pages(place, [held[name] for name in sorted(held)])
    return pages
