"""How soon does a passage model answer from what it ingested before?

A document of --length tokens of a book is in a memory; the model is loaded and has answered before.
Time to the first token of an answer, from the question as a string:

- from the memory: its best --passages are chosen and read, with the page cache warm;
- from the text: the same passages, chosen before the clock began, in the prompt of the stock model;
- from a new process with the model loaded, from opening the memory on, its pages not in the page
  cache.

Taken in turns; medians of the clock and of this process's processor time, which other programs do
not disturb. With --keep text the memory holds no keys and values, and none that an earlier question
computed: each question computes those of its passages.

    python -m benchmarks.real.first_token --text books-test.jsonl.zst --model smollm2/
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.common.memories import drop_cache
from benchmarks.common.options import add, prepare
from benchmarks.common.results import write_part
from benchmarks.common.stock import Stock
from benchmarks.common.tables import spread, table, tokens_number, tokens_text
from benchmarks.common.timing import in_fresh_process, interleaved, paired_ratio, timed
from benchmarks.real.blocks import Blocks, passages
from benchmarks.real.hay import Hay
from benchmarks.real.memory import Memory
from benchmarks.real.passage_model import parser, passage_model
from benchmarks.real.plan import Question
from benchmarks.real.prompting import Prompted, counting, tokenizer_of
from memstore import MemoryStore
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.model.passages.passage_session import PassageSession
from memstore.training.corpus import read_documents

CHUNK = 512  # tokens that the stock model reads at once
QUESTION = "What is the name of the old man who lives in the house near the river?"
FRESH = 3  # new processes


class Asked:
    """A document of a memory, asked with so many passages read."""

    def __init__(self, memory: Memory, document: str, passages: int) -> None:
        self.memory, self.reader, self.document = memory, memory.reader, document
        self.settings = {"top_k": passages, "score_range": 1e9}

    def session(self) -> PassageSession:
        session: PassageSession = self.reader.session(
            self.memory.store, [self.document], **self.settings
        )
        return session

    def chosen(self) -> list[int]:
        """The passages that are read."""
        ids, words = self.reader.turn_ids(QUESTION, first=True)
        with self.session() as session:
            return [one.block for one in session.choose(QUESTION, ids, words)]

    def first_token(self) -> int:
        """The first token of an answer."""
        with self.session() as session:
            state = session.ask(QUESTION, lambda: None)
            return int(session.logits(state[None]).argmax())


def main() -> None:
    options = read_options()
    prepare(options.threads)
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        books = list(read_documents(options.text))
        hay = Hay(counting(options.model), books, Random(f"speed {options.seed}"))
        documents = {"book": hay.prose(options.length)}
        blocks = Blocks(passages(tokenizer_of(options.model)), documents)
        directory = work / f"{options.dtype}-{options.length}-{options.seed}-{options.keep}"
        with Memory(ungated(options), directory, blocks) as memory:
            memory.read_in(documents, options.keep)
            found: dict[str, Any] = measure(memory, Prompted(options.model, options.dtype), options)
        found["new process"] = [in_fresh_process(opened, options, directory) for _ in range(FRESH)]
    print(report(found, options))
    write_part(options, f"first-token-{options.dtype}-{options.keep}", found)


def read_options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--work", type=Path, help="keep the memory here")
    add(options, "--length", "32K", "tokens of the document", type=tokens_number)
    add(options, "--keep", "kv", "of the document's passages", choices=("kv", "text"))
    add(options, "--passages", [1, 4, 8], "that are read, by the memory and as text")
    add(options, "--repeats", 9)
    return options.parse_args()


def ungated(options: argparse.Namespace) -> HuggingFacePassageModel:
    """The model without a gate: the book does not answer the question."""
    reader = passage_model(options.model, options.dtype)
    reader.gate = None
    return reader


def measure(
    memory: Memory, prompted: Prompted, options: argparse.Namespace, document: str = "book"
) -> dict[str, Any]:
    """Seconds to the first token, of the clock and of the processor."""
    stock = Stock(prompted.model, CHUNK)
    question = Question("", "", 0, (document,), QUESTION, "", (), "all")
    busy: dict[str, list[float]] = {}

    def as_text(asked: Asked) -> Callable[[], int]:
        texts = memory.blocks.texts([(document, block) for block in asked.chosen()])
        return lambda: stock.read(prompted.ids(prompted.prompt(question, texts)))[1]

    def seconds(name: str, work: Callable[[], int]) -> Callable[[int], float]:
        def once(_: int) -> float:
            if options.keep == "text":  # forget what earlier questions computed
                memory.reopen()
                Asked(memory, document, 1).chosen()
            began = time.process_time()
            taken, _ = timed(work)
            busy.setdefault(name, []).append(time.process_time() - began)
            return taken

        return once

    ways: dict[str, Callable[[], int]] = {}
    for k in options.passages:
        asked = Asked(memory, document, k)
        ways |= {f"memory, {k}": asked.first_token, f"text, {k}": as_text(asked)}
    for work in ways.values():
        work()  # warm up
    clock = interleaved({name: seconds(name, work) for name, work in ways.items()}, options.repeats)
    return {"clock": clock, "processor": busy}


def opened(options: argparse.Namespace, directory: Path) -> float:
    """Seconds from opening the memory to the first token, in a process that has only loaded the
    model; the memory's pages are not in the page cache.
    """
    prepare(options.threads)
    reader = ungated(options)
    drop_cache(directory)
    began = time.perf_counter()
    with (
        MemoryStore.open(directory, reader.signature, read_only=True) as store,
        reader.session(store, ["book"], top_k=max(options.passages), score_range=1e9) as session,
    ):
        state = session.ask(QUESTION, lambda: None)
        int(session.logits(state[None]).argmax())
        return time.perf_counter() - began


def report(found: dict[str, Any], options: argparse.Namespace) -> str:
    """The table: a number of passages a line."""
    lines = []
    for k in options.passages:
        line: list[object] = [k]
        for kind in ("clock", "processor"):
            pair = found[kind][f"memory, {k}"], found[kind][f"text, {k}"]
            line += [f"{1000 * statistics.median(taken):.0f}" for taken in pair]
            line.append(spread(paired_ratio(*pair)))
        lines.append(line)
    head = ["passages", "memory, ms", "text, ms", "ratio"]
    head += ["memory, ms of a core", "text, ms of a core", "ratio"]
    fresh = 1000 * statistics.median(found["new process"])
    what = f"to the first token, {tokens_text(options.length)} tokens, {options.dtype}"
    return (
        f"{what}\n\n{table(head, lines)}\n\n"
        f"a new process, {max(options.passages)} passages, page cache cold: {fresh:.0f} ms"
    )


if __name__ == "__main__":
    main()
