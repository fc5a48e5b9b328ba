"""What do fewer bytes a token cost: accuracy, or time?

Draws two results over the bytes of keys and values that a memory stores a token. Above, the share
of questions that `real.codecs` found answered right by codec, and the share of answers that
`real.kv_budget` found to be the same under a budget; bars are 95% intervals. Below, the processor's
seconds a question under a budget, which has the missing passages computed; bars are 95% intervals
of the mean. A budget is a share of what the same text takes without one, and so of int8's bytes.

    python -m benchmarks.real.bytes_figure docs/results/codecs-passages.json \\
        docs/results/kv-budget.json --out docs/results/bytes-a-token.png
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.common.intervals import mean_interval, wilson
from benchmarks.common.options import figure_parser
from benchmarks.common.results import save_figure

BUDGETS = {
    "chained": ("as it ships: each passage over those before it", "#1f5fa8"),
    "unchained": ("passages as they are stored", "#d08a2e"),
}


def main() -> None:
    """Entry point."""
    options = figure_parser(__doc__)
    options.add_argument("codecs", type=Path, help="--out of real.codecs")
    options.add_argument("budgets", type=Path, help="--out of real.kv_budget")
    given = options.parse_args()
    codecs, budgets = json.loads(given.codecs.read_text()), json.loads(given.budgets.read_text())
    save_figure(given.out, lambda figure: draw(figure, codecs, budgets), (7.5, 6))


def draw(figure: Any, codecs: dict[str, Any], budgets: dict[str, Any]) -> None:
    """Two panels over one axis of bytes a token."""
    answers, seconds = figure.subplots(2, 1, sharex=True)
    size = {name: of["bytes"] / of["tokens"] for name, of in codecs["figures"].items()}
    right = {name: [row[0] for row in rows] for name, rows in codecs["rows"].items()}
    shares = {name: sum(rows) / len(rows) for name, rows in right.items()}
    bounds = {name: wilson(round(sum(rows)), len(rows)) for name, rows in right.items()}
    names = list(size)
    answers.errorbar(
        [size[name] for name in names],
        [shares[name] for name in names],
        [
            [shares[name] - bounds[name][0] for name in names],
            [bounds[name][1] - shares[name] for name in names],
        ],
        fmt="s",
        color="#333333",
        capsize=3,
        label="answered right, by codec",
    )
    for name in names:
        answers.annotate(name, (size[name], shares[name]), (-34, -3), textcoords="offset points")
    for place, (kind, (label, colour)) in enumerate(BUDGETS.items()):
        rows = {name: row for name, row in budgets[kind]["rows"].items() if name != "no budget"}
        whole = max(row["bytes"] for row in rows.values())
        at = [row["bytes"] / whole * size["int8"] + 90 * (place - 0.5) for row in rows.values()]
        asked = [len(row["by_question"]["seconds"]) for row in rows.values()]
        same = [1 - row["other_answers"] / n for row, n in zip(rows.values(), asked)]
        least = [wilson(n - row["other_answers"], n)[0] for row, n in zip(rows.values(), asked)]
        answers.errorbar(
            at,
            same,
            [[s - low for s, low in zip(same, least)], [0] * len(same)],
            fmt="o",
            color=colour,
            capsize=3,
            markersize=4,
            label=f"the same answer as without a budget; {label}",
        )
        found = [mean_interval(row["by_question"]["seconds"]) for row in rows.values()]
        seconds.errorbar(
            at,
            [mean for mean, *_ in found],
            [high - mean for mean, _, high in found],
            fmt="o-",
            color=colour,
            capsize=3,
            markersize=4,
            label=f"int8 with a budget; {label}",
        )
    answers.set_ylim(0.5, 1.03)
    answers.set_ylabel("share of questions")
    seconds.set_ylim(0)
    seconds.set_ylabel("processor seconds a question")
    seconds.set_xlabel("bytes of keys and values stored a token")
    seconds.xaxis.set_major_formatter("{x:,.0f}")
    for axes in (answers, seconds):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="lower left")
    figure.suptitle("Fewer bytes cost time, not answers", fontsize=11)


if __name__ == "__main__":
    main()
