"""The table of documents of a publication, in pages: each the rows of up to 256 documents that are
neighbours by name, and where their pieces are.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from memstore.decode import Block, Count, Positive
from memstore.disk.format.document import Document
from memstore.errors import CorruptMemory
from memstore.share.packed_objects import PACKED_BYTES, digest_of, open_packed, pack
from memstore.share.pieces import PIECE_BYTES, Digest, Kind, Layer, Piece
from memstore.share.daemon_threads import at_once
from memstore.share.object_store import ObjectStore

FORMAT = 4
PAGES = "pages"
PAGE_ENTRIES = 256
_PAGE = b"mRpage\0\0"
Name = Annotated[str, Meta(max_length=4096)]


class Entry(NamedTuple):
    """A published document: its row, without a number, and its pieces."""

    row: Document  # its id is 1
    pieces: tuple[Piece, ...]  # in order

    @classmethod
    def of(cls, row: Document, pieces: Iterable[Piece]) -> "Entry":
        """The entry of a memory's row, without what concerns that memory alone."""
        return cls(replace(row.portable(), id=1), tuple(sorted(pieces)))


_PieceSize = Annotated[int, Meta(ge=1, le=PIECE_BYTES)]
_Piece = tuple[Kind, Layer, Count, Positive, Block, Count, Count, _PieceSize, Digest]


class Entries(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Entries as they are stored."""

    segments: list[Name]
    entries: list[tuple[dict[str, Any], list[_Piece]]]


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
    held = open_packed(_PAGE, FORMAT, data, Entries, what)
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
        data = pack(_PAGE, FORMAT, plain_entries(some))
        name = f"{PAGES}/{os.urandom(16).hex()}"
        objects.put(name, data)
        return PageRef(some[0].row.name, len(some), name, len(data), digest_of(data))

    return at_once(write, [entries[low:high] for low, high in pairwise(cuts)])


def plain_row(row: Document) -> dict[str, Any]:
    """A document's row as plain values, without its number; `asdict` takes ten times as long."""
    values: dict[str, Any] = msgspec.to_builtins(row, builtin_types=(bytes,))
    del values["id"]
    return values


def plain_entries(entries: Sequence[Entry]) -> tuple[list[str], list[Any]]:
    """Entries as plain values: their segments, and rows with pieces that number the segments."""
    segments: dict[str, int] = {}
    plain = []
    for entry in entries:
        row = plain_row(entry.row)
        pieces = [
            (*p[:5], segments.setdefault(p.segment, len(segments)), *p[6:]) for p in entry.pieces
        ]
        plain.append((row, pieces))
    return list(segments), plain


def entries_of(held: Entries) -> list[Entry]:
    """The entries of these plain values. Raises ValueError, IndexError."""
    entries = []
    for row, plain in held.entries:
        document = Document.decode({**row, "id": 1})
        if document.state != "ready":
            raise ValueError("a document is not ready")
        pieces = sorted(Piece(*p[:5], held.segments[p[5]], *p[6:]) for p in plain)
        entries.append(Entry(document, tuple(pieces)))
    return entries
