"""How do the memories compare on one decoder, at equal parameters, texts and steps of training?

train       the runs (runs.py): every memory of --memories with every seed of --seeds, the seeds one
            after the other. A run that is finished is not trained again, one that was interrupted
            goes on.
perplexity  of the same 256 tokens after more and more of the text before them.
recall      pass key, one fact, one of 20 by length: the same questions in the same texts. As many
            trials as read --recall-tokens, --trials at most and 5 at least. (Memorizing up to
            --memorizing-length: the text is read again for every question, and slowly.)

All but train take the runs that are there: of the seeds for which every memory is finished. What
was measured is kept beside each model. Intervals are 95%: of paired differences over texts (seeds
being means), and over seeds.

    python -m benchmarks.paper.baselines --runs runs/ --books books-train-*.jsonl.zst \\
        --test books-test.jsonl.zst --out baselines.json
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.baselines.config import MEMORIES
from benchmarks.baselines.reading import BaselineModel
from benchmarks.common.intervals import perplexity_ratio
from benchmarks.common.needle_memory import ask, ask_streamed, build
from benchmarks.common.needles import Plan
from benchmarks.common.options import add
from benchmarks.common.reading import TARGETS
from benchmarks.common.results import write
from benchmarks.common.tables import rate, table, tokens_number, tokens_text, with_interval
from benchmarks.paper.measures import Bench, Losses, Measured, mean
from benchmarks.paper.runs import MAIN, Run, parser
from benchmarks.paper.scoring import Way
from memstore import MemoryStore
from memstore.errors import InvalidInput

PARTS = ("train", "perplexity", "recall")
TASKS = ("passkey", "fact", "of_20")
_PASSAGE = 256  # tokens around a needle

BySeed = list[Losses]


def read_options() -> argparse.Namespace:
    options = parser(__doc__, seeds=(0, 1, 2))
    add(options, "--memories", list(MAIN), "full: the ceiling", choices=["landmark", *MEMORIES])
    add(options, "--parts", list(PARTS), choices=PARTS)
    add(options, "--pasts", ["0", "512", "2K", "4K", "16K"], "tokens before the targets")
    add(options, "--lengths", ["2K", "8K", "32K", "128K"], "of recall")
    add(options, "--trials", 40)
    add(options, "--recall-tokens", "200K", "read for the questions of a task and length, at most")
    add(options, "--memorizing-length", "32K", "longest that a memorizing model is asked at")
    given = options.parse_args()
    for name in ("pasts", "lengths"):
        setattr(given, name, sorted({tokens_number(text) for text in getattr(given, name)}))
    for name in ("recall_tokens", "memorizing_length"):
        setattr(given, name, tokens_number(getattr(given, name)))
    return given


def main() -> None:
    options = read_options()
    bench = Bench(options)
    compared = [bench.run(memory) for memory in options.memories]
    if "train" in options.parts:
        bench.train(compared)
    if set(options.parts) == {"train"}:
        return
    options.seeds = [
        seed
        for seed in options.seeds
        if all(bench.runs.finished(replace(run, seed=seed)) for run in compared)
    ]
    if not options.seeds:
        raise InvalidInput("no seed is finished for every memory: --parts train trains them")
    print(f"\nseeds {', '.join(map(str, options.seeds))}", flush=True)
    found: dict[str, Any] = {}
    if "perplexity" in options.parts:
        found["perplexity"] = perplexity(bench, compared)
    if "recall" in options.parts:
        found["recall"] = recall(bench, compared)
    write(options, found)


def perplexity(bench: Bench, compared: list[Run]) -> dict[str, Any]:
    """Print the tables of text; what they show, as JSON has it."""
    pasts = bench.options.pasts
    by_past = {
        run.memory: [
            bench.by_seed(run, Way(), past + TARGETS, reach=max(pasts) + TARGETS) for past in pasts
        ]
        for run in compared
    }
    lines = []
    for memory, of_past in by_past.items():
        last = mean(of_past[-1])
        line = [memory, *(f"{mean(every).perplexity:.2f}" for every in of_past)]
        lines.append([*line, f"{last.attended:.0f}", f"{last.state / 1024:,.0f}"])
    heads = [tokens_text(past) for past in pasts]
    print("\n" + table(["memory", *heads, "attended", "state, KB"], lines))
    gains = {memory: [of_past[0]] * len(pasts) for memory, of_past in by_past.items()}
    print("\n" + ratios(f"to its own after {heads[0]}", heads, by_past, gains))
    first, *others = by_past.items()
    pairs = {memory: first[1] for memory, _ in others}
    print("\n" + ratios(f"{first[0]} to", heads, pairs, dict(others)))
    return {
        "by_past": {
            memory: [[one.plain() for one in every] for every in of_past]
            for memory, of_past in by_past.items()
        }
    }


def ratios(
    what: str, heads: list[str], these: dict[str, list[BySeed]], others: dict[str, list[BySeed]]
) -> str:
    """Ratios of perplexities of the same tokens, by memory and past, over texts and over seeds."""
    lines = [
        [
            memory,
            *(ratio(a, b, axis) for a, b in zip(these[memory], others[memory]) for axis in (1, 0)),
        ]
        for memory in others
    ]
    columns = [f"{head}, over {axis}" for head in heads for axis in ("texts", "seeds")]
    return table([what, *columns], lines)


def ratio(every: BySeed, against: BySeed, axis: int) -> str:
    """A ratio and its 95% interval over texts (axis 1: seeds are means) or over seeds (axis 0):
    "0.970 (0.965-0.975)".
    """
    losses, others = (np.stack([one.values for one in some]) for some in (every, against))
    # [seeds, texts] before
    return with_interval(perplexity_ratio((losses - others).mean(1 - axis), 0.0))


def recall(bench: Bench, compared: list[Run]) -> dict[str, Any]:
    """Print the table of answers; its rows."""
    options = bench.options
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for run in compared:
        found[run.memory] = {}
        for length in options.lengths:
            if run.memory == "memorizing" and length > options.memorizing_length:
                continue
            trials = max(5, min(options.trials, options.recall_tokens // length))
            settings = {"length": length, "trials": trials, "seed": options.seed}
            settings |= {"tasks": list(TASKS)}
            rows = found[run.memory][length] = []
            for one in bench.of_seeds(run):
                measured = bench.measured(one)
                compute = partial(_ask_all, measured, settings, options.threads)
                rows += measured.kept("recall", settings, compute)
            print(f"  {run.memory} {tokens_text(length)}: measured", flush=True)
    print("\n" + recall_table(found, options.lengths))
    return found


def _ask_all(measured: Measured, settings: dict[str, Any], threads: int) -> list[dict[str, Any]]:
    """A row a task: the same questions for every model, needles in the same texts."""
    length, trials, seed = settings["length"], settings["trials"], settings["seed"]
    _ = measured.books  # or: texts are missing
    about: dict[str, Any] = {
        "model": str(measured.directory),
        "text": [str(path) for path in measured.texts],
    }
    about |= {"threads": threads, "seed": seed, "trials": trials, "tasks": sorted(TASKS)}
    model, given = measured.model, {"trials": trials, "seed": seed}
    with tempfile.TemporaryDirectory(prefix="memstore-benchmark-") as place:
        work = Path(place)
        build(work, about | {"longest": length, "passage": _PASSAGE})
        if isinstance(model, BaselineModel):
            rows = [ask_streamed(model, work, task, length, **given) for task in TASKS]
        else:
            plan = Plan.load(work)
            assert plan is not None
            with MemoryStore.open(work / "memory", model.signature, read_only=True) as store:
                rows = [ask(model, store, plan, task, length, **given) for task in TASKS]
    kept = ("task", "length", "trials", "right", "seconds")
    return [{name: row[name] for name in kept} for row in rows if row is not None]


def recall_table(found: dict[str, dict[int, list[dict[str, Any]]]], lengths: Sequence[int]) -> str:
    """Right answers by memory and length, of all seeds together (Wilson's interval), and of the
    worst and best seed.
    """
    lines = []
    for task in TASKS:
        for memory, by_length in found.items():
            line = [task, memory]
            for length in lengths:
                asked = [row for row in by_length.get(length, ()) if row["task"] == task]
                shares = [row["right"] / row["trials"] for row in asked]
                right, trials = (sum(row[name] for row in asked) for name in ("right", "trials"))
                whole = (
                    f"{rate(right, trials)} {min(shares):.2f}..{max(shares):.2f}" if asked else ""
                )
                line.append(whole)
            lines.append(line)
    return table(["task", "memory", *map(tokens_text, lengths)], lines)


if __name__ == "__main__":
    main()
