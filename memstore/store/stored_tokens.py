"""A document's token ids, and what is needed to find their characters."""

from typing import NamedTuple

import numpy as np

from memstore.disk.format.document import Document
from memstore.disk.lmdb.database import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.errors import CorruptMemory
from memstore.store.stored_passages import read_passages


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
        catalog.token_parts(txn, document.id, max(0, first - 1), end)
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
