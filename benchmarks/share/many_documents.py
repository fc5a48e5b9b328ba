"""What does it cost to publish ten thousand documents of a hundred blocks, to open one, to list
all, and to open with all of them attached?

published    Seconds, requests and bytes to publish all of them at once to a directory (file://).
one more     The same to publish one more, with a process that begins anew; to append to one of
             them; to unpublish one; and to prune.
one row      To read the row and pieces of one document by its name, of a place nothing is known of.
listed       To list all documents.
opened       To open the memory and to list them (MemoryStore.open, which reads every row).
one asked    Opened, and one document searched.
all asked    Opened, and all documents searched: every landmark key is read.

Requests are those of the object store's client, each with its bytes; what they would wait for at a
distance follows from `rounds`, the requests that had to wait for another's answer, told for what
has few of them. The model is tiny (a layer, a head, keys of 8 values, 4 tokens a block, so that
10,000 documents are a few hundred megabytes); rows, pieces and pages are as large as another's with
as many layers. Medians of the repeats.

    python -m benchmarks.share.many_documents
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.memories import workplace
from benchmarks.common.results import write_part
from benchmarks.common.tables import table
from benchmarks.common.timing import timed
from benchmarks.storage.records import begin, reading_parser
from memstore import MemoryStore
from memstore.block import RecordKey
from memstore.disk.format.document import Document, IngestSettings
from memstore.disk.format.runs import KeyRun
from memstore.disk.format.signature import Signature
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.share.garbage_collection import prune
from memstore.share.object_store import ObjectStore
from memstore.share.open_object_store import open_object_store
from memstore.share.publish import unpublish
from memstore.share.published import Published

BLOCK, DIM, A_TIME = 4, 8, 50
SIGNATURE = Signature("ab" * 20, "cd" * 20, {}, "float16", 1, (0,), 1, DIM, BLOCK)
SETTINGS = IngestSettings(2, 0)
BUDGET = 8 << 20


class Requests:
    """Requests of every place of this process, and their bytes."""

    def __init__(self) -> None:
        self.count = self.read = self.sent = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Until the block ends."""
        kept = {name: getattr(ObjectStore, name) for name in ("get", "_range", "names", "create",
                                                              "put", "_delete")}  # fmt: skip

        def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def counted(place: ObjectStore, *arguments: Any) -> Any:
                result = call(place, *arguments)
                self.count += 1
                if name in ("get", "_range"):
                    self.read += len(result)
                if name in ("create", "put"):
                    self.sent += len(arguments[1])
                return result

            return counted

        for name, call in kept.items():
            setattr(ObjectStore, name, counting(name, call))
        try:
            yield
        finally:
            for name, call in kept.items():
                setattr(ObjectStore, name, call)


def fill(path: Path, documents: int, blocks: int) -> None:
    """A memory with so many documents of random blocks."""
    catalog = Catalog.create(path, SIGNATURE, codec="raw")
    random = np.random.default_rng(0)

    def work(txn: Transaction) -> None:
        for _ in range(min(A_TIME, documents)):
            number = catalog.new_document_id(txn)
            tokens = blocks * BLOCK
            row = Document(number, f"document {number:06}", "ready", tokens, blocks)
            row = replace(row, settings=SETTINGS, source_hash=f"{number}").begin_write(0)
            bits = random.normal(size=(blocks, 1, 2 * BLOCK + 1, DIM)).astype("<f2").view("<i2")
            k, v = (np.ascontiguousarray(x) for x in (bits[:, :, :BLOCK], bits[:, :, BLOCK:-1]))
            key = RecordKey(number, 0, 0)
            records = catalog.blocks.encode(key, k, v, [BLOCK] * len(k), row.writes[0].id)
            for at, record in enumerate(records):
                catalog.blocks.put(txn, key._replace(block=at), record)
            ids = random.integers(0, 1000, tokens)
            catalog.texts.put_tokens(txn, number, 0, 0, ids)
            catalog.runs.put(txn, number, 0, KeyRun(0, np.ascontiguousarray(bits[:, :, -1])))
            catalog.put_document(txn, replace(row, bytes=sum(map(len, records))))

    for _ in range(0, documents, A_TIME):
        catalog.database.write(work)
    catalog.close()


