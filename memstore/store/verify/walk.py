"""What the children of a verification do: walk over a memory, or drop documents and records of
passages; and the server that forks them.
"""

import ctypes
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

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
from memstore.store.transfer.document_parts import Head, IndexRun, PartOrder, Record, Tokens


class PassageWalk:
    """What a walk over a memory has seen of its passages."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._whole: dict[Digest, tuple[int, int]] = {}  # records and their bytes
        self.damaged: dict[int, str] = {}  # by number, what is wrong

    def check(self, txn: Transaction, document: Document, lengths: np.ndarray) -> tuple[int, int]:
        """Read the records of a document's passages, those that no other document had; how many
        there are, and their bytes. What is wrong is told in `damaged`, and by `problems`.
        """
        records = size = 0
        for block, digest in self._catalog.digests_of(txn, document):
            if digest not in self._whole:
                self._whole[digest] = self._check(txn, document, block, digest, int(lengths[block]))
            count, its = self._whole[digest]
            records, size = records + count, size + its
        return records, size

    def _check(
        self, txn: Transaction, document: Document, block: int, digest: Digest, length: int
    ) -> tuple[int, int]:
        try:
            row = self._catalog.passages.find(txn, digest)
        except CorruptMemory:
            return 0, 0  # which `problems` meets
        if row is None:
            return 0, 0
        try:
            return self._read(txn, document, row, length)
        except CorruptMemory as error:
            what = str(error).partition(";")[0]
            self.damaged[row.number] = (
                f"passage {block} of document {document.name!r}: {what}; it is computed anew when "
                "it is needed"
            )
            return 0, 0

    def _read(
        self, txn: Transaction, document: Document, row: StoredPassage, length: int
    ) -> tuple[int, int]:
        """Raises CorruptMemory with the first thing that is wrong."""
        blocks, records, size = self._catalog.blocks, 0, 0
        layers = document.layers_of(self._catalog.signature) if row.bytes else []
        for key, data in blocks.walk(txn, row.number):
            if key[1:] != (0, *layers[records : records + 1]):
                raise CorruptMemory(f"a record before layer {key.layer} is missing, or extra")
            found = txn.view("blocks", record_key(key))
            tokens = blocks.check(found or b"", key, row.digest)
            if tokens != length:
                raise CorruptMemory(f"a record of {tokens} tokens instead of {length}")
            records, size = records + 1, size + len(data)
        if records != len(layers) or size != row.bytes:
            raise CorruptMemory(f"{records} records of {size} bytes instead of {row.bytes}")
        return records, size

    def problems(self) -> Iterator[str]:
        """What is wrong with the counts, now that all documents were read."""
        passages = self._catalog.passages
        with self._catalog.database.read() as txn:
            try:
                wanted = _references(txn, self._catalog)
                for row in passages.all(txn):
                    right = wanted.pop(row.digest, 0)
                    if row.references != right:
                        yield (
                            f"passage {row.number} counts {row.references} references instead of "
                            f"{right}"
                        )
                    if passages.number(txn, row.digest) != row.number:
                        yield f"passage {row.number} is not found by its digest"
            except CorruptMemory as error:
                yield str(error)
                return
            if wanted:
                yield f"{len(wanted)} passages that documents refer to are not told of"


def recount(txn: Transaction, catalog: Catalog) -> None:
    """Count references anew: what is not told is told, and passages that nobody refers to go.
    Raises CorruptMemory.
    """
    wanted = _references(txn, catalog)
    passages = catalog.passages
    there: set[Digest] = set()
    for key, _ in list(txn.scan("passages")):
        number = read_number_key(key)
        try:
            row = passages.row(txn, number)
        except CorruptMemory:
            row = None
        if row is None or not wanted[row.digest] or row.digest in there:
            catalog.blocks.delete(txn, number)
            txn.delete("passages", number_key(number))
            continue
        there.add(row.digest)
        passages.correct(txn, row, wanted[row.digest])
    for key, _ in list(txn.scan("digests")):
        if bytes(key) not in there:
            txn.delete("digests", bytes(key))
    numbers = catalog.new_numbers(txn)
    for digest in wanted.keys() - there:
        passages.correct(txn, StoredPassage(next(numbers), digest), wanted[digest])


def _references(txn: Transaction, catalog: Catalog) -> Counter[Digest]:
    """How often documents refer to each passage. Raises CorruptMemory."""
    wanted: Counter[Digest] = Counter()
    for document in catalog.documents(txn):
        if document.of_passages:
            for part in catalog.texts.passage_parts(txn, document.id):
                wanted.update(catalog.digests(document, part.passages))
    return wanted


_DOCUMENT_TABLES = ("documents", "tokens", "landmarks", "blocks")
_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def serve() -> None:
    """Fork a child for every line [what, path, documents] of standard input; its events go to
    standard output, after a first one that says that it listens.
    """
    server = os.getpid()
    _end_with_parent()
    _say({"event": "listening"})
    for line in sys.stdin:
        what, path, documents = json.loads(line)
        pid = os.fork()
        if not pid:
            try:
                _end_with_parent()
                if os.getppid() != server:  # it had ended before that
                    os._exit(1)
                _do(what, Path(path), set(documents))
            finally:
                sys.stdout.flush()
                os._exit(0)
        os.waitpid(pid, 0)
        print()  # ends what the child may have left unfinished
        _say({"event": "gone"})


def _end_with_parent() -> None:
    """Have this process killed as soon as its parent has ended, where the system can: when a repair
    is killed, none of its children keeps the memory locked. A thread could not do it, for LMDB
    waits, and reads damaged pages, with Python's lock held.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _say(event: dict[str, Any]) -> None:
    print(json.dumps(event), flush=True)


