"""What do a hundred thousand short documents cost, beside a thousand: in a memory, and published?

Two memories of each size: of the model that ships, documents of a block each (zeros, with random
landmark keys), asked with that model; and of documents of a passage of 64 tokens each, kept as
text, with a landmark of 64 numbers a token and 40 words, asked as a passage model's session asks,
but without a model: maxima of 12 rows, scores of 5 words, the choice, and the text of what is
chosen.

open, list         The memory opened, its documents listed, first and again.
question           The first one and a later one, over all documents.
replace one        One document written anew in the open memory, and the question after it; the
                   same in a memory that was opened for it.
publish            All of them to a directory (file://). Then of readers of that: as above.
publish replaced   One document, replaced before, from the open memory; and the next question of a
                   reader that had asked before, once it looks for a newer manifest.

Seconds are of all cores, and of the clock; requests and bytes those of the object store's client.
Medians of the repeats, in each of which five documents are replaced; all are published once.

    python -m benchmarks.share.short_documents --out short-documents.json
"""

import argparse
import gc
import shutil
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.common.memories import workplace
from benchmarks.common.options import add, plain_parser, prepare
from benchmarks.common.results import write_part
from benchmarks.common.tables import table
from benchmarks.share.many_documents import Requests
from benchmarks.speed.growth_documents import NAME
from benchmarks.speed.growth_documents import fill as fill_blocks
from benchmarks.speed.growth_models import Asked
from benchmarks.speed.growth_weights import loaded
from memstore import MemoryStore
from memstore.disk.format.block_words import BlockWords
from memstore.disk.format.document import Document, IngestSettings
from memstore.disk.format.index_spec import IndexSpec
from memstore.disk.format.runs import TokenRun, WordRun
from memstore.disk.format.signature import Signature
from memstore.disk.format.text_parts import Keep, Passage, encode_part
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.model.lookup_settings import LookupSettings
from memstore.model.passages.passage_choice import Candidates
from memstore.model.session_blocks import SessionBlocks
from memstore.model.texts.source_text import Text

SIGNATURE = Signature(
    "ab" * 20, "cd" * 20, {}, "bfloat16", 30, tuple(range(30)), 3, 64, 128
)  # SmolLM2's shape
SPEC = IndexSpec("benchmark", "ab" * 16, heads=1, width=64, dtype="int8", words=True)
SETTINGS = IngestSettings(passage_tokens=127)
TOKENS, WORDS, A_TIME = 64, 40, 500
CHEAP = 5  # times that a document is replaced in each repeat
HASH = 2_654_435_761  # that spreads the numbers of words


class Kind(Protocol):
    """One kind of memory."""

    keep: Keep

    def fill(self, path: Path, documents: int) -> None:
        """Make a memory of so many documents."""

    def ask(self, store: MemoryStore) -> None:
        """A question over all of them."""

    def replace(self, store: MemoryStore, name: str, turn: int) -> None:
        """Write a document anew."""

    def name(self, number: int) -> str:
        """The name of one of them."""


class Blocks:
    """Of the model that ships."""

    keep: Keep = "kv"

    def __init__(self) -> None:
        self._reader: Any = loaded(NAME)

    def fill(self, path: Path, documents: int) -> None:
        fill_blocks(path, self._reader, documents)

    def ask(self, store: MemoryStore) -> None:
        Asked(self._reader, store, 0).first_token()

    def replace(self, store: MemoryStore, name: str, turn: int) -> None:
        self._reader.ingest(Text(f"The price of mare {turn} is 310.", name), store, mode="replace")

    def name(self, number: int) -> str:
        return f"document {number}"


