"""How often does the landmark model answer right, from memory on disk, about what it has read?

One process ingests book text with needles (common/needles.py) into a memory; a fresh one opens it
and asks. An answer is right if greedy decoding gives exactly the tokens of the value and then the
end of the value. The same in one step: the value is fed after the question and every row's best
token is compared (rows choose their blocks for themselves, so no row sees what follows it). Values
are numbers (fact_any: words, names and two formats too). Names and those formats are ones that
training never used; the pass key is the paper's, in its words.

Tasks: passkey; fact, a number in the plain forms ("The A of the E is V.", asked by "What is the A
of the E? The A of the E is"; the other tasks use these too unless they say otherwise);
fact_unrelated (200 tokens of other text between memory and question); fact_forms (any of training's
forms); fact_any (any value); rephrased (a fact stated and asked for in forms that training never
used); of_20 and of_100 (facts that share attribute and kind of name; four questions for each set of
a hundred); updated (one or two new values later in the passage); split (the value is in two
blocks). The paper's own protocol is in paper.figures.

Intervals are Wilson's, 95%.

    python -m benchmarks.quality.recall --text books-test.jsonl.zst
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.memories import workplace
from benchmarks.common.needle_memory import ask, build, build_settings
from benchmarks.common.needles import TASKS, Plan
from benchmarks.common.options import add, load, parser
from benchmarks.common.results import write
from benchmarks.common.tables import rate, table, tokens_number, tokens_text
from benchmarks.common.timing import in_fresh_process
from memstore import LandmarkModel, MemoryStore
from memstore.index import INDEX_KINDS


def main() -> None:
    options = read_options()
    model = load(options)
    with workplace(options) as directory:
        longest = max(options.lengths)
        settings = build_settings(options, options.tasks, longest, options.passage)
        in_fresh_process(build, directory, settings)
        rows = in_fresh_process(ask_all, directory, options)
    print("\n" + report(rows))
    write(options, {"weights": model.signature.weights, "rows": rows})


def read_options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    add(options, "--lengths", ["2K", "8K", "32K", "128K"], "tokens of memory, e.g. 32K or 1M")
    add(options, "--trials", 200, "of every point")
    add(options, "--index", ["packed"], "kinds of index, asked in turn", choices=INDEX_KINDS)
    add(options, "--passage", 256, "tokens of the passage around a needle")
    given = options.parse_args()
    given.lengths = sorted(map(tokens_number, given.lengths))
    return given


def ask_all(directory: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Ask all questions, in a fresh process that has ingested none of the text."""
    model = load(options)
    # the first kind last: it opens the memory read-only
    order = [*options.index[1:], options.index[0]]
    kinds = {kind: ask_stored(model, directory, kind, options) for kind in order}
    rows = []
    for kind, found in kinds.items():
        for row in found:
            if row is not None:
                rows.append(row | {"index": kind})
                seconds = row["seconds"] / row["trials"]
                print(
                    f"  {row['task']:15} {tokens_text(row['length']):>5}  {kind:15} "
                    f"{rate(row['right'], row['trials'])}  {1000 * seconds:.0f} ms",
                    flush=True,
                )
    return rows


def ask_stored(
    model: LandmarkModel, directory: Path, kind: str, options: argparse.Namespace
) -> Iterator[dict[str, Any] | None]:
    """A row a task and length, from the memory on disk."""
    plan = Plan.load(directory)
    assert plan is not None
    first = kind == options.index[0]
    with MemoryStore.open(
        directory / "memory", model.signature, read_only=first, index=kind
    ) as store:
        if not first:
            print(f"index {kind}: {model.build_index(store)}", flush=True)
        warm_up = "What is the pass key? The pass key is"
        model.ask(warm_up, store, documents=[next(iter(plan.tokens))])
        for task in options.tasks:
            for length in options.lengths:
                given = {"trials": options.trials, "seed": options.seed}
                yield ask(model, store, plan, task, length, **given)


def report(rows: list[dict[str, Any]]) -> str:
    """The table: tasks by lengths, a row for each kind of index."""
    lengths = sorted({row["length"] for row in rows})
    lines = []
    for task, title in TASKS.items():
        for kind in dict.fromkeys(row["index"] for row in rows):
            here = [row for row in rows if (row["task"], row["index"]) == (task, kind)]
            if here:
                found = {row["length"]: rate(row["right"], row["trials"]) for row in here}
                trials = max(row["trials"] for row in here)
                lines.append([title, kind, trials, *(found.get(n, "") for n in lengths)])
    return table(["task", "index", "trials", *map(tokens_text, lengths)], lines)


if __name__ == "__main__":
    began = time.perf_counter()
    main()
    print(f"{time.perf_counter() - began:.0f} s")
