"""Draws accuracy by the length of the memory, compared with text in the prompt and BM25.

From the results of real.recall at several lengths: on the left the mean over all kinds of
answerable questions, on the right how often nothing is said where nothing answers. Bars are 95%
intervals, of questions drawn within each kind. Needs matplotlib (`pip install '.[bench]'`).

    python -m benchmarks.real.recall_figure docs/results/recall-8k.json \\
        docs/results/recall-200.json docs/results/recall-128k.json \\
        --out docs/results/accuracy-by-length.png
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.intervals import Z95
from benchmarks.common.tables import tokens_text
from benchmarks.real.results import Row
from benchmarks.real.tuning import UNANSWERABLE

METHODS = {
    "right": ("the gold passages as text", "#888888"),
    "memory-text": ("what the memory chose, as text", "#d08a2e"),
    "memory": ("memory: keys and values", "#1f5fa8"),
    "bm25": ("BM25, tuned at 8K", "#b03a48"),
}


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("results", nargs="+", type=Path, help="--out of real.recall, by length")
    options.add_argument("--out", type=Path, required=True, help="the PNG to write")
    given = options.parse_args()
    rows = [row for file in given.results for row in json.loads(file.read_text())["answers"]]
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(10, 4.2), layout="constrained")
    draw(figure, rows)
    figure.savefig(given.out, dpi=130)


def draw(figure: Any, rows: Sequence[Row]) -> None:
    """Two panels: of rows (length, task, method, questions, right)."""
    lengths = sorted({row["length"] for row in rows})
    answered, silent = figure.subplots(1, 2)
    for place, (method, (label, colour)) in enumerate(METHODS.items()):
        for axes, unanswerable in ((answered, False), (silent, True)):
            found = [
                mean_of_kinds(
                    [
                        row
                        for row in rows
                        if row["length"] == length
                        and row["method"] == method
                        and (row["task"] in UNANSWERABLE) == unanswerable
                    ]
                )
                for length in lengths
            ]
            if not all(found):
                continue
            at = [
                length * 1.035 ** (place - 1.5) for length in lengths
            ]  # so that bars do not overlap
            means, halves = zip(*[one for one in found if one])
            axes.errorbar(
                at,
                means,
                halves,
                fmt="o-",
                color=colour,
                label=label,
                capsize=3,
                markersize=4,
                linewidth=5 if method == "memory-text" else 1.8,  # visible behind the memory's
                elinewidth=1.5,
                alpha=0.6 if method == "memory-text" else 1,
            )
    for axes, title in (
        (answered, "questions that something answers:\nanswered right, mean over 13 kinds"),
        (silent, "questions that nothing answers:\nsays nothing, mean over 2 kinds"),
    ):
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [tokens_text(length) for length in lengths])
        axes.set_ylim(0, 1)
        axes.set_xlabel("tokens of memory")
        axes.set_ylabel("share of questions")
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
    answered.legend(fontsize=8, loc="lower left")
    figure.suptitle(
        "Stored keys and values answer as the same passages as text do, at every length"
    )


def mean_of_kinds(rows: Sequence[Row]) -> tuple[float, float] | None:
    """The mean over kinds of the share that is right, and half of its 95% interval; None of none.

    A share is smoothed (Agresti and Coull) for its variance, so that one of 1.00 has an interval.
    """
    if not rows:
        return None
    shares = [row["right"] / row["questions"] for row in rows]
    variance = 0.0
    for row in rows:
        n = row["questions"] + 4
        p = (row["right"] + 2) / n
        variance += p * (1 - p) / n
    return sum(shares) / len(shares), Z95 * math.sqrt(variance) / len(shares)


if __name__ == "__main__":
    main()
