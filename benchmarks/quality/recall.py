"""How often does the model answer right, from memory on disk, about what it has read?

By length of the memory, top_k, score_range and granularity.

One process ingests book text with needles (common/needles.py) into a memory; another, fresh one
opens it and asks. An answer is right if greedy decoding gives exactly the tokens of the value and
then the end of the value. The same in one step: the value is fed behind the question and every
row's best token compared (rows choose their blocks for themselves, so no row sees what follows it);
for granularities that share a choice among tokens, every answer is really decoded token by token.
Values are numbers (fact_any: words, names and two formats too). Names and those formats are ones
that training never used (--split train: the training's), text is what --text names; the pass key is
the paper's, in its words.

Tasks: passkey; fact, a number in the plain forms ("The A of the E is V.", asked by "What is the A
of the E? The A of the E is"; the other tasks too use these unless they say otherwise);
fact_unrelated (200 tokens of other text between memory and question); fact_forms (any of training's
forms); fact_any (any value); rephrased (a fact stated and asked for in forms that training never
used); of_20 and of_100 (facts that share attribute and kind of name; four questions for each set of
a hundred); updated (one or two new values later in the passage); split (the value stands in two
blocks); in_place (the needle inside one long document instead of a passage among fillers: a check).
The paper's own protocol is in paper.figure3b.

With the --model of another memory (`benchmarks.baselines.train`) whatever stands before a question
is read again for each, since there is nothing to keep documents in; nothing is varied then.

Intervals are Wilson's, 95%.

    python -m benchmarks.quality.recall --text books-test.jsonl.zst
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.baselines.reading import BaselineModel
from benchmarks.common.memories import workplace
from benchmarks.common.needle_memory import ask, build, build_settings
from benchmarks.common.needles import TASKS, Plan
from benchmarks.common.options import add, load_any, parser
from benchmarks.common.results import plot, write_results
from benchmarks.common.streamed import ask_streamed
from benchmarks.common.tables import rate, tokens_number, tokens_text
from benchmarks.common.timing import in_fresh_process
from benchmarks.quality.recall_tables import by_index, by_length, draw, range_text, variations
from memstore import MemoryStore
from memstore.index import INDEX_KINDS
from memstore.model.landmark.landmark_api import LandmarkAPI
from memstore.model.lookup_settings import GRANULARITIES, LookupSettings


def main() -> None:
    options = read_options()
    model = load_any(options)
    with workplace(options) as directory:
        longest = max(*options.lengths, options.vary_length if options.vary_tasks else 0)
        names = ("in_place", "in_place_length", "split", "passage")
        more = {name: getattr(options, name) for name in names}
        in_fresh_process(build, directory, build_settings(options, options.tasks, longest, **more))
        rows = in_fresh_process(ask_all, directory, options)
    first = [row for row in rows if row["index"] == options.index[0]]
    print("\n" + by_length(first, model.lookup))
    if len(options.index) > 1:
        print("\n" + by_index(rows, options.index))
    varied = variations(first)
    if varied:
        print("\n" + varied)
    write_results(options, model, {"rows": rows})
    plot(options, lambda figure: draw(figure, first, model.lookup), (11, 4.6))


def read_options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    add(options, "--lengths", ["2K", "8K", "32K", "128K"], "tokens of memory, e.g. 32K or 1M")
    add(options, "--trials", 200, "of every point")
    add(options, "--top-k", [1, 2, 4, 8], "values tried at --vary-length")
    add(
        options,
        "--score-range",
        [],
        "tried there, with the largest --top-k",
        type=float,
        metavar="B",
        nargs="*",
    )
    options.add_argument(
        "--granularity", nargs="*", choices=GRANULARITIES, default=list(GRANULARITIES)
    )
    add(options, "--vary-length", "32K", "length at which these three are varied")
    add(
        options,
        "--vary-tasks",
        ["passkey", "fact", "fact_unrelated", "of_20"],
        choices=TASKS,
        nargs="*",
    )
    add(options, "--vary-trials", None, "trials of those points (default: --trials)", type=int)
    add(options, "--index", ["packed"], "kinds of index, asked in turn", choices=INDEX_KINDS)
    add(options, "--in-place", 20, "long documents with a needle inside")
    add(options, "--in-place-length", "32K")
    add(
        options,
        "--split",
        "held_out",
        "names, forms and value formats",
        choices=["held_out", "train"],
    )
    add(options, "--passage", 512, "tokens of the passage around a needle")
    given = options.parse_args()
    given.lengths = sorted(map(tokens_number, given.lengths))
    given.vary_length, given.in_place_length = (
        tokens_number(given.vary_length),
        tokens_number(given.in_place_length),
    )
    given.vary_trials = given.vary_trials or given.trials
    return given


def ask_all(directory: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs in a process of its own, which has read none of the text that is asked about."""
    model = load_any(options)
    rows: list[dict[str, Any]] = []

    def note(kind: str, row: dict[str, Any] | None) -> None:
        if row is not None:
            rows.append(row | {"index": kind})
            print(
                f"  {row['task']:15} {tokens_text(row['length']):>5}  k={row['top_k']} "
                f"{range_text(row['score_range']):10} {row['granularity']:19} "
                f"{rate(row['right'], row['trials'])}  "
                f"{row['seconds'] / row['trials'] * 1000:.0f} ms"
                + (f", memory {row['memory_share']:.3f}" if "memory_share" in row else ""),
                flush=True,
            )

    if isinstance(model, BaselineModel):
        for task in options.tasks:
            for length in options.lengths if task != "in_place" else [options.in_place_length]:
                settings = {"trials": options.trials, "seed": options.seed}
                note(options.index[0], ask_streamed(model, directory, task, length, **settings))
        return rows
    # the first kind last: it opens the memory read-only
    for kind in [*options.index[1:], options.index[0]]:
        for row in ask_stored(model, directory, kind, options):
            note(kind, row)
    return rows


def ask_stored(
    model: LandmarkAPI, directory: Path, kind: str, options: argparse.Namespace
) -> Iterator[dict[str, Any] | None]:
    """A row a task and length from the memory on disk; with the first kind of index also of every
    setting that is varied.
    """
    plan = Plan.load(directory)
    assert plan is not None
    first = kind == options.index[0]
    with MemoryStore.open(
        directory / "memory", model.signature, read_only=first, index=kind
    ) as store:

        def asked(task: str, length: int, trials: int, **setting: Any) -> dict[str, Any] | None:
            return ask(
                model, store, plan, task, length, trials=trials, seed=options.seed, **setting
            )

        if not first:
            print(f"index {kind}: {model.build_index(store)}", flush=True)
        warm_up = "What is the pass key? The pass key is"
        model.ask(warm_up, store, documents=[next(iter(plan.tokens))])
        for task in options.tasks:
            for length in options.lengths if task != "in_place" else [options.in_place_length]:
                yield asked(task, length, options.trials)
        for task in (task for task in options.vary_tasks if first and task in options.tasks):
            for setting in settings(model.lookup, options):
                yield asked(task, options.vary_length, options.vary_trials, **setting)


def settings(lookup: LookupSettings, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What is varied at one length, one thing at a time."""
    varied: list[dict[str, Any]] = [{}] if options.vary_length not in options.lengths else []
    varied += [{"top_k": k} for k in options.top_k if k != lookup.top_k]
    varied += [{"top_k": max(options.top_k), "score_range": b} for b in sorted(options.score_range)]
    return varied + [{"granularity": g} for g in options.granularity if g != lookup.granularity]


if __name__ == "__main__":
    began = time.perf_counter()
    main()
    print(f"{time.perf_counter() - began:.0f} s")
