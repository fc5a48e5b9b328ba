"""How often does the model answer right, from memory on disk, about what it has read: by length,
top_k, score_range and granularity.

One process ingests book text with needles (see needles.py) into a memory; another, fresh one opens
it and asks. An answer is right if greedy decoding gives exactly the tokens of the value and then
the end of the value. The same in one step: the value is fed behind the question and every row's
best token compared (rows choose their blocks for themselves, so no row sees what follows it); for
granularities that share a choice among tokens, every answer is really decoded token by token.
Values are numbers (fact_any: words, names and two formats too). Names and those formats are ones
that training never used (--split train: the training's), text is what --text names; the pass key is
the paper's, in its words.

Tasks: passkey; fact, a number in the plain forms ("The A of the E is V.", asked by "What is the A
of the E? The A of the E is"; the other tasks too use these unless they say otherwise);
fact_unrelated (200 tokens of other text between memory and question); fact_forms (any of training's
forms); fact_any (any value); rephrased (a fact stated and asked for in forms that training never
used); of_20 and of_100 (facts that share attribute and kind of name; four questions for each set of
a hundred); updated (one or two new values later in the passage); split (the value stands in two
blocks); in_place (the needle inside one long document instead of a passage among fillers: a check);
streamed (the paper's protocol: its whole prompt through one session that retrieves from its own
blocks; streamed_grass: with the paper's filler too).

Intervals are Wilson's, 95%.

    python benchmarks/recall.py --text books-test.jsonl.zst --out results/recall.json
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import needles
from common import Books, table, tokens_number, tokens_text, wilson
from needles import STORED, STREAMED, TASKS, Plan

from memstore import MemoryStore
from memstore.index import INDEX_KINDS
from memstore.model.config import ModelConfig
from memstore.model.settings import GRANULARITIES


def main() -> None:
    options = read_options()
    model = common.load(options)
    with tempfile.TemporaryDirectory(prefix="memstore-recall-") as temporary:
        directory = options.work or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        if set(options.tasks) - set(STREAMED):
            common.in_fresh_process(needles.build, directory, build_settings(options))
        rows = common.in_fresh_process(ask_all, directory, options)
    first = [row for row in rows if row["index"] == options.index[0]]
    print("\n" + by_length(first, model.config))
    if len(options.index) > 1:
        print("\n" + by_index(rows, options.index))
    varied = variations(first)
    if varied:
        print("\n" + varied)
    common.write_results(options, model, {"rows": rows})
    common.plot(options, lambda figure: draw(figure, first, model.config), (11, 4.6))


def read_options() -> argparse.Namespace:
    options = common.parser(__doc__)
    options.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    options.add_argument(
        "--lengths",
        nargs="+",
        default=["2K", "8K", "32K", "128K"],
        help="tokens of memory, e.g. 32K or 1M",
    )
    options.add_argument("--trials", type=int, default=200, help="of every point")
    options.add_argument(
        "--top-k", nargs="+", type=int, default=[1, 2, 4, 8], help="values tried at --vary-length"
    )
    options.add_argument(
        "--score-range",
        nargs="*",
        type=float,
        default=[],
        metavar="B",
        help="tried there, with the largest --top-k",
    )
    options.add_argument(
        "--granularity", nargs="*", choices=GRANULARITIES, default=list(GRANULARITIES)
    )
    options.add_argument(
        "--vary-length", default="32K", help="length at which these three are varied"
    )
    options.add_argument(
        "--vary-tasks",
        nargs="*",
        choices=STORED,
        default=["passkey", "fact", "fact_unrelated", "of_20"],
    )
    options.add_argument(
        "--vary-trials", type=int, help="trials of those points (default: --trials)"
    )
    options.add_argument(
        "--index",
        nargs="+",
        choices=INDEX_KINDS,
        default=["packed"],
        help="kinds of index, asked in turn",
    )
    options.add_argument(
        "--in-place", type=int, default=20, help="long documents with a needle inside"
    )
    options.add_argument("--in-place-length", default="32K")
    options.add_argument("--streamed-trials", type=int, default=40)
    options.add_argument("--streamed-lengths", nargs="+", default=["2K", "8K"])
    options.add_argument(
        "--split",
        choices=["held_out", "train"],
        default="held_out",
        help="names, forms and value formats",
    )
    options.add_argument(
        "--passage", type=int, default=512, help="tokens of the passage around a needle"
    )
    given = options.parse_args()
    for name in ("lengths", "streamed_lengths"):
        setattr(given, name, sorted(tokens_number(text) for text in getattr(given, name)))
    given.vary_length, given.in_place_length = (
        tokens_number(given.vary_length),
        tokens_number(given.in_place_length),
    )
    given.vary_trials = given.vary_trials or given.trials
    return given


def build_settings(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": options.model,
        "text": options.text,
        "seed": options.seed,
        "trials": options.trials,
        "tasks": sorted(set(options.tasks) - set(STREAMED)),
        "longest": max(*options.lengths, options.vary_length if options.vary_tasks else 0),
        "in_place": options.in_place,
        "in_place_length": options.in_place_length,
        "split": options.split,
        "passage": options.passage,
        "threads": options.threads,
    }


def ask_all(directory: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs in a process of its own, which has read none of the text that is asked about."""
    model = common.load(options)
    rows: list[dict[str, Any]] = []
    kind = options.index[0]

    def note(row: dict[str, Any] | None) -> None:
        if row is not None:
            rows.append(row | {"index": kind})
            print(
                f"  {row['task']:15} {tokens_text(row['length']):>5}  k={row['top_k']} "
                f"{range_text(row['score_range']):10} {row['granularity']:19} "
                f"{cell(row)}  {row['seconds'] / row['trials'] * 1000:.0f} ms",
                flush=True,
            )

    stored = [task for task in options.tasks if task not in STREAMED]
    if stored:
        plan = Plan.load(directory)
        assert plan is not None
        for kind in options.index[1:]:
            with MemoryStore.open(directory / "memory", model.signature, index=kind) as store:
                print(f"index {kind}: {model.build_index(store)}", flush=True)
                for task in stored:
                    for length in (
                        options.lengths if task != "in_place" else [options.in_place_length]
                    ):
                        note(
                            needles.ask(
                                model,
                                store,
                                plan,
                                task,
                                length,
                                trials=options.trials,
                                seed=options.seed,
                            )
                        )
        kind = options.index[0]
        with MemoryStore.open(
            directory / "memory", model.signature, read_only=True, index=kind
        ) as store:
            # warm up
            model.ask(
                "What is the pass key? The pass key is", store, documents=[next(iter(plan.tokens))]
            )
            for task in stored:
                for length in options.lengths if task != "in_place" else [options.in_place_length]:
                    note(
                        needles.ask(
                            model,
                            store,
                            plan,
                            task,
                            length,
                            trials=options.trials,
                            seed=options.seed,
                        )
                    )
            vary = [task for task in options.vary_tasks if task in stored]
            settings: list[dict[str, Any]] = [
                {"top_k": k} for k in options.top_k if k != model.config.top_k
            ]
            settings += [
                {"top_k": max(options.top_k), "score_range": b} for b in sorted(options.score_range)
            ]
            settings += [
                {"granularity": g} for g in options.granularity if g != model.config.granularity
            ]
            if options.vary_length not in options.lengths:
                settings.insert(0, {})
            for task in vary:
                for setting in settings:
                    note(
                        needles.ask(
                            model,
                            store,
                            plan,
                            task,
                            options.vary_length,
                            trials=options.vary_trials,
                            seed=options.seed,
                            **setting,
                        )
                    )
    if set(options.tasks) & set(STREAMED):
        with tempfile.TemporaryDirectory() as cache:
            books = Books.read(options.text, model.tokenizer, Path(cache))
        for task in options.tasks:
            for length in options.streamed_lengths if task in STREAMED else []:
                note(
                    needles.streamed(
                        model,
                        books,
                        task,
                        length,
                        trials=options.streamed_trials,
                        seed=options.seed,
                    )
                )
    return rows


