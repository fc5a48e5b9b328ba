"""How do the memories compare on one decoder, at equal parameters, texts and steps of training?

train       the runs (runs.py): every memory of --memories with every seed of --seeds, the seeds one
            after the other. A run that is finished is not trained again, one that was interrupted
            goes on, and two processes share a list without waiting for each other.
perplexity  of the same 256 tokens after more and more of the text before them.
recall      pass key, one fact, one of 20 by length: the same questions in the same texts. As many
            trials as read --recall-tokens, --trials at most and 5 at least. (Memorizing up to
            --memorizing-length: the text is read again for every question, and slowly.)
cost        of the first seed, by length of the past (memorizing up to 128K).

All but train take the runs that are there: of the seeds for which every memory is finished. What
was measured is kept beside each model. Intervals are 95%: of paired differences over texts (seeds
being means), and over seeds.

    python -m benchmarks.paper.baselines --runs runs/ --books books-train-*.jsonl.zst \\
        --test books-test.jsonl.zst --out baselines.json
"""

import argparse
from dataclasses import replace
from typing import Any

from benchmarks.baselines.config import MEMORIES
from benchmarks.common.options import add
from benchmarks.common.results import write
from benchmarks.common.starting import start
from benchmarks.common.tables import tokens_number, tokens_text
from benchmarks.paper import baselines_measures as measures
from benchmarks.paper import baselines_tables as tables
from benchmarks.paper.measures import Bench
from benchmarks.paper.runs import MAIN, Run, parser, trained_table
from memstore.errors import InvalidInput

PARTS = ("train", "perplexity", "recall", "cost")


def read_options() -> argparse.Namespace:
    options = parser(__doc__, seeds=(0, 1, 2))
    add(options, "--memories", list(MAIN), "full: the ceiling", choices=["landmark", *MEMORIES])
    add(options, "--parts", list(PARTS), choices=PARTS)
    add(options, "--pasts", ["0", "512", "2K", "4K", "16K"], "tokens before the targets")
    add(options, "--lengths", ["2K", "8K", "32K", "128K"], "of recall")
    add(options, "--trials", 40)
    add(options, "--recall-tokens", "200K", "read for the questions of a task and length, at most")
    add(options, "--memorizing-length", "32K", "longest that a memorizing model is asked at")
    add(options, "--cost-pasts", ["2K", "16K", "128K", "1M"])
    given = options.parse_args()
    for name in ("pasts", "lengths", "cost_pasts"):
        setattr(given, name, sorted({tokens_number(text) for text in getattr(given, name)}))
    for name in ("recall_tokens", "memorizing_length"):
        setattr(given, name, tokens_number(getattr(given, name)))
    return given


def main() -> None:
    options = read_options()
    bench = Bench(options)
    compared = [bench.run(memory) for memory in options.memories]
    if "train" in options.parts:
        try:
            bench.train(compared)
        finally:
            every = [replace(run, seed=seed) for seed in options.seeds for run in compared]
            print("\n" + trained_table(bench.runs, every))
    if set(options.parts) == {"train"}:
        return
    options.seeds = [seed for seed in options.seeds if finished(bench, compared, seed)]
    if not options.seeds:
        raise InvalidInput("no seed is finished for every memory: --parts train trains them")
    print(f"\nseeds {', '.join(map(str, options.seeds))}", flush=True)
    found: dict[str, Any] = {}
    if "perplexity" in options.parts:
        found["perplexity"] = perplexity(bench, compared)
    if "recall" in options.parts:
        found["recall"] = recall(bench, compared)
    if "cost" in options.parts:
        by_past = {}
        for run in compared:
            first = bench.of_seeds(run)[0]
            most = measures.SLOW if run.memory == "memorizing" else max(options.cost_pasts)
            pasts = [past for past in options.cost_pasts if past <= most]
            by_past[run.memory] = [measures.cost(bench, first, past) for past in pasts]
            print(f"  cost of {run.memory}: measured", flush=True)
        print("\n" + tables.cost_table(by_past))
        found["cost"] = by_past
    write(options, found)


def finished(bench: Bench, compared: list[Run], seed: int) -> bool:
    """Whether every memory is trained with a seed."""
    return all(bench.runs.finished(replace(run, seed=seed)) for run in compared)


def perplexity(bench: Bench, compared: list[Run]) -> dict[str, Any]:
    """Print the tables of text; what they show, as JSON has it."""
    options = bench.options
    by_past = measures.by_past(bench, compared, options.pasts)
    print("\n" + tables.past_table(by_past, options.pasts))
    print("\n" + tables.gain_table(by_past, options.pasts))
    first = compared[0].memory
    print("\n" + tables.paired_table(by_past, options.pasts, first))
    return {
        "by_past": {
            memory: [[one.plain() for one in every] for every in of_past]
            for memory, of_past in by_past.items()
        }
    }


def recall(bench: Bench, compared: list[Run]) -> dict[str, Any]:
    """Print the table of answers; its rows."""
    options = bench.options
    found: dict[str, dict[int, list[list[dict[str, Any]]]]] = {}
    for run in compared:
        found[run.memory] = {}
        for length in options.lengths:
            trials = measures.trials_of(length, options.trials, options.recall_tokens)
            if run.memory == "memorizing" and length > options.memorizing_length:
                found[run.memory][length] = []
                continue
            rows = [measures.recall(bench, one, length, trials) for one in bench.of_seeds(run)]
            found[run.memory][length] = rows
            right = {row["task"]: row["right"] for row in rows[0]}
            print(f"  {run.memory} {tokens_text(length)}: {right} of {trials}", flush=True)
    print("\n" + tables.recall_table(found))
    return found


if __name__ == "__main__":
    start(main)
