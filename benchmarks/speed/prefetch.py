"""How much waiting for the disk does a prefetcher hide, and how much of what it reads goes unused?

One process ingests book text into a memory. Then questions are asked of it, each in a fresh session
with cold tiers and with each prefetcher in turns; every answer must be the same with all of them. A
question is a passage of other text, which is read chunk by chunk and looks memory up for every
token, and then a question about a fact; with --passage 0 the question alone.

disk   the page cache forgets the memory's file before every question, so that misses are read from
       the real disk
slow   the file stays in the page cache, and every record takes 1 ms, of a source that serves 8 at a
       time (--slow-ms, --parallel): a disk whose speed is known

stall      seconds that lookups waited for blocks, a median over questions
hidden     1 - stall with the prefetcher / stall without, a median over questions
unused     of the units that the prefetcher read, those that nothing looked up
first      the same shares for the first layer with memory alone, which nothing before it predicts
seconds    of the whole answer, a median

    python -m benchmarks.speed.prefetch --text books-test.jsonl.zst
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.common.memories import build_memory, drop_cache, fill_cache, workplace
from benchmarks.common.options import add, load, parser
from benchmarks.common.results import write_results
from benchmarks.common.slow_source import slowed
from benchmarks.common.tables import table, tokens_number, tokens_text
from benchmarks.common.text import Books
from memstore import LandmarkModel, MemoryStore

PREFETCHERS = ("off", "speculative")
QUESTION = " What is the combination of the lime barn? The combination of the lime barn is"


def ask(
    model: LandmarkModel,
    path: Path,
    question: str,
    prefetch: Any,
    options: argparse.Namespace,
    prepare: Callable[[MemoryStore], None],
) -> dict[str, Any]:
    """One question with cold tiers, and what it cost."""
    with MemoryStore.open(path, model.signature, read_only=True, prefetch=prefetch) as memory:
        prepare(memory)
        began = time.perf_counter()
        answer = model.ask(question, memory, max_new_tokens=options.tokens, until_sentence=False)
        seconds = time.perf_counter() - began
        memory.tiers.prefetcher.drain()  # so that what is on its way at the end counts as read
        stats, layers = memory.stats(), memory.tiers.layers()["host"]
    host = stats["tiers"]["host"]
    first = layers[min(model.signature.memory_layers)]
    return {
        "tokens": answer.tokens,
        "stall": host["seconds"],
        "first_stall": first.seconds,
        "seconds": seconds,
        "misses": host["misses"],
        "used": host["prefetched"] + host["late"],
        "late": host["late"],
        "read": stats["prefetch"]["read"],
        "first_misses": first.misses,
    }


def measure(
    model: LandmarkModel,
    path: Path,
    questions: Sequence[str],
    options: argparse.Namespace,
    kind: str,
) -> dict[str, Any]:
    """Every question with every prefetcher, in turns; the answers must be the same."""

    def prepare(memory: MemoryStore) -> None:
        if kind == "slow":
            slowed(memory, options.slow_ms / 1000, options.parallel)

    names = list(PREFETCHERS)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    if kind == "slow":
        fill_cache(path)
    ask(model, path, questions[0], "speculative", options, prepare)  # warm up
    for number, question in enumerate(questions):
        for name in names if number % 2 == 0 else reversed(names):
            if kind == "disk":
                drop_cache(path)
            runs[name].append(ask(model, path, question, name, options, prepare))
        answers = {tuple(runs[name][-1].pop("tokens")) for name in names}
        assert len(answers) == 1, f"the answers to {question!r} differ"
    off = runs["off"]
    return {name: summary(runs[name], off) for name in names}


def summary(runs: list[dict[str, Any]], off: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians and shares over the questions."""

    def total(of: list[dict[str, Any]], what: str) -> float:
        return sum(run[what] for run in of)

    read = total(runs, "read")
    return {
        "stall": statistics.median(run["stall"] for run in runs),
        "seconds": statistics.median(run["seconds"] for run in runs),
        "hidden": hidden(runs, off, "stall"),
        "first_stall": statistics.median(run["first_stall"] for run in runs),
        "first_hidden": hidden(runs, off, "first_stall"),
        "unused": 1 - total(runs, "used") / read if read else 0.0,
        "read": read,
        "misses": total(runs, "misses"),
        "late": total(runs, "late"),
        "runs": runs,
    }


def hidden(runs: list[dict[str, Any]], off: list[dict[str, Any]], what: str) -> float:
    """The share of a wait without a prefetcher that is not there with it: a median over
    questions.
    """
    return 1 - statistics.median(
        run[what] / max(without[what], 1e-9) for run, without in zip(runs, off, strict=True)
    )


def draw_questions(model: LandmarkModel, books: Books, options: argparse.Namespace) -> list[str]:
    """Each a passage of a book and the question."""
    rng = Random(f"prefetch {options.seed}")
    places = [
        books.place(rng, options.passage).tolist() if options.passage else []
        for _ in range(options.questions)
    ]
    return [model.tokenizer.decode(place) + QUESTION for place in places]


def main() -> None:
    arguments = parser(__doc__)
    add(arguments, "--parts", ["disk", "slow"], choices=("disk", "slow"))
    add(arguments, "--memory-tokens", "128K")
    add(arguments, "--questions", 12)
    add(arguments, "--passage", 500, "tokens of text before each question")
    add(arguments, "--tokens", 16, "generated for each question")
    add(arguments, "--slow-ms", 1.0, "what the slowed source takes for a record")
    add(arguments, "--parallel", 8, "records that it serves at once")
    options = arguments.parse_args()
    model = load(options)
    length = tokens_number(options.memory_tokens)
    with workplace(options) as directory:
        books = Books.read(options.text, model.tokenizer, directory / "tokens")
        path = directory / f"memory-{length}-{options.seed}"
        if not path.exists():
            build_memory(model, path, books.run(Random(f"memory {options.seed}"), length))
        questions = draw_questions(model, books, options)
        results = {}
        for part in options.parts:
            results[part] = measure(model, path, questions, options, part)
            print(f"\n{title(part, options)}\n\n{rows_of(results[part])}", flush=True)
    write_results(options, model, results)


def title(part: str, options: argparse.Namespace) -> str:
    size = tokens_text(tokens_number(options.memory_tokens))
    memory = f"memory of {size} tokens, {options.questions} questions"
    if part == "disk":
        return f"{memory}; real disk, page cache dropped before each"
    at_a_time = f"{options.parallel} at a time, first come, first served"
    return f"{memory}; {options.slow_ms:g} ms a record, {at_a_time}"


def rows_of(found: dict[str, Any]) -> str:
    head = (
        "prefetch | stall | hidden | first layer: stall | hidden | read ahead | unused | "
        "late | misses | seconds"
    )
    return table(
        head,
        [
            (
                f"{name} | {row['stall'] * 1000:.0f} ms | {row['hidden']:.2f} | "
                f"{row['first_stall'] * 1000:.0f} ms | {row['first_hidden']:.2f} | "
                f"{row['read']:,} | {row['unused']:.2f} | {row['late']:,} | "
                f"{row['misses']:,} | {row['seconds']:.3f}"
            )
            for name, row in found.items()
        ],
    )


if __name__ == "__main__":
    main()
