"""The text of a memory's documents: parts of tokens, or of passages and what stands behind them."""

from collections.abc import Iterator, Sequence

import numpy as np

from memstore.disk.format.document import Document
from memstore.disk.format.keys import document_range, read_tokens_key, tokens_key
from memstore.disk.format.text_parts import (
    PassagePart,
    TokenPart,
    decode_part,
    decode_tokens,
    encode_part,
    encode_tokens,
)
from memstore.disk.lmdb.transaction import Transaction
from memstore.errors import CorruptMemory


class TextTable:
    """The text of one memory's documents. Every method takes the transaction it works in."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def put_part(self, txn: Transaction, document: int, number: int, value: bytes) -> None:
        """Write a part of a document's tokens, as encode_tokens or encode_part made it; number: of
        the token, or of the passage, that it begins with.
        """
        txn.put_checked("tokens", tokens_key(document, number), value)

    def put_tokens(
        self,
        txn: Transaction,
        document: int,
        first: int,
        char_start: int,
        ids: Sequence[int] | np.ndarray,
    ) -> None:
        """Write the document's tokens from number `first` on, one part a chunk: see
        encode_tokens.
        """
        self.put_part(txn, document, first, encode_tokens(char_start, ids))

    def parts(
        self, txn: Transaction, document: int, first: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """The parts of a document's tokens from the one on that holds number `first`, to before
        number `end` (None for all), in order: the number that each begins with, and its value.

        The iterator lives in the transaction.
        """
        low, high = document_range(document)
        if end is not None:
            high = tokens_key(document, end)
        start = txn.key_at_or_before("tokens", tokens_key(document, first))
        if start is None or start < low:
            start = low
        for key, value in txn.scan_checked("tokens", start, high):
            yield read_tokens_key(key)[1], value

    def token_parts(
        self, txn: Transaction, document: int, first: int = 0, end: int | None = None
    ) -> Iterator[TokenPart]:
        """The parts that hold tokens `first` to `end` (exclusive; None for all), in order, each
        whole. Raises CorruptMemory.

        The iterator lives in the transaction.
        """
        for number, value in self.parts(txn, document, first, end):
            try:
                part = decode_tokens(number, value)
            except ValueError as error:
                raise CorruptMemory(
                    f"tokens of document {document}: {error}; run verify"
                ) from error
            if number + len(part.ids) > first:
                yield part

    def passage_parts(
        self, txn: Transaction, document: int, first: int = 0, end: int | None = None
    ) -> Iterator[PassagePart]:
        """The parts of a document of passages that hold blocks `first` to `end` (exclusive; None
        for all, and the tail), in order, each whole. Raises CorruptMemory.

        The iterator lives in the transaction.
        """
        for number, value in self.parts(txn, document, first, end):
            try:
                part = decode_part(number, value, self._block_size)
            except ValueError as error:
                raise CorruptMemory(
                    f"passages of document {document}: {error}; run verify"
                ) from error
            if not part.passages or part.end_block > first:
                yield part

    def tail(self, txn: Transaction, document: Document) -> str:
        """The text of a document of passages behind its last. Raises CorruptMemory."""
        key = tokens_key(document.id, document.blocks)
        value = txn.get_checked("tokens", key)
        if value is None:
            return ""
        try:
            return decode_part(document.blocks, value, self._block_size).tail
        except ValueError as error:
            raise CorruptMemory(
                f"passages of document {document.name!r}: {error}; run verify"
            ) from error

    def put_tail(self, txn: Transaction, document: Document, start: int, tail: str) -> None:
        """Write that text, which begins at character `start`, in place of another."""
        txn.delete("tokens", tokens_key(document.id, document.blocks))
        if tail:
            self.put_part(txn, document.id, document.blocks, encode_part(start, [], tail))

    def truncate_tokens(self, txn: Transaction, document: int, tokens: int) -> None:
        for part in list(self.token_parts(txn, document, first=tokens)):
            txn.delete("tokens", tokens_key(document, part.first))
            if part.first < tokens:
                kept = part.ids[: tokens - part.first]
                self.put_tokens(txn, document, part.first, part.char_start, kept)

    def truncate_passages(self, txn: Transaction, document: int, blocks: int) -> None:
        for part in list(self.passage_parts(txn, document, first=blocks)):
            txn.delete("tokens", tokens_key(document, part.first_block))
            if part.first_block < blocks:
                kept = encode_part(part.start, part.passages[: blocks - part.first_block])
                self.put_part(txn, document, part.first_block, kept)
