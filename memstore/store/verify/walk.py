"""The child process of a verification: it reads everything that a memory stores, or drops what is
damaged, and prints events as lines of JSON.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from memstore.block import RecordKey
from memstore.child import end_with_parent
from memstore.disk.format.document import Document
from memstore.disk.format.keys import (
    document_range,
    number_key,
    read_number_key,
    record_key,
    tokens_key,
)
from memstore.disk.lmdb.database import Transaction
from memstore.disk.lmdb.meta_pages import is_sound
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.passage_table import Digest, StoredPassage
from memstore.errors import CorruptMemory, DocumentNotFound, MemstoreError
from memstore.share.document_parts import Head, IndexRun, PartOrder, Record, Tokens

Event = dict[str, Any]
_DOCUMENT_TABLES = ("documents", "tokens", "landmarks", "blocks")


def main(watched: str, what: str, path: str) -> None:
    """Do what `verify_memory` asks for, with the numbers on standard input: "walk" past the
    documents of these numbers, or "drop" them and the records of passages of these numbers. A
    killed repair leaves no child that keeps the memory locked (watched: see end_with_parent).
    """
    end_with_parent(watched)
    print(json.dumps({"event": "begin"}), flush=True)
    chosen = set(json.load(sys.stdin))
    try:
        if what == "drop":
            drop(Path(path), chosen)
        else:
            for event in walk(Path(path), chosen):
                print(json.dumps(event), flush=True)
    except MemstoreError as error:
        print(json.dumps({"event": "error", "kind": type(error).__name__, "what": str(error)}))
    print(json.dumps({"event": "end"}), flush=True)


def walk(path: Path, skip: set[int]) -> Iterator[Event]:
    """Read every document but those in `skip`, and yield events:

    reading   document, name: the next events are about this document
    whole     document, records, bytes: it is as it was written
    problem   document (None: the memory itself), name, what
    passage   document (None), number, name, what: the record of a passage is damaged
    count     document (None), name, what: references to a passage are counted wrongly

    Raises what opening raises.
    """
    catalog = Catalog.open(path, read_only=True)
    try:
        with catalog.database.read() as txn:
            catalog.next_number(txn)
            rows = {read_number_key(key) for key, _ in txn.scan("documents")}
            documents = rows | _owners(txn, "tokens") | _owners(txn, "landmarks")
            passages = {read_number_key(key) for key, _ in txn.scan("passages")}
            unowned = _owners(txn, "blocks") - documents - passages
        for number in sorted(unowned):
            what = f"records of number {number}, which is no document or passage"
            yield _passage(number, "", what)
        walked = PassageWalk(catalog)
        for number in sorted(documents - skip):
            yield from _walk_document(catalog, number, walked, known=number in rows)
        with catalog.database.read() as txn:
            try:
                wrong = count_references(txn, catalog)
            except CorruptMemory as error:
                wrong = [str(error)]
        for what in wrong:
            yield {"event": "count", "document": None, "name": "", "what": what}
    except CorruptMemory as error:
        yield {"event": "problem", "document": None, "name": "", "what": str(error)}
    finally:
        catalog.close()


def _walk_document(
    catalog: Catalog, number: int, passages: "PassageWalk", *, known: bool
) -> Iterator[Event]:
    name, records, size = f"document {number}", 0, 0
    yield {"event": "reading", "document": number, "name": name}
    try:
        document = _row(catalog, number, known=known)
        if document is None:
            return  # another process deleted or began it
        name = document.name
        yield {"event": "reading", "document": number, "name": name}
        if document.state != "importing":  # the next import removes what an interrupted one left
            with catalog.database.read() as txn:
                records, size = _read_all(txn, catalog, document, passages)
    except DocumentNotFound:
        return
    except (CorruptMemory, ValueError) as error:
        what = str(error) if isinstance(error, CorruptMemory) else f"document {name!r}: {error}"
        yield {"event": "problem", "document": number, "name": name, "what": what}
    else:
        yield {"event": "whole", "document": number, "records": records, "bytes": size}
    for passage, what in passages.damaged.items():
        yield _passage(passage, name, what)
    passages.damaged.clear()


def _passage(number: int, name: str, what: str) -> Event:
    return {"event": "passage", "document": None, "number": number, "name": name, "what": what}


def _row(catalog: Catalog, number: int, *, known: bool) -> Document | None:
    """The row of a document; None if nothing of the document is stored. Raises CorruptMemory."""
    with catalog.database.read() as txn:
        if txn.view("documents", number_key(number)) is not None:
            return catalog.row(txn, number) if known else None
        if all(
            next(txn.scan(table, *document_range(number)), None) is None
            for table in _DOCUMENT_TABLES
        ):
            return None
    raise CorruptMemory(f"document {number}: landmark keys or tokens without a row")


def _owners(txn: Transaction, table: str) -> set[int]:
    """The number of every document or passage that a table has an entry of."""
    owners = set()
    start = b""
    while (entry := next(txn.scan(table, start), None)) is not None:
        number = read_number_key(entry[0][:8])
        owners.add(number)
        start = number_key(number + 1)
    return owners


def _read_all(
    txn: Transaction, catalog: Catalog, document: Document, passages: "PassageWalk"
) -> tuple[int, int]:
    """Read everything of a document; return its records and their bytes. Raises CorruptMemory or
    ValueError with the first thing that is wrong.

    What a scan yields is also looked up by its key, as readers do: that takes another path through
    the file's tree.
    """
    number, runs, blocks = document.id, catalog.runs, catalog.blocks
    order = PartOrder(Head(catalog.signature, document, catalog.index_spec), unfinished=True)
    for first, value in catalog.texts.parts(txn, number):
        _expect(txn.view("tokens", tokens_key(number, first)), f"tokens from {first} on")
        order.add(Tokens(first, bytes(value)))
    for part, first, value in runs.values(txn, number):
        _expect(runs.has(txn, number, part, first), f"landmarks from block {first} on")
        order.add(IndexRun(part, first, value))
    runs.check_parts(txn, number)
    if document.of_passages:
        order.end()
        return passages.check(txn, document, order.lengths())
    records = size = 0
    for key, data in blocks.walk(txn, number):
        found = txn.view("blocks", record_key(key))
        _expect(found, f"block {key.block}, layer {key.layer}")
        order.add(Record(key.block, key.layer, bytes(found or b"")))
        records, size = records + 1, size + len(data)
    order.end()
    if size != document.bytes:
        raise ValueError(f"{size} bytes of records instead of {document.bytes}")
    return records, size


def _expect(found: object, what: str) -> None:
    if not found:
        raise ValueError(f"{what}: not found")


class PassageWalk:
    """The passages that a walk has read; each is read once, whichever documents refer to it."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._bytes: dict[Digest, int] = {}  # of the records that are whole
        self.damaged: dict[int, str] = {}  # number of the passage -> what is wrong

    def check(self, txn: Transaction, document: Document, lengths: np.ndarray) -> tuple[int, int]:
        """Read the records of a document's passages; return their number and bytes. `damaged` says
        which are damaged.
        """
        records = size = 0
        for block, digest in self._catalog.digests_of(txn, document):
            if digest not in self._bytes:
                name = f"passage {block} of document {document.name!r}"
                self._bytes[digest] = self._check(txn, name, digest, int(lengths[block]))
            records, size = records + (self._bytes[digest] > 0), size + self._bytes[digest]
        return records, size

    def _check(self, txn: Transaction, name: str, digest: Digest, length: int) -> int:
        try:
            row = self._catalog.passages.find(txn, digest)
        except CorruptMemory:
            return 0
        if row is None:
            return 0
        try:
            self._read(txn, row, length)
        except CorruptMemory as error:
            what = str(error).partition(";")[0]
            self.damaged[row.number] = f"{name}: {what}; it is computed again when it is needed"
            return 0
        return row.bytes

    def _read(self, txn: Transaction, row: StoredPassage, length: int) -> None:
        """Raises CorruptMemory with the first thing that is wrong."""
        key, blocks = RecordKey(row.number, 0, 0), self._catalog.blocks
        keys = [key for key, _ in blocks.walk(txn, row.number)]
        if keys != ([key] if row.bytes else []):
            raise CorruptMemory(f"records {keys} instead of {int(row.bytes > 0)}")
        if row.bytes:
            found = txn.view("blocks", record_key(key)) or b""
            tokens = blocks.check(found, key, row.digest)
            if (tokens, len(found)) != (length, row.bytes):
                raise CorruptMemory(
                    f"a record of {tokens} tokens, {len(found)} bytes instead of {length} tokens, "
                    f"{row.bytes} bytes"
                )


