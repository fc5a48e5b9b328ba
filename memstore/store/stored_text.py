"""The stored text of a document: its passages, or its token ids with what is needed to find their
characters.
"""

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
    if not document.of_passages:
        raise InvalidInput(
            f"document {document.name!r} is not made of passages; ask for its tokens instead"
        )
    end = document.blocks if end is None else min(end, document.blocks)
    found: list[Passage] = []
    for part in catalog.texts.passage_parts(txn, document.id, first, end) if first < end else ():
        low, high = max(0, first - part.first_block), max(0, end - part.first_block)
        found += part.passages[low:high]
    if len(found) < end - first:
        raise CorruptMemory(
            f"passages of document {document.name!r} in {catalog.database.path} are missing; run "
            "verify"
        )
    return found


class TokenSpan(NamedTuple):
    """A run of a document's tokens, with what is needed to find its characters.

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
    none = np.zeros(0, dtype=np.int64)
    if first >= end:
        return TokenSpan(none, none, 0)
    parts = list(catalog.texts.token_parts(txn, document.id, first, end))
    # Each part is under a checksum; that none is missing or twice there must be seen here.
    starts = [part.first for part in parts]
    ends = [part.first + len(part.ids) for part in parts]
    if not parts or starts[0] > first or starts[1:] != ends[:-1] or ends[-1] < end:
        raise CorruptMemory(
            f"tokens of document {document.name!r} in {catalog.database.path} are missing; run "
            "verify"
        )
    start = starts[0]
    ids = np.concatenate([part.ids for part in parts])
    return TokenSpan(ids[first - start : end - start], ids[: first - start], parts[0].char_start)