class Passages:
    """Of passages, without a model."""

    keep: Keep = "text"

    def fill(self, path: Path, documents: int) -> None:
        chance = np.random.default_rng(0)
        catalog = Catalog.create(path, SIGNATURE, codec="int8", selector=SPEC)

        def work(txn: Transaction, count: int) -> None:
            for _ in range(count):
                number = catalog.new_document_id(txn)
                row = Document(number, "", "ready", TOKENS, 1, settings=SETTINGS, codec="int8")
                row = replace(row, name=self.name(number // 2)).begin_write(0)
                passage, landmarks, words = _passage(chance)
                catalog.refer(txn, row, 0, catalog.digests(row, [passage]))
                run = TokenRun(0, landmarks, np.array([TOKENS]))
                catalog.runs.put(txn, number, catalog.runs.part("token"), run)
                run_of_words = WordRun(0, BlockWords.of([words]))
                catalog.runs.put(txn, number, catalog.runs.part("words"), run_of_words)
                catalog.texts.put_part(txn, number, 0, encode_part(0, [passage]))
                catalog.put_document(txn, row)

        for first in range(0, documents, A_TIME):
            catalog.database.write(partial(work, count=min(A_TIME, documents - first)))
        catalog.close()

    def ask(self, store: MemoryStore) -> None:
        blocks = SessionBlocks([(row.id, row.blocks) for row in store.ready()])
        scope = blocks.runs(blocks.count)
        q = torch.randn(12, SPEC.width, generator=torch.Generator().manual_seed(0))
        scores = store.retrieval.token_maxima(q, 0, scope).mean(0)
        words = {number * HASH % (1 << 32): 1.0 for number in (1, 5, 77, 1234, 40_000)}
        scores += 0.01 * store.retrieval.word_scores(words, scope)

        def content(document: int, block: int) -> bytes:
            return store.passages(document, block, block + 1)[0].ids.tobytes()

        found = Candidates(scores, scope, 8, lambda runs: None, content)
        for one in found.meant(LookupSettings(), parts=True):
            content(one.document, one.block)

    def replace(self, store: MemoryStore, name: str, turn: int) -> None:
        passage, landmarks, words = _passage(np.random.default_rng(1000 + turn))
        writer = store.write_document(
            name, source_hash=f"turn {turn}", settings=SETTINGS, mode="replace"
        )
        assert writer is not None
        with writer:
            kept = torch.from_numpy(landmarks)
            writer.add_passages([passage], [], given=[], landmarks=kept, words=[words])
            writer.finish()

    def name(self, number: int) -> str:
        return f"document {number}"


def _passage(chance: np.random.Generator) -> tuple[Passage, np.ndarray, list[tuple[int, int]]]:
    """A passage of random tokens, landmarks [tokens, 1, width] and words, rare and frequent."""
    passage = Passage(chance.integers(0, 49_000, TOKENS), 0, "", 0, 4 * TOKENS)
    landmarks = chance.integers(-127, 128, (TOKENS, 1, SPEC.width)).astype(np.int8)
    words = np.unique(chance.zipf(1.3, WORDS) % 50_000)
    return passage, landmarks, [(int(word) * HASH % (1 << 32), 1) for word in words]


class Steps:
    """Seconds of each step, of all cores and of the clock, and requests and bytes sent."""

    def __init__(self, title: str) -> None:
        self._title, self._found = title, dict[str, list[dict[str, float]]]()

    def __call__(self, name: str, run: Callable[[], Any]) -> Any:
        """Measure one once more."""
        gc.collect()  # what earlier steps left
        requests = Requests()
        with requests.counted():
            began, busy = perf_counter(), process_time()
            result = run()
            clock, core = perf_counter() - began, process_time() - busy
        found = {"core": core, "clock": clock, "requests": requests.count, "sent": requests.sent}
        self._found.setdefault(name, []).append(found)
        print(f"{self._title}: {name}: {core:.4f} s of a core, {clock:.4f} clock", flush=True)
        return result

    def medians(self) -> dict[str, dict[str, float]]:
        return {
            name: {what: statistics.median(one[what] for one in of) for what in of[0]}
            for name, of in self._found.items()
        }


def measure(kind: Kind, work: Path, count: int, repeats: int, title: str) -> dict[str, Any]:
    """The steps of one memory."""
    path, published = work / f"memory-{count}", work / f"published-{count}"
    kind.fill(path, count)
    step = Steps(title)
    for turn in range(repeats):
        of_memory(step, kind, path, count, turn)
    with MemoryStore.open(path) as store:
        url = f"file://{published}"
        step("publish all", partial(store.publish, url, keep=kind.keep))
        for turn in range(repeats):
            of_publication(step, kind, store, url, kind.name(count // 4), turn)
    shutil.rmtree(path)
    shutil.rmtree(published)
    return step.medians()


def of_memory(step: Steps, kind: Kind, path: Path, count: int, turn: int) -> None:
    """The steps of a memory in a directory."""
    with step("open", lambda: MemoryStore.open(path)) as store:
        looked_at(step, "", kind, store)
        kind.replace(store, kind.name(count // 5), turn)  # the first one imports what it needs
        for one in range(CHEAP):
            name = kind.name(count // 2 + one)
            step("replace one", partial(kind.replace, store, name, turn))
        step("question after it", lambda: kind.ask(store))
    with MemoryStore.open(path) as store:
        name = kind.name(count // 3)
        step("replace one, opened for it", lambda: kind.replace(store, name, turn))


def of_publication(
    step: Steps, kind: Kind, store: MemoryStore, url: str, name: str, turn: int
) -> None:
    """The steps of a reader, and of a document that is published anew meanwhile."""
    with step("open published", lambda: MemoryStore.open(url)) as reader:
        looked_at(step, " published", kind, reader)
        for one in range(CHEAP):
            kind.replace(store, name, CHEAP * turn + one)
            sending = partial(store.publish, url, [name], keep=kind.keep, replace=True)
            step("publish replaced", sending)

        def again() -> None:
            reader._on_disk().catalog.database.refresh()
            kind.ask(reader)

        step("question after that", again)


def looked_at(step: Steps, where: str, kind: Kind, store: MemoryStore) -> None:
    """List what is there and ask, twice."""
    for what, run in ("list", store.documents), ("question", lambda: kind.ask(store)):
        step(f"{what}{where}", run)
        step(f"{what}{where}, again", run)


def main() -> None:
    options = read_options()
    prepare(options.threads)
    kinds: dict[str, Callable[[], Kind]] = {"blocks": Blocks, "passages": Passages}
    with workplace(options) as directory:
        for name in options.kinds:
            kind = kinds[name]()
            warm = directory / "warm"
            measure(kind, warm, 50, 1, f"{name}, not counted")
            found = {
                f"{count:,}": measure(kind, directory, count, options.repeats, f"{name}, {count:,}")
                for count in options.documents
            }
            print(f"\n{table_of(found)}\n")
            write_part(options, f"short documents, {name}", found)


def read_options() -> argparse.Namespace:
    options = plain_parser(__doc__)
    options.add_argument("--work", type=Path, help="a directory (default: a temporary one)")
    add(options, "--kinds", ["blocks", "passages"], choices=("blocks", "passages"))
    add(options, "--documents", [1000, 100_000])
    add(options, "--repeats", 3)
    return options.parse_args()


def table_of(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Milliseconds of a core of each step and memory, and how often the first's the last's are."""
    (few, *_), (*_, many) = found.values(), found.values()
    rows = []
    for name in few:
        cells = [f"{1e3 * steps[name]['core']:.3g}" for steps in found.values()]
        ratio = many[name]["core"] / few[name]["core"]
        sent = many[name]["sent"] / 1e3
        rows.append([name, *cells, f"{ratio:.2g}", f"{many[name]['requests']:.0f}", f"{sent:.0f}"])
    titles = ["ms of a core", *found, "ratio", "requests, of the last", "kB sent"]
    return table(titles, rows)


if __name__ == "__main__":
    main()
