"""What does a gate by tier save and cost: rows whose gate is low do not wait for far blocks.

Asked of a memory in a directory (disk) and of the same memory published beside it (remote), with
one cutoff for all tiers, and with the same one for the host and higher ones for what is farther.

reads    Units (blocks of one KV head) read from the far tier a question, and those that rows had
         chosen and did not wait for.
recall   Right answers to needles (recall.py has the construction).
text     Perplexity of text of which an earlier part is attached, and its change to the cutoff that
         is the first of --cutoffs, paired over segments, with 95% intervals.

Text is scored with a host tier that begins empty for every segment; the questions of a task come
one after the other, and find there what those before had read.

    python -m benchmarks.quality.gate_by_tier --text books-test.jsonl.zst
"""

import argparse
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.intervals import mean_interval, wilson
from benchmarks.common.memories import build_memory, workplace
from benchmarks.common.needle_memory import ask, build, build_settings
from benchmarks.common.needles import Plan
from benchmarks.common.options import add, load, parser
from benchmarks.common.reading import segments
from benchmarks.common.results import write_results
from benchmarks.common.tables import table, tokens_number, tokens_text
from benchmarks.common.text import Books
from memstore import LandmarkModel, MemoryStore
from memstore.share.objects.open_object_store import open_object_store
from memstore.share.publish.publish import publish

TASKS = ("passkey", "fact")
TIERS = ("disk", "remote")
Cutoff = float | Mapping[str, float]


def cutoffs(options: argparse.Namespace, tier: str) -> list[Cutoff]:
    """One for all, then by tier."""
    least = options.cutoffs[0]
    return [*options.cutoffs, *({"host": least, tier: far} for far in options.cutoffs[1:])]


def shown(cutoff: Cutoff) -> str:
    if isinstance(cutoff, Mapping):
        return ", ".join(f"{tier} {value:g}" for tier, value in cutoff.items())
    return f"{cutoff:g} for all"


@contextmanager
def opened(model: LandmarkModel, memory: Path, tier: str) -> Iterator[MemoryStore]:
    """A memory in its directory, or published beside it; its caches are empty."""
    there = memory.with_name(memory.name + "-published")
    if tier == "remote" and not there.exists():
        with MemoryStore.open(memory, model.signature) as store:
            place = open_object_store(f"file://{there.resolve()}", make=True)
            publish(store._on_disk().catalog, store.ready(), place)
    where = memory if tier == "disk" else f"file://{there.resolve()}"
    with MemoryStore.open(where, model.signature, read_only=True) as store:
        yield store


def recall(
    model: LandmarkModel, directory: Path, tier: str, cutoff: Cutoff, options: argparse.Namespace
) -> dict[str, Any]:
    """Right answers, and far reads a question."""
    plan = Plan.load(directory)
    assert plan is not None
    row: dict[str, Any] = {}
    with opened(model, directory / "memory", tier) as store:
        for task in TASKS:
            given = {"trials": options.trials, "seed": options.seed, "cmt_cutoff": cutoff}
            found = ask(model, store, plan, task, options.length, **given)
            assert found is not None
            row[task] = {"right": found["right"], "trials": found["trials"]}
        trials = options.trials * len(TASKS)
        row["reads_a_question"] = store.tier_stats()[tier]["hits"] / trials
    return row


def text(
    model: LandmarkModel, books: Books, directory: Path, options: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """Of each tier a row a cutoff."""
    rows: dict[str, list[dict[str, Any]]] = {tier: [] for tier in TIERS}
    losses: dict[tuple[str, int], list[float]] = {}
    counts: dict[tuple[str, int], list[int]] = {}
    for number, segment in enumerate(
        segments(books, options.segments, options.text_memory, options.seed)
    ):
        memory = directory / f"segment-{number}"
        build_memory(model, memory, segment.before)
        targets = segment.targets.tolist()
        for tier in TIERS:
            for at, cutoff in enumerate(cutoffs(options, tier)):
                with (
                    opened(model, memory, tier) as store,
                    model.session(store, cmt_cutoff=cutoff) as session,
                ):
                    scores = model.score(session, targets)
                    losses.setdefault((tier, at), []).append(-float(scores.mean()))
                    of = counts.setdefault((tier, at), [0, 0])
                    of[0] += int(store.tier_stats()[tier]["hits"])
                    of[1] += session.lookups.left
    for tier in TIERS:
        zero = np.array(losses[tier, 0])
        for at in range(len(cutoffs(options, tier))):
            here, (reads, left) = np.array(losses[tier, at]), counts[tier, at]
            base = math.exp(zero.mean())
            change = [base * (math.exp(x) - 1) for x in mean_interval(here - zero)]
            rows[tier].append(
                {
                    "perplexity": math.exp(here.mean()),
                    "change": change,
                    "reads_a_segment": reads / len(here),
                    "left_a_segment": left / len(here),
                }
            )
    return rows


def main() -> None:
    arguments = parser(__doc__)
    add(
        arguments,
        "--cutoffs",
        [0.05, 0.16, 0.3, 0.5],
        "the host's, then of the far tier",
        type=float,
    )
    add(arguments, "--segments", 40)
    add(arguments, "--text-memory", "4K", "tokens of memory while reading text")
    add(arguments, "--trials", 50)
    add(arguments, "--length", "32K", "tokens of memory for recall")
    options = arguments.parse_args()
    for name in ("text_memory", "length"):
        setattr(options, name, tokens_number(getattr(options, name)))
    model = load(options)
    with workplace(options) as directory:
        build(directory, build_settings(options, TASKS, options.length))
        found = {
            tier: [recall(model, directory, tier, c, options) for c in cutoffs(options, tier)]
            for tier in TIERS
        }
        books = Books.read(options.text, model.tokenizer, directory / "tokens")
        read = text(model, books, directory, options)
    lines = []
    for tier in TIERS:
        for cutoff, row, of_text in zip(cutoffs(options, tier), found[tier], read[tier]):
            right = [
                "{:.2f} ({:.2f}-{:.2f})".format(
                    row[task]["right"] / row[task]["trials"],
                    *wilson(row[task]["right"], row[task]["trials"]),
                )
                for task in TASKS
            ]
            change = "{:+.3f} ({:+.3f} to {:+.3f})".format(*of_text["change"])
            lines.append(
                [
                    tier,
                    shown(cutoff),
                    f"{row['reads_a_question']:.0f}",
                    *right,
                    f"{of_text['reads_a_segment']:.0f}",
                    f"{of_text['left_a_segment']:.0f}",
                    f"{of_text['perplexity']:.2f}",
                    change,
                ]
            )
    head = [
        "far tier", "cutoff", "far reads a question",
        *(f"{task} at {tokens_text(options.length)}" for task in TASKS),
        "far reads a segment", "not waited for", "perplexity", "change",
    ]  # fmt: skip
    print("\n" + table(head, lines))
    write_results(options, model, {"recall": found, "text": read})


if __name__ == "__main__":
    main()