def by_index(rows: list[dict[str, Any]], kinds: list[str]) -> str:
    """Accuracy and the time of a question by kind of index."""
    points = {(row["task"], row["length"]): row for row in rows if row["index"] != kinds[0]}
    of = {
        (
            row["task"],
            row["length"],
            row["index"],
        ): f"{cell(row)}, {row['seconds'] / row['trials'] * 1000:.0f} ms"
        for row in reversed(rows)  # of rows at one point the first: the usual settings
    }
    body = [
        [f"{task} {tokens_text(length)}", *(of.get((task, length, kind), "") for kind in kinds)]
        for task, length in points
    ]
    return table(["", *kinds], body)


def cell(row: dict[str, Any]) -> str:
    """ ".985 (.957-.995)"."""
    low, high = wilson(row["right"], row["trials"])
    return f"{row['right'] / row['trials']:.3f} ({low:.3f}-{high:.3f})"


def range_text(score_range: float | None) -> str:
    return "" if score_range is None else f"range={score_range:g}"


def blocks_read(row: dict[str, Any]) -> str:
    """Blocks read by a lookup, the mean."""
    return f"{row['blocks_read'] / max(1, row['lookups']['done']):.2f}"


def usual(rows: list[dict[str, Any]], config: ModelConfig) -> list[dict[str, Any]]:
    """The points measured with the model's own settings."""
    own = (config.top_k, config.score_range, config.granularity)
    return [row for row in rows if (row["top_k"], row["score_range"], row["granularity"]) == own]