def add(store: MemoryStore, name: str, mode: Any = "new") -> None:
    """One more document of two chunks, or two more chunks of one."""
    writer = store.write_document(name, source_hash=mode, settings=SETTINGS, mode=mode)
    assert writer is not None
    with writer:
        for number in range(2):
            k, v, keys = (torch.randn(2, 1, n, DIM).half() for n in (BLOCK, BLOCK, 1))
            first = writer.tokens + number * 2 * BLOCK
            writer.add_chunk(np.arange(2 * BLOCK), first, {0: (k, v, keys[:, :, 0])})
        writer.finish()


def ask(url: str, names: list[str] | None, documents: int) -> None:
    """Open the memory and search documents of it."""
    with MemoryStore.open(url, host_budget=BUDGET) as store:
        found = store.ready(names)
        assert len(found) == (documents if names is None else len(names))
        scope = [(document.id, 0, document.blocks) for document in found]
        store.retrieval.search_landmarks(0, torch.randn(1, 1, DIM), scope, 4)


def listed(url: str) -> None:
    with MemoryStore.open(url, host_budget=BUDGET) as store:
        store.documents()


class Steps:
    """Of each step its seconds, requests, and bytes read and sent."""

    def __init__(self, title: str) -> None:
        self.title, self.found = title, dict[str, list[float]]()

    def __call__(self, name: str, run: Callable[[], object], repeats: int = 1) -> None:
        """Measure one: the median of the seconds of its repeats."""
        seconds = []
        for _ in range(repeats):
            requests = Requests()
            with requests.counted():
                seconds.append(timed(run)[0])
        times = statistics.median(seconds)
        self.found[name] = [times, requests.count, requests.read, requests.sent]
        print(f"{self.title}: {name}: {times:.3g} s, {requests.count} requests", flush=True)


def measure(work: Path, documents: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """The steps of a memory that is published at once."""
    memory, url = work / f"memory-{documents}", f"file://{work}/published-{documents}"
    fill(memory, documents, options.blocks)
    step = Steps(f"{documents:,}")
    with MemoryStore.open(memory, host_budget=BUDGET) as store:
        step("published", lambda: store.publish(url))
        add(store, "document 000050x")
        step("one more", lambda: store.publish(url, ["document 000050x"]))
        add(store, "document 000051", "append")
        step("appended", lambda: store.publish(url, ["document 000051"]))
        step("all again", lambda: store.publish(url))
    one = f"document {documents // 2:06}"
    step("unpublished", lambda: unpublish(open_object_store(url), ["document 000050x"]))
    step("pruned", lambda: prune(open_object_store(url), grace=0))
    step("one row", lambda: Published.open(open_object_store(url)).entries([one]), options.repeats)
    step("listed", lambda: Published.open(open_object_store(url)).documents(), options.repeats)
    step("opened", lambda: listed(url), options.repeats)
    step("one asked", lambda: ask(url, [one], documents), options.repeats)
    step("all asked", lambda: ask(url, None, documents), options.repeats)
    return step.found


def main() -> None:
    arguments = reading_parser(__doc__)
    arguments.add_argument("--few", type=int, default=100)
    arguments.add_argument("--documents", type=int, default=10_000)
    arguments.add_argument("--blocks", type=int, default=100)
    options = arguments.parse_args()
    begin(options)
    with workplace(options) as directory:
        found = {f"{n:,}": measure(directory, n, options) for n in (options.few, options.documents)}
    print(table_of(found))
    write_part(options, "share_many_documents", found)


def table_of(found: dict[str, dict[str, list[float]]]) -> str:
    """A table of steps, which are the same of each memory."""
    titles = ["step", *(f"{n}: {what}" for n in found for what in ("s", "requests", "kB"))]
    rows = [
        [name]
        + [
            cell
            for steps in found.values()
            for s, n, read, sent in [steps[name]]
            for cell in (f"{s:.3g}", f"{n:.0f}", f"{(read + sent) / 1e3:.0f}")
        ]
        for name in next(iter(found.values()))
    ]
    return table(titles, rows)


if __name__ == "__main__":
    main()
