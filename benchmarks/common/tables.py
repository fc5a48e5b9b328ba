"""Tables in markdown, and how numbers look in them."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.common.intervals import wilson


def table(head: str | Sequence[Any], rows: Iterable[str | Sequence[Any]]) -> str:
    """A markdown table of titles and rows, each its cells or "one | line | of them"."""
    split = (row.split(" | ") if isinstance(row, str) else row for row in [head, *rows])
    cells = [[str(cell) for cell in row] for row in split]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |"
        for row in cells
    ]
    return "\n".join(
        [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]
    )


def tokens_text(tokens: int) -> str:
    """2048 -> "2K", 1048576 -> "1M"."""
    if tokens >= 1 << 20 and tokens % (1 << 20) == 0:
        return f"{tokens >> 20}M"
    if tokens >= 1024:
        return f"{tokens / 1024:g}K"
    return str(tokens)


def tokens_number(text: str) -> int:
    """The inverse: "32K" -> 32768."""
    scale = {"k": 1024, "m": 1024**2}.get(text[-1:].lower(), 1)
    return round(float(text[:-1] if scale > 1 else text) * scale)


def rate(right: int, trials: int) -> str:
    """A proportion with its interval: "0.985 (0.957-0.995)"."""
    return with_interval([right / trials, *wilson(right, trials)])


def spread(ratio: dict[str, float]) -> str:
    """A `paired_ratio` with its range: "0.63 (0.61-0.65)"."""
    return f"{ratio['median']:.2f} ({ratio['least']:.2f}-{ratio['greatest']:.2f})"


def with_interval(values: Sequence[float], digits: int = 3) -> str:
    """A value with its interval: "0.970 (0.965-0.975)"; the value alone without one."""
    middle, low, high = (f"{value:.{digits}f}" for value in values)
    return f"{middle} ({low}-{high})" if math.isfinite(values[2]) else middle
