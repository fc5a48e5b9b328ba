"""How soon is the first word there, by how many passages are read, beside the same ones as text?

Draws what `real.speed` timed: processor time from the question to the first token, the median, and
as bars the range of the repeats. Each file is a panel of its own, since runs differ in the speed of
the machine; within one, memory and text took turns.

    python -m benchmarks.real.speed_figure docs/results/first-token.json \\
        docs/results/first-token-text.json --out docs/results/first-token.png
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.options import figure_parser
from benchmarks.common.results import save_figure

METHODS = {
    "memory, {} passages": ("memory", "#1f5fa8"),
    "the same {} as text": ("the same passages as text in the prompt", "#d08a2e"),
}
STORED = {"kv": "keys and values stored", "text": "stored as text alone"}


def main() -> None:
    """Entry point."""
    options = figure_parser(__doc__)
    options.add_argument("results", nargs="+", type=Path, help="--out of real.speed")
    given = options.parse_args()
    runs = [run for file in given.results for run in json.loads(file.read_text()).values()]
    save_figure(given.out, lambda figure: draw(figure, runs), (4.6 * len(runs), 3.9))


def draw(figure: Any, runs: Sequence[dict[str, Any]]) -> None:
    """A panel a run: milliseconds by passages."""
    panels = figure.subplots(1, len(runs), squeeze=False)[0]
    for axes, run in zip(panels, runs):
        counts = run["options"]["passages"]
        for method, (label, colour) in METHODS.items():
            times = [
                [1000 * s for s in run["found"]["busy"][method.format(count)]] for count in counts
            ]
            middle = [median(some) for some in times]
            below = [m - min(some) for m, some in zip(middle, times)]
            above = [max(some) - m for m, some in zip(middle, times)]
            axes.errorbar(
                counts,
                middle,
                [below, above],
                fmt="o-",
                color=colour,
                label=label,
                capsize=3,
                markersize=4,
            )
        axes.set_xticks(counts)
        axes.set_ylim(0)
        axes.set_xlabel("passages read")
        axes.set_ylabel("ms of processor time to the first token")
        axes.set_title(STORED[run["options"].get("keep", "kv")], fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(
        "Stored keys and values answer sooner than the same text; text alone, no sooner",
        fontsize=11,
    )


if __name__ == "__main__":
    main()
