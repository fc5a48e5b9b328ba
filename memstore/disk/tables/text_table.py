"""The text of a memory's documents: parts of tokens, or of passages."""

from collections.abc import Iterator
from contextlib import contextmanager

from memstore.disk.format.keys import document_range, read_tokens_key, tokens_key
from memstore.disk.format.text_parts import PassagePart, TokenPart, decode_part, decode_tokens
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
            with _named(document):
                part = decode_tokens(number, value)
            if number + len(part.ids) > first:
                yield part

    def passage_parts(
        self, txn: Transaction, document: int, first: int = 0, end: int | None = None
    ) -> Iterator[PassagePart]:
        """The same of passages; first, end: blocks."""
        for number, value in self.parts(txn, document, first, end):
            with _named(document):
                part = decode_part(number, value, self._block_size)
            if part.end_block > first:
                yield part


@contextmanager
def _named(document: int) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise CorruptMemory(f"tokens of document {document}: {error}; run verify") from error
