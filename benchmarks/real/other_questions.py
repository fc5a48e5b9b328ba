"""How does a real model's memory do on questions of other people's making?

Tasks after the descriptions of RULER (needles, variables, frequent words), BABILong (qa1-qa5) and
InfiniteBench (pass key, number string), written anew. Their samples share haystacks, of books or
noise; what a sample hides stands in passages among them. The score is the share of the answer's
parts that occur in what is generated after the words that begin the answer.

Methods as for real.recall; a run goes on where it was killed, with --work. Intervals are Student's,
95%.

    python -m benchmarks.real.other_questions --text books-test.jsonl.zst --model smollm2/ --work w/
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.common.intervals import mean_interval
from benchmarks.common.options import add
from benchmarks.common.results import plot, write
from benchmarks.common.tables import table, tokens_text
from benchmarks.real import babilong, infinite, ruler
from benchmarks.real.plan import Plan
from benchmarks.real.prompting import counting
from benchmarks.real.recall_tables import counts
from benchmarks.real.results import Row
from benchmarks.real.running import parser, read, run
from memstore.training.corpus import read_documents

SUITES = {"RULER": ruler.TASKS, "BABILong": babilong.TASKS, "InfiniteBench": infinite.TASKS}
TASKS = {task: title for tasks in SUITES.values() for task, title in tasks.items()}


def main() -> None:
    options = read_options()
    decides = (options.lengths, options.samples)
    rows = run("other", options, lambda: build(options), decides=decides)
    for length in options.lengths:
        print("\n" + marks(rows, length, options.methods))
    write(options, {"answers": counts(rows)})
    plot(options, lambda figure: draw(figure, rows, options.methods), (11, 3.6))


def read_options() -> argparse.Namespace:
    options = parser(__doc__, lengths=["4K", "16K", "64K"])
    add(options, "--samples", 25, "of each task and length")
    add(options, "--tasks", list(TASKS), choices=TASKS, metavar="TASK")
    return read(options)


def build(options: argparse.Namespace) -> Plan:
    """All questions."""
    texts = list(read_documents(options.text))
    offsets, given = counting(options.model), (options.lengths, options.samples, options.seed)
    plan = ruler.build(offsets, texts, *given)
    plan.merge(babilong.build(offsets, texts, *given))
    plan.merge(infinite.build(offsets, *given))
    return plan


def marks(rows: Sequence[Row], length: int, methods: Sequence[str]) -> str:
    """The mean score at one length: tasks by methods."""
    lines = []
    for task, title in TASKS.items():
        here = [row for row in rows if row["task"] == task and row["length"] == length]
        if here:
            cells = [_mean([r["right"] for r in here if r["method"] == m]) for m in methods]
            most = max(sum(row["method"] == m for row in here) for m in methods)
            lines.append([title, most, *cells])
    return table([f"{tokens_text(length)} tokens", "samples", *methods], lines)


def draw(figure: Any, rows: Sequence[Row], methods: Sequence[str]) -> None:
    """Each suite's mean over its tasks by length, a line a method."""
    panels = figure.subplots(1, len(SUITES), sharey=True)
    lengths = sorted({row["length"] for row in rows})
    for axes, (suite, tasks) in zip(panels, SUITES.items()):
        for method in methods:
            points = []
            for length in lengths:
                right = [
                    row["right"]
                    for row in rows
                    if (row["method"], row["length"]) == (method, length) and row["task"] in tasks
                ]
                points.append(float(np.mean(right)) if right else np.nan)
            axes.plot(lengths, points, "o-", markersize=4, label=method)
        axes.set_title(suite)
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [tokens_text(length) for length in lengths])
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("tokens of memory")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("mean score")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=8)


def _mean(right: Sequence[float]) -> str:
    if len(right) < 2:
        return ""
    mean, low, high = mean_interval(right)
    return f"{mean:.2f} ({max(0.0, low):.2f}-{min(1.0, high):.2f})"


if __name__ == "__main__":
    began = time.perf_counter()
    main()
    print(f"{time.perf_counter() - began:.0f} s")
