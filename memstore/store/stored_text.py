"""The stored text of a document: its passages, or its token ids with what is needed to find their
characters.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from memstore.disk.format.document import Document
from memstore.disk.format.text_parts import Passage
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
    for part in catalog.texts.passage_parts(txn, document.id, first, end):
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
            tail = catalog.texts.tail(txn, document)
        end = last[-1].end if last else 0
        if document.state != "ready":
            return cls(document, blocks, tokens, end, [], "")
        appended = replace(document, appended_at=end + len(tail))
        if not last:
            return cls(appended, blocks, tokens, end, [], tail)
        begin = last[0].start - len(last[0].gap)
        return cls(appended, blocks - 1, tokens - len(last[0].ids), begin, last, tail)


class TokenSpan(NamedTuple):
    """A run of a document's tokens, with what is needed to find its characters; of a document of
    passages it tells the tokens alone (`before` is empty, `char_start` 0).

    The first token of `ids` begins char_start + (length of the text of `before`) characters into
    the document.
    """

    ids: np.ndarray  # int64 [n]
    before: np.ndarray  # int64 [m], the tokens between char_start and the first of `ids`
    char_start: int


def read_tokens(
    catalog: Catalog, txn: Transaction, document: Document, first: int, end: int | None = None
) -> TokenSpan:
    """Content tokens `first` to `end` (exclusive; None: all) of a document, fewer at its end.
    Raises CorruptMemory.
    """
    end = document.tokens if end is None else min(end, document.tokens)
    if document.of_passages:
        passages = read_passages(catalog, txn, document, 0)
        all_of_it = np.concatenate([np.zeros(0, np.int64), *(each.ids for each in passages)])
        return TokenSpan(all_of_it[first : max(0, end)], np.zeros(0, dtype=np.int64), 0)
    parts = list(
        catalog.texts.token_parts(txn, document.id, max(0, first - 1), end)
    )  # also where `first` is the document's end
    if len(parts) > 1 and parts[1].first <= first:
        del parts[0]
    # Each part is under a checksum; that none is missing or twice there must be seen here.
    after = 0 if not parts else parts[0].first
    whole = after <= first
    for part in parts:
        whole = whole and part.first == after
        after = part.first + len(part.ids)
    if not whole or after < end:
        raise CorruptMemory(
            f"tokens of document {document.name!r} in {catalog.database.path} are missing; run "
            "verify"
        )
    if not parts:
        return TokenSpan(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), 0)
    start = parts[0].first
    ids = np.concatenate([part.ids for part in parts])
    return TokenSpan(
        ids[first - start : max(0, end - start)], ids[: first - start], parts[0].char_start
    )
