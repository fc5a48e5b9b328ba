"""What does a memory cost that holds ten thousand documents, or one of ten million tokens?

opened, listed   Seconds to open and to list the documents; of the whole command `ls`.
written          Milliseconds to write one more document of two chunks, and to forget one, in a
                 memory that was opened and looked up in before. Documents are written in turns in
                 both memories, so that a change of the disk's speed meets them alike.
the long one     Seconds to write it (without a model: random keys and values), to open and search
                 the memory, and to forget it.
compacted        Seconds to forget all documents but one, and to compact; bytes before and after.

The models are tiny: one layer, one head, keys of 8 values. Medians of all repeats.

    python -m benchmarks.storage.many_documents
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.memories import workplace
from benchmarks.common.results import write_part
from benchmarks.common.tables import table
from benchmarks.common.timing import interleaved, timed
from benchmarks.storage.records import begin, reading_parser
from memstore import MemoryStore
from memstore.block import RecordKey
from memstore.disk.format.document import Document, IngestSettings
from memstore.disk.format.runs import KeyRun
from memstore.disk.format.signature import Signature
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.catalog import Catalog

CHUNK_BLOCKS, BLOCK, DIM = 2, 16, 8
CHUNK = CHUNK_BLOCKS * BLOCK
BUDGET = 8 << 20


def signature(block_size: int) -> Signature:
    """Of a model of one layer with one head."""
    return Signature("ab" * 20, "cd" * 20, {}, "float16", 1, (0,), 1, DIM, block_size)


def fill(path: Path, documents: int) -> None:
    """A memory with so many documents of one block, hundreds of them a transaction."""
    catalog = Catalog.create(path, signature(BLOCK), codec="raw")
    bits = np.zeros((1, 1, BLOCK, DIM), dtype="<i2")

    def work(txn: Transaction) -> None:
        for _ in range(min(500, documents)):
            number = catalog.new_document_id(txn)
            row = Document(number, f"document {number}", "ready", BLOCK, 1).begin_write(0)
            key = RecordKey(number, 0, 0)
            (record,) = catalog.blocks.encode(key, bits, bits, [BLOCK], row.writes[0].id)
            catalog.blocks.put(txn, key, record)
            catalog.texts.put_tokens(txn, number, 0, 0, range(BLOCK))
            catalog.runs.put(txn, number, 0, KeyRun(0, bits[:, :, 0]))
            catalog.put_document(txn, replace(row, bytes=len(record)))

    for _ in range(0, documents, 500):
        catalog.database.write(work)
    catalog.close()


def write(store: MemoryStore, name: str, chunks: int) -> None:
    """One document of random blocks."""
    size = store.signature.block_size
    shape = (CHUNK_BLOCKS, 1, size, DIM)
    k, v = torch.randn(shape).half(), torch.randn(shape).half()
    ids = np.arange(CHUNK_BLOCKS * size)
    settings = IngestSettings(CHUNK_BLOCKS, 0)
    writer = store.write_document(name, source_hash="1", settings=settings)
    assert writer is not None
    with writer:
        for number in range(chunks):
            keys = torch.randn(CHUNK_BLOCKS, 1, DIM).half()
            writer.add_chunk(ids, number * len(ids), {0: (k, v, keys)})
        writer.finish()


def search(store: MemoryStore) -> None:
    scope = [(document.id, 0, document.blocks) for document in store.ready()]
    store.retrieval.search_landmarks(0, torch.randn(1, 1, DIM), scope, 4)


def opened(path: Path) -> float:
    """Seconds to open a memory and list its documents."""

    def run() -> None:
        with MemoryStore.open(path) as store:
            store.documents()

    return timed(run)[0]


def command(path: Path) -> float:
    """Seconds of the command `ls`."""
    line = [sys.executable, "-m", "memstore", "ls", "--store", str(path)]
    return timed(lambda: subprocess.run(line, check=True, capture_output=True))[0]


def one_more(stores: dict[str, MemoryStore], repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds to write and to forget one document, in each memory."""

    def writing(store: MemoryStore) -> Callable[[int], float]:
        return lambda repeat: 1e3 * timed(lambda: write(store, f"more {repeat}", 2))[0]

    def forgetting(store: MemoryStore) -> Callable[[int], float]:
        return lambda repeat: 1e3 * timed(lambda: store.forget(f"more {repeat}"))[0]

    for store in stores.values():
        search(store)
        write(store, "first", 2)
    found = {}
    for what, verb in ("write", writing), ("forget", forgetting):
        times = interleaved({name: verb(store) for name, store in stores.items()}, repeats)
        found[what] = {name: statistics.median(of) for name, of in times.items()}
    return found


def long_document(path: Path, tokens: int) -> dict[str, float]:
    """Seconds of each step of a long document's life."""
    with MemoryStore.create(path, signature(64), codec="raw", host_budget=BUDGET) as store:
        written = timed(lambda: write(store, "long", tokens // (CHUNK_BLOCKS * 64)))[0]

    def look() -> None:
        with MemoryStore.open(path, host_budget=BUDGET) as store:
            search(store)

    searched = timed(look)[0]
    with MemoryStore.open(path, host_budget=BUDGET) as store:
        forgotten = timed(lambda: store.forget("long"))[0]
    return {"written": written, "opened_and_searched": searched, "forgotten": forgotten}


def emptied(path: Path) -> dict[str, float]:
    """Forget all documents but one, and compact."""
    with MemoryStore.open(path) as store:
        names = [document.name for document in store.documents()]
        forgotten = timed(lambda: [store.forget(name) for name in names[1:]])[0]
        compacted, (before, after) = timed(store.compact)
        assert [document.name for document in store.documents()] == names[:1]
    return {"forgotten": forgotten, "compacted": compacted, "before": before, "after": after}


def measure(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    sizes = {f"{n:,}": n for n in (options.few, options.documents)}
    paths = {name: work / str(n) for name, n in sizes.items()}
    for name, n in sizes.items():
        fill(paths[name], n)
    found: dict[str, Any] = {}
    for what, run in ("opened", opened), ("docs", command):
        runs = {name: (lambda _, path=path, run=run: run(path)) for name, path in paths.items()}
        times = interleaved(runs, 5)
        found[what] = {name: statistics.median(of) for name, of in times.items()}
    stores = {name: MemoryStore.open(path, host_budget=BUDGET) for name, path in paths.items()}
    found |= one_more(stores, options.repeats)
    for store in stores.values():
        store.close()
    if options.tokens:
        found["long"] = long_document(work / "long", options.tokens)
        found["emptied"] = emptied(paths[f"{options.documents:,}"])
    return found


def main() -> None:
    arguments = reading_parser(__doc__)
    arguments.add_argument("--few", type=int, default=100)
    arguments.add_argument("--documents", type=int, default=10_000)
    arguments.add_argument("--tokens", type=int, default=10_000_000, help="0: stop before")
    options = arguments.parse_args()
    begin(options)
    with workplace(options) as directory:
        found = measure(directory, options)
    units = {"opened": "s", "docs": "s", "write": "ms", "forget": "ms"}
    rows = [[f"{what}, {unit}", *(f"{v:.3g}" for v in found[what].values())]
            for what, unit in units.items()]  # fmt: skip
    print(table(["documents", *found["opened"]], rows))
    for what in ("long", "emptied"):
        print(what, {name: round(value, 2) for name, value in found.get(what, {}).items()})
    write_part(options, "many_documents", found)


if __name__ == "__main__":
    main()
