"""Entries: documents that have left a memory, each with the pieces that hold it. A page of a
publication lists many, the footer of an exported file one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from memstore.decode import Block, Count, Layer, Positive
from memstore.disk.format.document import Document
from memstore.share.pieces import PIECE_BYTES, Digest, Kind, Piece

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
