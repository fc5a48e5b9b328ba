"""What does the context miss gate save, and what does it cost: the paper's table 3, by cutoff.

text      Share of lookups (token, head, layer) skipped, and perplexity of the same targets, while a
          session reads on from its own memory of book text, and with that text attached as an old
          document (perplexity.py has the construction; here a segment's memory is read once, with
          the model's own cutoff, and its targets are scored under every cutoff). Differences to
          cutoff 0 are paired, with 95% intervals.
recall    Right answers to the same needles at every cutoff (recall.py has the construction), memory
          on disk, by a fresh process.
decode    Tokens a second while generating from a memory of 128K tokens on disk, in turns with the
          other cutoffs, and what index and tiers really did a token: searches, query rows, units
          leased.

    python -m benchmarks.quality.gate --text books-test.jsonl.zst
"""

import argparse
import math
import statistics
import tempfile
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.common.generation import PROMPT, generate
from benchmarks.common.intervals import mean_interval, wilson
from benchmarks.common.memories import build_memory, workplace
from benchmarks.common.needle_memory import ask, build, build_settings
from benchmarks.common.needles import Plan
from benchmarks.common.options import add, load, parser
from benchmarks.common.reading import Reading, segments
from benchmarks.common.results import plot, write_results
from benchmarks.common.tables import table, tokens_number, tokens_text
from benchmarks.common.text import Books
from benchmarks.common.timing import in_fresh_process, interleaved, paired_ratio
from memstore import LandmarkModel, MemoryStore

TASKS = ("passkey", "fact", "fact_unrelated")
MODES = ("retrieved", "attached")


