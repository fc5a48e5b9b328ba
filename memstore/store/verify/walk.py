"""What the children of a verification do: walk over a memory, drop documents, or salvage what can
be reached; and the server that forks them.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from memstore.disk.format.document import Document
from memstore.disk.format.keys import (
    document_key,
    document_range,
    read_document_key,
    read_passage_key,
    record_key,
    tokens_key,
)
from memstore.disk.lmdb.database import Transaction
from memstore.disk.salvage import is_sound, salvage
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.run_table import NEXT
from memstore.errors import CorruptMemory, DocumentNotFound, MemstoreError
from memstore.store.verify.walk_passages import PassageWalk, recount

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
        elif what == "drop":
            _drop(path, documents)
        else:
            _say({"event": "undone", "commit": salvage(path)})
    except MemstoreError as error:
        if what == "walk":
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
        catalog.read_selector(NEXT)
        with catalog.database.read() as txn:
            catalog.next_number(txn)
            rows = [read_document_key(key) for key, _ in txn.scan("documents")]
            documents = set(rows).union(*(_owners(txn, table) for table in ("tokens", "landmarks")))
            passages = {read_passage_key(key) for key, _ in txn.scan("passages")}
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
        if txn.view("documents", document_key(number)) is not None:
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
        number = read_document_key(entry[0][:8])
        owners.add(number)
        start = document_key(number + 1)
    return owners


def _check_document(
    txn: Transaction, catalog: Catalog, document: Document, passages: PassageWalk
) -> tuple[int, int]:
    """Read all of a document; return its records and their bytes. Raises CorruptMemory with the
    first thing that is wrong.
    """
    number, blocks = document.id, document.blocks

    def expect(right: bool, what: str) -> None:
        if not right:
            raise CorruptMemory(f"document {document.name!r}: {what}")

    if document.of_passages:
        expect(catalog.selector is not None, "passages in a memory without a selector")
    else:
        expect(catalog.selector is None, "chunks in a memory with a selector")
        _check_tokens(txn, catalog, document, expect)
    lengths = catalog.block_lengths(txn, document)
    expect(blocks == len(lengths), f"{document.tokens} tokens in {blocks} blocks")
    for first_number, _ in catalog.parts(txn, number):
        # Readers look up by key, which takes another way through the file than walking from one
        # entry to the next.
        found = txn.view("tokens", tokens_key(number, first_number))
        expect(found is not None, f"tokens from {first_number} on are not found")

    first = document.first_blocks(catalog.signature)
    catalog.runs.check(txn, number, first, lengths)
    if document.of_passages:
        return passages.check(txn, document, lengths)
    expected = (
        (block, layer) for block in range(blocks) for layer in first if block >= first[layer]
    )
    records = size = 0
    for key, data in catalog.blocks.walk(txn, number):
        expect(
            (key.block, key.layer) == next(expected, None),
            f"a record before block {key.block} is missing or extra",
        )
        found = txn.view("blocks", record_key(key))
        expect(found is not None, f"block {key.block}, layer {key.layer} is not found")
        length = catalog.blocks.check(found or b"", key, document.write_of(key.block))
        right = lengths[key.block]
        expect(length == right, f"block {key.block} has {length} tokens instead of {right}")
        records, size = records + 1, size + len(data)
    expect(next(expected, None) is None, f"records after the first {records} are missing")
    expect(size == document.bytes, f"{size} bytes of records instead of {document.bytes}")
    return records, size


def _check_tokens(
    txn: Transaction, catalog: Catalog, document: Document, expect: Callable[[bool, str], None]
) -> None:
    tokens = 0
    for part in catalog.token_parts(txn, document.id):
        expect(part.first == tokens, f"tokens {tokens}..{part.first} are missing")
        tokens += len(part.ids)
    expect(tokens == document.tokens, f"{tokens} tokens instead of {document.tokens}")


def _drop(path: Path, numbers: set[int]) -> None:
    """Delete documents where they lie, and the records of passages, and count references to
    passages anew. Raises CorruptMemory where pages of keys are damaged.
    """
    catalog = Catalog.open(path)
    try:
        with catalog.database.writer():
            if not is_sound(path):
                raise CorruptMemory(f"{path}: pages of keys are damaged")
            for number in sorted(numbers):
                drop = partial(_drop_one, catalog=catalog, number=number)
                catalog.database.write(drop, beyond_limit=True)
            catalog.database.write(partial(recount, catalog=catalog), beyond_limit=True)
    finally:
        catalog.close()


def _drop_one(txn: Transaction, catalog: Catalog, number: int) -> None:
    if not catalog.passages.records.drop(txn, number):
        catalog.delete_document(txn, number)


if __name__ == "__main__":
    serve()
