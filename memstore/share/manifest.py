"""The manifests of a publication: numbered, each written once, each naming everything that the
publication holds; readers read the newest.

Manifest n is the object `manifests/` and 2**64 - 1 - n in 16 hexadecimal digits, so that the newest
is first in a listing. It holds the memory's signature, codec and selector, the objects of lists of
the selector's token landmarks, if there are any, and the pages of the table of documents; a page
(`pages/` and a random number) holds the rows of up to 256 documents that are neighbours by name,
and where their pieces are. memstore.share.manifest_commit writes the next manifest so that readers
see a change whole or not at all.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from memstore.decode import Amount, Positive
from memstore.disk.format.index_spec import IndexSpec
from memstore.disk.format.signature import Signature
from memstore.errors import CorruptMemory, InvalidConfig
from memstore.share.calls import at_once
from memstore.share.entries import Entries, Entry, Name, entries_of, plain_entries
from memstore.share.object_store import OBJECT_BYTES, ObjectStore
from memstore.share.packed_objects import PACKED_BYTES, digest_of, open_packed, pack
from memstore.share.pieces import Digest

PAGES = "pages"
PAGE_ENTRIES = 256
_PAGE = b"mRpage\0\0"
MANIFESTS = "manifests"
LISTS = "lists"  # objects of the lists that passages are found by in two stages
_MANIFEST = b"mRmanife"
_LAST = (1 << 64) - 1
_DIGITS = re.compile("[0-9a-f]{16}")


# Pages of the table of documents


class PageRef(NamedTuple):
    """A page of the table of documents: names from `first` on, up to the next page's."""

    first: Name
    documents: Positive
    name: Name  # the object
    size: Annotated[int, Meta(ge=1, le=PACKED_BYTES)]  # bytes
    digest: Digest


def read_page(objects: ObjectStore, page: PageRef) -> list[Entry]:
    """The documents of a page. Raises CorruptMemory, NewerFormat, StoreUnavailable."""
    what = f"{objects.url}: {page.name}"
    data = objects.get(page.name, page.size)
    held = open_packed(_PAGE, data, Entries, what)
    try:
        if digest_of(data) != page.digest:
            raise ValueError("it is another page than the manifest names")
        entries = entries_of(held)
        names = [entry.row.name for entry in entries]
        if names != sorted(set(names)) or len(names) != page.documents or names[0] != page.first:
            raise ValueError("its documents are not in order")
    except (ValueError, IndexError) as error:
        raise CorruptMemory(
            f"{what} is damaged ({error}); restore it from a copy, or publish to another prefix"
        ) from error
    return entries


def write_pages(objects: ObjectStore, entries: Sequence[Entry]) -> list[PageRef]:
    """Write pages of documents, in order of names. Raises StoreUnavailable."""
    parts = -(-len(entries) // PAGE_ENTRIES)
    cuts = [len(entries) * at // parts for at in range(parts + 1)] if parts else []

    def write(some: Sequence[Entry]) -> PageRef:
        data = pack(_PAGE, plain_entries(some))
        name = f"{PAGES}/{os.urandom(16).hex()}"
        objects.put(name, data)
        return PageRef(some[0].row.name, len(some), name, len(data), digest_of(data))

    return at_once(write, [entries[low:high] for low, high in pairwise(cuts)])


# Manifests


class PartsRef(NamedTuple):
    """An object of some 32 MB with parts of lists, which follow those of the one before."""

    name: Name
    size: Positive  # bytes


class ListsRef(NamedTuple):
    """The objects of lists (memstore.index.passage_files): a head, and parts, none of which is
    cut.
    """

    head: Name
    size: Annotated[int, Meta(ge=1, le=OBJECT_BYTES)]  # bytes of the head
    digest: Digest  # XXH3-64 of it
    parts: list[PartsRef]

    @property
    def names(self) -> set[str]:
        """All objects."""
        return {self.head, *(part.name for part in self.parts)}


def new_lists_name() -> str:
    """The name of a new object of lists."""
    return f"{LISTS}/{os.urandom(16).hex()}"


class _Manifest(msgspec.Struct, forbid_unknown_fields=True):
    number: Positive
    id: Annotated[bytes, Meta(min_length=16, max_length=16)]
    published: Amount  # seconds since 1970
    signature: dict[str, Any]
    codec: Name
    created: Amount
    selector: dict[str, Any] | None
    pages: list[PageRef]
    lists: ListsRef | None = None


@dataclass(frozen=True)
class Manifest:
    """A publication at one time."""

    number: int
    id: bytes  # random
    published: float  # seconds since 1970
    signature: Signature
    codec: str  # of the first publisher; each record names its own
    created: float
    selector: IndexSpec | None
    pages: tuple[PageRef, ...]  # in order of names
    lists: ListsRef | None = None  # of the selector's token landmarks

    @property
    def documents(self) -> int:
        """The number of documents."""
        return sum(page.documents for page in self.pages)

    def encode(self) -> bytes:
        """The object."""
        selector = None if self.selector is None else self.selector.to_dict()
        values = {name: getattr(self, name) for name in ("number", "id", "published", "codec")}
        values |= {"signature": self.signature.to_dict(), "created": self.created}
        values |= {"selector": selector, "pages": self.pages}
        if self.lists is not None:
            values["lists"] = self.lists
        return pack(_MANIFEST, values)

    @classmethod
    def decode(cls, data: bytes | memoryview, what: str) -> "Manifest":
        """The manifest of an object. Raises CorruptMemory, NewerFormat."""
        held = open_packed(_MANIFEST, data, _Manifest, what)
        try:
            form = None if held.selector is None else IndexSpec.decode(held.selector)
            names = [page.first for page in held.pages]
            if names != sorted(set(names)):
                raise ValueError("its pages are not in order")
            return cls(
                held.number, held.id, held.published, Signature.from_dict(held.signature),
                held.codec, held.created, form, tuple(held.pages), held.lists,
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
        raise ValueError(f"{name} is not a manifest")
    return _LAST - int(digits, 16)


def newest_number(objects: ObjectStore) -> int | None:
    """The number of the newest manifest, by one listing; None where there is none. Raises
    StoreUnavailable, MemoryNotFound (no bucket).
    """
    name = objects.first(MANIFESTS)
    if name is None:
        return None
    try:
        return manifest_number(name)
    except ValueError as error:
        raise CorruptMemory(f"{objects.url}: {error}; keep other objects elsewhere") from error


def read_manifest(objects: ObjectStore, number: int) -> Manifest:
    """A manifest by its number. Raises CorruptMemory, NewerFormat, ObjectNotFound,
    StoreUnavailable.
    """
    name = manifest_name(number)
    return Manifest.decode(objects.get(name, PACKED_BYTES), f"{objects.url}: {name}")