def _do(what: str, path: Path, documents: set[int]) -> None:
    try:
        if what == "walk":
            for event in walk(path, documents):
                _say(event)
        else:
            _drop(path, documents)
    except MemstoreError as error:
        if what == "walk" and isinstance(error, CorruptMemory):
            _say({"event": "problem", "document": None, "name": "", "what": str(error)})
        else:
            _say({"event": "error", "kind": type(error).__name__, "what": str(error)})
    _say({"event": "end"})


def walk(path: Path, skip: set[int]) -> Iterator[dict[str, Any]]:
    """Events of a walk over every document but those in `skip`, in this process. Raises what
    opening raises.
    """
    catalog = Catalog.open(path, read_only=True)
    try:
        catalog.database.last_commit()
        with catalog.database.read() as txn:
            catalog.next_number(txn)
            rows = [read_number_key(key) for key, _ in txn.scan("documents")]
            documents = set(rows).union(*(_owners(txn, table) for table in ("tokens", "landmarks")))
            passages = {read_number_key(key) for key, _ in txn.scan("passages")}
            nobodys = _owners(txn, "blocks") - documents - passages
        for number in sorted(nobodys):
            what = f"records of number {number}, of which nothing else is told"
            yield {"event": "passage", "number": number, "name": "", "what": what}
        walked = PassageWalk(catalog)
        for number in sorted(documents):
            if number in skip:
                continue
            name = f"document {number}"
            found, records, size = [], 0, 0
            yield {"event": "reading", "document": number, "name": name}
            try:
                document = _row(catalog, number, known=number in rows)
                if document is None:
                    continue  # forgotten or begun by another process meanwhile
                name = document.name
                yield {"event": "reading", "document": number, "name": name}
                # what an interrupted import left is removed by the next one
                if document.state != "importing":
                    with catalog.database.read() as txn:
                        records, size = _check_document(txn, catalog, document, walked)
            except DocumentNotFound:
                continue
            except CorruptMemory as error:
                found = [str(error)]
            for passage, what in walked.damaged.items():
                yield {"event": "passage", "number": passage, "name": name, "what": what}
            walked.damaged.clear()
            for what in found:
                yield {"event": "problem", "document": number, "name": name, "what": what}
            if found:
                yield {"event": "done", "document": number}
            else:
                yield {"event": "whole", "document": number, "records": records, "bytes": size}
        for what in walked.problems():
            yield {"event": "count", "what": what}
    finally:
        catalog.close()


def _row(catalog: Catalog, number: int, *, known: bool) -> Document | None:
    """A document's row; None if there is nothing of it any more. Raises CorruptMemory."""
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
    """Every document that a table has an entry of."""
    owners = set()
    start = b""
    while (entry := next(txn.scan(table, start), None)) is not None:
        number = read_number_key(entry[0][:8])
        owners.add(number)
        start = number_key(number + 1)
    return owners


def _check_document(
    txn: Transaction, catalog: Catalog, document: Document, passages: PassageWalk
) -> tuple[int, int]:
    """Read all of a document; return its records and their bytes. Raises CorruptMemory with the
    first thing that is wrong.
    """
    try:
        return _read_all(txn, catalog, document, passages)
    except ValueError as error:
        raise CorruptMemory(f"document {document.name!r}: {error}") from error


def _read_all(
    txn: Transaction, catalog: Catalog, document: Document, passages: PassageWalk
) -> tuple[int, int]:
    """The same. Raises ValueError too. What is met on the way from one entry to the next has to be
    found by its key as well, as readers look it up: that takes another way through the file.
    """
    number, runs, blocks = document.id, catalog.runs, catalog.blocks
    head = Head(catalog.signature, document, catalog.index_spec)
    order = PartOrder(head, unfinished=True)
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


def _drop(path: Path, numbers: set[int]) -> None:
    """Delete documents where they lie, and the records of passages, and count references to
    passages anew. Raises CorruptMemory where pages of keys are damaged.
    """
    catalog = Catalog.open(path)
    try:
        with catalog.database.writer():
            if not is_sound(path):
                raise CorruptMemory("pages of keys are damaged")
            for number in sorted(numbers):
                drop = partial(_drop_one, catalog=catalog, number=number)
                catalog.database.write(drop, beyond_limit=True)
            catalog.database.write(partial(recount, catalog=catalog), beyond_limit=True)
    finally:
        catalog.close()


def _drop_one(txn: Transaction, catalog: Catalog, number: int) -> None:
    if not catalog.passages.drop_records(txn, number):
        catalog.delete_document(txn, number)


if __name__ == "__main__":
    serve()
