"""What does the context miss gate save, and what does it cost: the paper's table 3, by cutoff.

text      Share of lookups (token, head, layer) skipped, and perplexity of the same targets, while a
          session reads on from its own memory of book text, which is read once with the model's own
          cutoff. Differences to cutoff 0 are paired, with 95% intervals.
recall    Right answers to the same needles at every cutoff (see quality.recall), from a memory on
          disk in a fresh process.

    python -m benchmarks.quality.gate --text books-test.jsonl.zst
"""

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.intervals import mean_interval
from benchmarks.common.memories import workplace
from benchmarks.common.needle_memory import ask, build, build_settings
from benchmarks.common.needles import Plan
from benchmarks.common.options import add, load, parser
from benchmarks.common.reading import Reading, segments
from benchmarks.common.results import write
from benchmarks.common.tables import rate, table, tokens_number, tokens_text
from benchmarks.common.text import Books
from benchmarks.common.timing import in_fresh_process
from memstore import LandmarkModel, MemoryStore

TASKS = ("passkey", "fact", "fact_unrelated")
PARTS = ["text", "recall"]


def main() -> None:
    arguments = parser(__doc__)
    add(arguments, "--parts", PARTS, choices=PARTS)
    add(arguments, "--cutoffs", [0, 0.1, 0.16, 0.3, 0.5, 1.0], type=float)
    add(arguments, "--segments", 60)
    add(arguments, "--text-memory", "4K", "tokens of memory while reading text")
    add(arguments, "--trials", 100)
    add(arguments, "--length", "32K", "tokens of memory for recall")
    options = arguments.parse_args()
    options.cutoffs = sorted({0.0, *options.cutoffs})
    for name in ("text_memory", "length"):
        setattr(options, name, tokens_number(getattr(options, name)))
    model = load(options)
    results: dict[str, Any] = {}
    with workplace(options) as directory:
        if "recall" in options.parts:
            in_fresh_process(build, directory, build_settings(options, TASKS, options.length))
            results["recall"] = in_fresh_process(recall, directory, options)
        if "text" in options.parts:
            books = Books.read(options.text, model.tokenizer, directory / "tokens")
            results["text"] = text(model, books, options)
    print("\n" + report(results, options))
    write(options, {"weights": model.signature.weights, **results})


def text(model: LandmarkModel, books: Books, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a cutoff."""
    losses: dict[float, list[float]] = {cutoff: [] for cutoff in options.cutoffs}
    lookups = {cutoff: {"skipped": 0, "done": 0} for cutoff in options.cutoffs}
    for segment in segments(books, options.segments, options.text_memory, options.seed):
        with Reading(model, segment.before) as reading:
            for cutoff in options.cutoffs:
                scores, session = reading.score(segment.targets, cmt_cutoff=cutoff)
                losses[cutoff].append(-float(scores.mean()))
                lookups[cutoff]["skipped"] += session.attention.lookups.skipped
                lookups[cutoff]["done"] += session.attention.lookups.done
    zero = np.array(losses[options.cutoffs[0]])
    rows = []
    for cutoff in options.cutoffs:
        here, counted = np.array(losses[cutoff]), lookups[cutoff]
        base = math.exp(zero.mean())
        rows.append(
            {
                "cutoff": cutoff,
                "skipped": counted["skipped"] / max(1, sum(counted.values())),
                "perplexity": math.exp(here.mean()),
                "change": [base * (math.exp(x) - 1) for x in mean_interval(here - zero)],
            }
        )
    return rows


def recall(directory: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs in a fresh process: recall at every cutoff."""
    model = load(options)
    plan = Plan.load(directory)
    assert plan is not None
    rows = []
    with MemoryStore.open(directory / "memory", model.signature, read_only=True) as store:
        for task in TASKS:
            for cutoff in options.cutoffs:
                given = {"trials": options.trials, "seed": options.seed, "cmt_cutoff": cutoff}
                row = ask(model, store, plan, task, options.length, **given)
                assert row is not None
                rows.append(row)
                counted = f"{row['right']} of {row['trials']}"
                print(f"  {task} at cutoff {cutoff:g}: {counted}", flush=True)
    return rows


def report(results: dict[str, Any], options: argparse.Namespace) -> str:
    """A table with a row for each cutoff."""
    head, columns = ["cutoff"], [[f"{c:g}" for c in options.cutoffs]]
    if "text" in results:
        memory = tokens_text(options.text_memory)
        head += [f"skipped on text, memory {memory}", "perplexity (change)"]
        columns.append([f"{row['skipped']:.1%}" for row in results["text"]])
        columns.append(
            [
                f"{row['perplexity']:.2f} ({low:+.3f} to {high:+.3f})"
                for row in results["text"]
                for _, low, high in [row["change"]]
            ]
        )
    for task in TASKS if "recall" in results else ():
        head.append(f"{task} at {tokens_text(options.length)}")
        rows = [row for row in results["recall"] if row["task"] == task]
        columns.append([rate(row["right"], row["trials"]) for row in rows])
    return table(head, list(zip(*columns)))


if __name__ == "__main__":
    main()