def by_length(rows: list[dict[str, Any]], config: ModelConfig) -> str:
    """The table of tasks and lengths."""
    rows = usual(rows, config)
    lengths = sorted({row["length"] for row in rows})
    lines = []
    for task, title in TASKS.items():
        found = {row["length"]: row for row in rows if row["task"] == task}
        if found:
            trials = sorted({row["trials"] for row in found.values()})
            lines.append(
                [
                    title,
                    "-".join(map(str, trials)),
                    *(cell(found[n]) if n in found else "" for n in lengths),
                ]
            )
    return table([f"memory (k={config.top_k})", "trials", *map(tokens_text, lengths)], lines)


def variations(rows: list[dict[str, Any]]) -> str:
    """The table of tasks, top_k, score_range and granularity, at the one length where they were
    varied.
    """
    by = {
        (
            r["task"],
            GRANULARITIES.index(r["granularity"]),
            r["top_k"],
            range_text(r["score_range"]),
            r["length"],
        ): r
        for r in rows
        if r["task"] not in STREAMED
    }
    settings = list(dict.fromkeys(key[1:4] for key in sorted(by, key=lambda key: key[1:3])))
    tasks = [task for task in TASKS if len({key[1:4] for key in by if key[0] == task}) > 1]
    if not tasks:
        return ""
    # The length where a task has been asked with the most settings is the one where they were
    # varied.
    lengths = {key[4] for key in by if key[0] in tasks}
    at = max(lengths, key=lambda n: len({key[:4] for key in by if key[4] == n}))
    lines = []
    for g, *choice in settings:
        found = [by.get((task, g, *choice, at)) for task in tasks]
        cells = [
            text for row in found for text in ([cell(row), blocks_read(row)] if row else ["", ""])
        ]
        lines.append([GRANULARITIES[g], *choice, *cells])
    heads = [head for task in tasks for head in (task, "blocks read")]
    return table([f"at {tokens_text(at)}: granularity", "top_k", "", *heads], lines)


def draw(figure: Any, rows: list[dict[str, Any]], config: ModelConfig) -> None:
    """Accuracy by length, by top_k and by granularity."""
    left, middle, right = figure.subplots(1, 3, sharey=True)
    own = usual(rows, config)
    for task in TASKS:
        points = (
            sorted((row["length"], row) for row in own if row["task"] == task)
            if task != "in_place"
            else []
        )
        if points:
            bars(left, [n for n, _ in points], [row for _, row in points], task)
    left.set_xscale("log", base=2)
    left.set_xlabel("tokens of memory")
    left.set_ylabel("exact match")
    left.set_xticks(
        sorted({row["length"] for row in own}),
        [tokens_text(n) for n in sorted({row["length"] for row in own})],
    )
    varied = [row for row in rows if row not in own]
    for task in dict.fromkeys(row["task"] for row in varied):
        length = next(row["length"] for row in varied if row["task"] == task)
        same = [row for row in rows if row["task"] == task and row["length"] == length]
        same = [row for row in same if row["score_range"] == config.score_range]
        points = sorted((r["top_k"], r) for r in same if r["granularity"] == config.granularity)
        bars(middle, [k for k, _ in points], [row for _, row in points], task)
        named = {r["granularity"]: r for r in same if r["top_k"] == config.top_k}
        shown = [name for name in GRANULARITIES if name in named]
        bars(right, shown, [named[name] for name in shown], task, line="o")
        middle.set_xlabel(f"top_k, at {tokens_text(length)}")
        right.set_xlabel(f"granularity, at {tokens_text(length)}")
    right.tick_params(axis="x", labelrotation=20)
    left.set_ylim(0, 1.02)
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8
    )


def bars(
    axes: Any, at: list[Any], rows: list[dict[str, Any]], label: str, line: str = "o-"
) -> None:
    """Points with their intervals."""
    rates = [row["right"] / row["trials"] for row in rows]
    ends = [wilson(row["right"], row["trials"]) for row in rows]
    below = [max(0.0, rate - low) for rate, (low, _) in zip(rates, ends)]
    above = [max(0.0, high - rate) for rate, (_, high) in zip(rates, ends)]
    colour = f"C{list(TASKS).index(label)}"  # a task has one colour in every panel
    axes.errorbar(
        at, rates, yerr=[below, above], fmt=line, color=colour, markersize=4, capsize=2, label=label
    )


if __name__ == "__main__":
    began = time.perf_counter()
    main()
    print(f"{time.perf_counter() - began:.0f} s")
