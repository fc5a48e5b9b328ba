"""Passages of a document as they are stored, and where one that is appended to goes on."""

from dataclasses import replace
from typing import NamedTuple

from memstore.disk.format.document import Document
from memstore.disk.format.passage_parts import Passage
from memstore.disk.lmdb.database import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.errors import CorruptMemory, InvalidInput


def read_passages(
    catalog: Catalog, txn: Transaction, document: Document, first: int, end: int | None = None
) -> list[Passage]:
    """Passages `first` to `end` (exclusive; None: all) of a document, fewer at its end. Raises
    InvalidInput for a document that has none, CorruptMemory.
    """
    check_of_passages(document)
    end = document.blocks if end is None else min(end, document.blocks)
    found: list[Passage] = []
    if first >= end:
        return found
    at: int | None = None
    for part in catalog.passage_parts(txn, document.id, first, end):
        if (at is None and part.first_block > first) or (at is not None and part.first_block != at):
            break
        at = part.end_block
        low, high = max(0, first - part.first_block), max(0, end - part.first_block)
        found += part.passages[low:high]
    if len(found) != end - first:
        raise CorruptMemory(
            f"passages of document {document.name!r} in {catalog.database.path} are missing; run "
            "verify"
        )
    return found


def check_of_passages(document: Document) -> None:
    """Raises InvalidInput for a document that is not made of passages."""
    if not document.of_passages:
        raise InvalidInput(
            f"document {document.name!r} is not made of passages; ask for its tokens instead"
        )


class Continued(NamedTuple):
    """Where writing a document of passages goes on."""

    document: Document  # its row, which tells where what is appended begins
    blocks: int  # that stay
    tokens: int  # of these
    characters: int  # up to the end of the last of them
    replaced: list[Passage]  # to be read again in front of what is appended
    tail: str  # that stood behind these

    @classmethod
    def of(cls, catalog: Catalog, document: Document) -> "Continued":
        """Of a document by its row: a ready one is appended to. Raises CorruptMemory."""
        blocks, tokens = document.blocks, document.tokens
        with catalog.database.read() as txn:
            last = read_passages(catalog, txn, document, max(0, blocks - 1))
            tail = catalog.tail(txn, document)
        end = last[-1].end if last else 0
        if document.state != "ready":
            return cls(document, blocks, tokens, end, [], "")
        appended = replace(document, appended_at=end + len(tail))
        if not last:
            return cls(appended, blocks, tokens, end, [], tail)
        begin = last[0].start - len(last[0].gap)
        return cls(appended, blocks - 1, tokens - len(last[0].ids), begin, last, tail)