def drop(path: Path, numbers: set[int]) -> None:
    """Delete documents, and the records of passages, and count the references to passages again.
    Raises CorruptMemory where pages of keys are damaged: LMDB may spoil what is whole.
    """
    catalog = Catalog.open(path)
    try:
        with catalog.database.writer():
            if not is_sound(path):
                raise CorruptMemory("pages of keys are damaged")
            for number in sorted(numbers):
                delete = partial(_drop_one, catalog=catalog, number=number)
                catalog.database.write(delete)
            correct = partial(count_references, catalog=catalog, correct=True)
            catalog.database.write(correct)
    finally:
        catalog.close()


def _drop_one(txn: Transaction, catalog: Catalog, number: int) -> None:
    if not catalog.passages.drop_record(txn, number):
        catalog.delete_document(txn, number)


def count_references(txn: Transaction, catalog: Catalog, *, correct: bool = False) -> list[str]:
    """What is wrong with the rows of passages. correct: count references again, make missing rows,
    and delete passages without a reference. Raises CorruptMemory.
    """
    wanted, passages = _references(txn, catalog), catalog.passages
    wrong: list[str] = []
    kept: set[Digest] = set()
    for key, _ in list(txn.scan("passages")):
        number = read_number_key(key)
        try:
            row = passages.row(txn, number)
        except CorruptMemory as error:
            wrong.append(str(error))
            row = None
        right = 0 if row is None or row.digest in kept else wanted[row.digest]
        if row is not None and row.references != right:
            wrong.append(f"passage {number} counts {row.references} references instead of {right}")
        if row is None or not right:
            if correct:
                catalog.blocks.delete(txn, number)
                txn.delete("passages", number_key(number))
            continue
        kept.add(row.digest)
        if correct:
            passages.correct(txn, row, right)
        elif passages.number(txn, row.digest) != number:
            wrong.append(f"passage {number} is not found by its digest")
    missing = wanted.keys() - kept
    if missing:
        wrong.append(f"{len(missing)} passages that documents refer to have no row")
    if correct:
        for key, _ in list(txn.scan("digests")):
            if bytes(key) not in kept:
                txn.delete("digests", bytes(key))
        numbers = catalog.new_numbers(txn)
        for digest in missing:
            passages.correct(txn, StoredPassage(next(numbers), digest), wanted[digest])
    return wrong


def _references(txn: Transaction, catalog: Catalog) -> Counter[Digest]:
    """How often documents refer to each passage. Raises CorruptMemory."""
    wanted: Counter[Digest] = Counter()
    for document in catalog.documents(txn):
        if document.of_passages:
            wanted.update(digest for _, digest in catalog.digests_of(txn, document))
    return wanted


if __name__ == "__main__":
    main(*sys.argv[1:])