def text_part(
    model: LandmarkModel, books: Books, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row a cutoff."""
    losses: dict[tuple[str, float], list[float]] = {
        (mode, c): [] for mode in MODES for c in options.cutoffs
    }
    skipped = {key: [0, 0] for key in losses}
    for segment in segments(books, options.segments, options.text_memory, options.seed):
        with Reading(model, segment.before) as reading:
            for mode, cutoff in losses:
                scores, session = reading.score(segment.targets, mode, cutoff)
                losses[mode, cutoff].append(-float(scores.mean()))
                skipped[mode, cutoff][0] += session.attention.lookups.skipped
                skipped[mode, cutoff][1] += (
                    session.attention.lookups.skipped + session.attention.lookups.done
                )
    rows = []
    for cutoff in options.cutoffs:
        row: dict[str, Any] = {"cutoff": cutoff}
        for mode in MODES:
            here, zero = np.array(losses[mode, cutoff]), np.array(losses[mode, options.cutoffs[0]])
            base = math.exp(zero.mean())
            change = [base * (math.exp(x) - 1) for x in mean_interval(here - zero)]
            row[mode] = {
                "skipped": skipped[mode, cutoff][0] / max(1, skipped[mode, cutoff][1]),
                "perplexity": math.exp(here.mean()),
                "change": change,
            }
        rows.append(row)
    return rows


def ask_part(directory: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
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
                print(
                    f"  {task} at cutoff {cutoff:g}: {row['right']} of {row['trials']}", flush=True
                )
    return rows


def decode_part(
    model: LandmarkModel, directory: Path, books: Books, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row a cutoff."""
    memory = directory / "long"
    build_memory(model, memory, books.run(Random(f"memory {options.seed}"), options.decode_memory))
    rng = Random(f"decode {options.seed}")
    prompts = [books.place(rng, PROMPT).tolist() for _ in range(options.repeats + 1)]
    counts = {
        cutoff: {"searches": 0, "rows": 0, "leased": 0, "done": 0, "skipped": 0}
        for cutoff in options.cutoffs
    }
    with MemoryStore.open(memory, model.signature, read_only=True) as store:

        def once(cutoff: float, repeat: int) -> float:
            before = store.stats()
            prompt, count = prompts[repeat], options.tokens
            rate, lookups = generate(
                model, store, ["book"], prompt, count, seed=repeat, cmt_cutoff=cutoff
            )
            after = store.stats()
            for name in ("searches", "rows"):
                counts[cutoff][name] += after["index"][name] - before["index"][name]
            for name in ("hits", "misses"):
                counts[cutoff]["leased"] += after["tiers"]["host"][name] - before["tiers"].get(
                    "host", {}
                ).get(name, 0)
            for name, value in lookups.items():
                counts[cutoff][name] += value
            return rate

        for cutoff in options.cutoffs:
            once(cutoff, options.repeats)  # warm up
            counts[cutoff] = dict.fromkeys(counts[cutoff], 0)
        runs = {f"{cutoff:g}": partial(once, cutoff) for cutoff in options.cutoffs}
        measured = interleaved(runs, options.repeats)
    fed = options.repeats * (options.tokens + PROMPT)
    zero = measured[f"{options.cutoffs[0]:g}"]
    return [
        {
            "cutoff": cutoff,
            "tokens_per_second": statistics.median(measured[f"{cutoff:g}"]),
            "to_cutoff_0": paired_ratio(measured[f"{cutoff:g}"], zero),
            "skipped": counts[cutoff]["skipped"]
            / max(1, counts[cutoff]["skipped"] + counts[cutoff]["done"]),
            **{
                f"{name}_per_token": counts[cutoff][name] / fed
                for name in ("searches", "rows", "leased")
            },
            "measured": measured[f"{cutoff:g}"],
        }
        for cutoff in options.cutoffs
    ]


def main() -> None:
    arguments = parser(__doc__)
    add(arguments, "--parts", ["text", "recall", "decode"], choices=("text", "recall", "decode"))
    add(arguments, "--cutoffs", [0, 0.1, 0.3, 0.5, 1.0], type=float)
    add(arguments, "--segments", 200)
    add(arguments, "--text-memory", "4K", "tokens of memory while reading text")
    add(arguments, "--trials", 200)
    add(arguments, "--length", "32K", "tokens of memory for recall")
    add(arguments, "--decode-memory", "128K")
    add(arguments, "--tokens", 120, "generated in every repeat")
    add(arguments, "--repeats", 5)
    options = arguments.parse_args()
    options.cutoffs = sorted({0.0, *options.cutoffs})
    for name in ("text_memory", "length", "decode_memory"):
        setattr(options, name, tokens_number(getattr(options, name)))
    model = load(options)
    results: dict[str, Any] = {}
    with workplace(options) as directory:
        if "recall" in options.parts:
            in_fresh_process(build, directory, build_settings(options, TASKS, options.length))
            results["recall"] = in_fresh_process(ask_part, directory, options)
        books = Books.read(options.text, model.tokenizer, directory / "tokens")
        if "text" in options.parts:
            results["text"] = text_part(model, books, options)
        if "decode" in options.parts:
            with tempfile.TemporaryDirectory(dir=directory) as here:
                results["decode"] = decode_part(model, Path(here), books, options)
    print("\n" + report(results, options))
    write_results(options, model, results)
    plot(options, lambda figure: draw(figure, results), (6, 4))


def report(results: dict[str, Any], options: argparse.Namespace) -> str:
    """One table, a row a cutoff."""
    head, columns = ["cutoff"], [[f"{c:g}" for c in options.cutoffs]]
    if "text" in results:
        head += [
            f"skipped on text, memory {tokens_text(options.text_memory)}",
            "perplexity (change)",
            "skipped, attached",
            "perplexity, attached (change)",
        ]
        for mode in MODES:
            found = [row[mode] for row in results["text"]]
            columns.append([f"{f['skipped']:.1%}" for f in found])
            columns.append(
                [
                    f"{f['perplexity']:.2f} ({f['change'][0]:+.3f}, {f['change'][1]:+.3f} to "
                    f"{f['change'][2]:+.3f})"
                    for f in found
                ]
            )
    for task in TASKS if "recall" in results else ():
        head.append(f"{task} at {tokens_text(options.length)}")
        rows = [row for row in results["recall"] if row["task"] == task]
        ends = [wilson(row["right"], row["trials"]) for row in rows]
        columns.append(
            [
                f"{row['right'] / row['trials']:.3f} ({low:.3f}-{high:.3f})"
                for row, (low, high) in zip(rows, ends)
            ]
        )
    if "decode" in results:
        rows = results["decode"]
        head += [
            "skipped, generating",
            "searches a token",
            "query rows",
            "units leased",
            "tokens/s",
            "to cutoff 0",
        ]
        columns.append([f"{row['skipped']:.1%}" for row in rows])
        for name in ("searches", "rows", "leased"):
            columns.append([f"{row[f'{name}_per_token']:.2f}" for row in rows])
        columns.append([f"{row['tokens_per_second']:.0f}" for row in rows])
        columns.append([f"{row['to_cutoff_0']['median']:.2f}" for row in rows])
    return table(head, list(zip(*columns)))


def draw(figure: Any, results: dict[str, Any]) -> None:
    """Skipped lookups, recall and speed by cutoff."""
    axes = figure.subplots()
    if "text" in results:
        at = [row["cutoff"] for row in results["text"]]
        axes.plot(
            at,
            [row["retrieved"]["skipped"] for row in results["text"]],
            "o-",
            label="lookups skipped on text",
        )
    for task in TASKS if "recall" in results else ():
        rows = [row for row in results["recall"] if row["task"] == task]
        axes.plot(
            [r["cmt_cutoff"] for r in rows],
            [r["right"] / r["trials"] for r in rows],
            "s--",
            label=f"recall: {task}",
        )
    if "decode" in results:
        fastest = max(row["tokens_per_second"] for row in results["decode"])
        speeds = [row["tokens_per_second"] / fastest for row in results["decode"]]
        axes.plot(
            [row["cutoff"] for row in results["decode"]],
            speeds,
            "^:",
            label="speed of generating (greatest = 1)",
        )
    axes.set_xlabel("cmt_cutoff")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.legend()


if __name__ == "__main__":
    main()
