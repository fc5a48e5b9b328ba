"""The parts of a document in a memory's directory, for an export or a publication."""

from collections.abc import Callable, Iterator

from memstore.disk.format.document import Document
from memstore.disk.format.keys import read_run_key, run_key, run_range
from memstore.disk.lmdb.database import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.passage_table import StoredPassage
from memstore.errors import InvalidInput
from memstore.share.document_parts import IndexRun, Part, Record, Tokens

_BATCH_BYTES = 8 << 20  # of parts that are read in one transaction

Numbered = Iterator[tuple[int, Part]]
"""Parts, each with the number (of a token or a block) from which reading can continue."""


def stored_parts(
    catalog: Catalog,
    document: Document,
    wants: Callable[[StoredPassage], bool] = lambda passage: True,
) -> Iterator[Part]:
    """The parts of a ready document in order: tokens, landmarks, records; copies.

    wants: called with each passage that has records; records of unwanted passages are left out.
    Each batch of parts is read in a transaction of its own, which does not stay open
    while the caller uploads. Raises InvalidInput (the document changed in between), CorruptMemory.
    """

    def tokens(txn: Transaction, start: int) -> Numbered:
        for first, value in catalog.texts.parts(txn, document.id, start):
            yield first, Tokens(first, bytes(value))

    def landmarks(part: int) -> Callable[[Transaction, int], Numbered]:

        def runs(txn: Transaction, start: int) -> Numbered:
            low = run_key(document.id, part, start)
            for key, value in txn.scan_checked("landmarks", low, run_range(document.id, part)[1]):
                first = read_run_key(key)[2]
                yield first, IndexRun(part, first, bytes(value))

        return runs

    def blocks(txn: Transaction, start: int) -> Numbered:
        for key, data in catalog.blocks.walk(txn, document.id, start):
            yield key.block, Record(key.block, key.layer, bytes(data))

    def passages(txn: Transaction, start: int) -> Numbered:
        for block, passage in catalog.passages_of(txn, document, start):
            if passage.bytes and wants(passage):
                for key, data in catalog.blocks.walk(txn, passage.number):
                    yield block, Record(block, key.layer, bytes(data))

    yield from _in_batches(catalog, document, tokens)
    for part in catalog.runs.parts(document.memory_layers(catalog.signature)):
        yield from _in_batches(catalog, document, landmarks(part))
    yield from _in_batches(catalog, document, passages if document.of_passages else blocks)


def _in_batches(
    catalog: Catalog, document: Document, read: Callable[[Transaction, int], Numbered]
) -> Iterator[Part]:
    """All parts that `read` finds from number 0 on; the records of one block are in one batch."""
    start: int | None = 0
    while start is not None:
        batch, size, last, left = list[Part](), 0, -1, None
        with catalog.database.read() as txn:
            if catalog.row(txn, document.id) != document:
                raise InvalidInput(
                    f"document {document.name!r} changed while it was read; try again"
                )
            for number, part in read(txn, start):
                if size >= _BATCH_BYTES and number != last:
                    left = number
                    break
                batch.append(part)
                size, last = size + len(part[-1]), number
        yield from batch
        start = left
