"""One document in one file: export from a memory, import into another memory of the same model.
Import reads the whole file once before it writes anything.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from memstore.block import RecordKey
from memstore.disk.format.document import Document
from memstore.disk.format.passage_parts import decode_part
from memstore.disk.lmdb.database import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.errors import WrongModel
from memstore.store.transfer.document_parts import Head, IndexRun, Part, Record, Tokens
from memstore.store.transfer.export_file import read_head, read_parts, write_export

BATCH_BYTES = 16 << 20


def export_document(catalog: Catalog, document: Document, file: Path) -> int:
    """Write a ready document to a new file; return its bytes. All or nothing: a file that exists is
    replaced at the end.

    Raises InvalidInput (the file cannot be written), StorageFull, CorruptMemory.
    """
    head = Head(catalog.signature.public, document, catalog.index_spec)
    return write_export(head, catalog.blocks, _stored(catalog, document), file)


def _stored(catalog: Catalog, document: Document) -> Iterator[Part]:
    # one snapshot, so that the file is one state of the document
    with catalog.database.read() as txn:
        for number, value in catalog.parts(txn, document.id):
            yield Tokens(number, bytes(value))
        for part, first_block, run in catalog.runs.values(txn, document.id):
            yield IndexRun(part, first_block, run)
        if document.of_passages:
            for block, passage in catalog.passages_of(txn, document):
                for key, data in catalog.blocks.walk(txn, passage.number):
                    yield Record(block, key.layer, bytes(data))
        for key, data in catalog.blocks.walk(txn, document.id):
            yield Record(key.block, key.layer, bytes(data))


def _check_importable(catalog: Catalog, file: Path, head: Head) -> None:
    """Is it of this memory's model and selector, and all of it right? Raises as import_document."""
    signature, _, spec = head
    path = catalog.database.path
    catalog.signature.check_same(
        signature, str(file), f"only a memory of that model can import it, and {path} is not"
    )
    if spec != catalog.index_spec:
        here, there = (s.name if s is not None else "none" for s in (catalog.index_spec, spec))
        raise WrongModel(
            f"{file} was written for selector {there}, {path} has {here}, or another state of it; "
            "import it into a memory with the same one"
        )
    for _ in read_parts(file, head, catalog.blocks):
        pass


def import_document(catalog: Catalog, file: Path, name: str) -> Document:
    """Read an exported document into a memory under `name`, which must be free; the caller holds
    the writer lock.

    Raises InvalidInput (no exported document, damaged, truncated), WrongModel, NewerFormat,
    StorageFull; the memory is as it was.
    """
    database = catalog.database
    head = read_head(file)
    _check_importable(catalog, file, head)
    # Which file it was read from there is of no folder here.
    imported = replace(head[1].portable(), name=name)

    def begin(txn: Transaction) -> Document:
        row = replace(
            imported,
            id=catalog.new_document_id(txn),
            state="importing",
            tokens=0,
            blocks=0,
            bytes=0,
        )
        catalog.put_document(txn, row)
        return row

    number = database.write(begin).id
    imported = replace(imported, id=number)
    done = False
    try:
        batch: list[Part] = []
        size, last = 0, -1
        for part in read_parts(file, head, catalog.blocks):
            block = part.block if isinstance(part, Record) else -1
            if size >= BATCH_BYTES and block != last:  # a passage is stored whole
                database.write(lambda txn: _store(txn, catalog, imported, batch))  # noqa: B023 (runs now)
                batch, size = [], 0
            batch.append(part)
            size, last = size + max(len(x) for x in part if isinstance(x, bytes)), block

        def end(txn: Transaction) -> Document:
            _store(txn, catalog, imported, batch)
            row = replace(imported, state="ready", bytes=catalog.record_bytes(txn, imported))
            catalog.put_document(txn, row)
            return row

        row = database.write(end)
        done = True
        return row
    finally:
        if not done:
            database.write(lambda txn: catalog.delete_document(txn, number), beyond_limit=True)


def _store(txn: Transaction, catalog: Catalog, document: Document, batch: list[Part]) -> None:
    number = document.id
    for part in batch:
        if isinstance(part, Tokens):
            catalog.put_part(txn, number, part.first, part.value)
            if document.of_passages:
                found = decode_part(part.first, part.value, catalog.signature.block_size)
                digests = catalog.digests(document, found.passages)
                catalog.refer(txn, document, part.first, digests)
        elif isinstance(part, IndexRun):
            catalog.runs.put_value(txn, number, *part)
        elif not document.of_passages:
            catalog.blocks.put(txn, RecordKey(number, part.block, part.layer), part.data)
    if document.of_passages:
        _store_passages(txn, catalog, document, [one for one in batch if isinstance(one, Record)])


def _store_passages(
    txn: Transaction, catalog: Catalog, document: Document, records: list[Record]
) -> None:
    """Store those of these passages, all records of each, that are not there."""
    for block, some in groupby(records, key=attrgetter("block")):
        _, digest = next(catalog.digests_of(txn, document, block))
        row = catalog.passages.find(txn, digest)
        if row is not None and not row.bytes:
            catalog.passages.store(txn, row, {record.layer: record.data for record in some})
