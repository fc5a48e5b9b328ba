"""The tables and figures of the memories that are compared."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.common.intervals import mean_interval
from benchmarks.common.tables import rate, table, tokens_text
from benchmarks.paper.baselines_measures import TASKS, Losses_, matrix
from benchmarks.paper.measures import mean
from benchmarks.paper.scoring import Way

Point = tuple[str, Way, Losses_]
"""A memory, how it read, and what was found."""


def ratio(every: Losses_, against: Losses_, axis: int) -> str:
    """The ratio of perplexities of the same tokens, and its 95% interval over texts (axis 1: seeds
    are means) or over seeds (axis 0): "0.970 (0.965-0.975)".
    """
    return _ratio(matrix(every) - matrix(against), axis)


def _ratio(differences: np.ndarray, axis: int) -> str:
    differences = differences.mean(1 - axis)  # losses [seeds, texts] before
    middle, low, high = mean_interval(differences)
    if len(differences) < 2:
        return f"{math.exp(middle):.3f}"
    return f"{math.exp(middle):.3f} ({math.exp(low):.3f}-{math.exp(high):.3f})"


def past_table(found: dict[str, list[Losses_]], pasts: Sequence[int]) -> str:
    """Perplexity by memory and length of the past, the mean over seeds; tokens attended to and
    state at the longest.
    """
    head = ["memory", *(tokens_text(past) for past in pasts), "attended", "state, KB"]
    lines = []
    for memory, by_past in found.items():
        line = [memory, *(f"{mean(every).perplexity:.2f}" for every in by_past)]
        last = mean(by_past[-1])
        lines.append([*line, f"{last.attended:.0f}", f"{last.state / 1024:,.0f}"])
    return table(head, lines)


def gain_table(found: dict[str, list[Losses_]], pasts: Sequence[int]) -> str:
    """What a past gives: the ratio of each memory's perplexity to its own behind the shortest past,
    paired: over texts, then over seeds.
    """
    head = [f"to its own after {tokens_text(pasts[0])}"]
    for past in pasts[1:]:
        head += [f"{tokens_text(past)}, over texts", "over seeds"]
    lines = [
        [memory, *(ratio(every, by_past[0], axis) for every in by_past[1:] for axis in (1, 0))]
        for memory, by_past in found.items()
    ]
    return table(head, lines)


def paired_table(found: dict[str, list[Losses_]], pasts: Sequence[int], first: str) -> str:
    """Ratios of perplexities of the memory `first` to the others', paired: over texts, then over
    seeds.
    """
    head = [f"{first} to"]
    for past in pasts:
        head += [f"{tokens_text(past)}, over texts", "over seeds"]
    lines = []
    for memory, by_past in found.items():
        if memory == first:
            continue
        line = [memory]
        for ours, theirs in zip(found[first], by_past):
            line += [ratio(ours, theirs, 1), ratio(ours, theirs, 0)]
        lines.append(line)
    return table(head, lines)


def ways_table(points: Sequence[Point], against: Losses_) -> str:
    """Perplexity by how a past of one length is read, in order of the tokens attended to."""
    lines = [
        [memory, str(way), f"{here.attended:.0f}", f"{here.state / 1024:,.0f}"]
        + [f"{here.perplexity:.2f}", ratio(every, against, 1), ratio(every, against, 0)]
        for memory, way, every in sorted(points, key=lambda point: mean(point[2]).attended)
        for here in [mean(every)]
    ]
    head = ["memory", "read with", "attended", "state, KB", "perplexity"]
    return table([*head, "to none, over texts", "over seeds"], lines)


def equal_table(points: Sequence[Point], ours: str, theirs: str) -> str:
    """The ratio of our perplexity to theirs at as many tokens attended to, and at as many bytes of
    state: between two of their ways to read losses are interpolated, in the logarithm of either.
    Nothing stands where ours lies beyond all of theirs.
    """
    curve = [(mean(every), matrix(every)) for memory, _, every in points if memory == theirs]
    lines = []
    for memory, way, every in points:
        if memory != ours:
            continue
        line, here = [str(way) or "as trained"], mean(every)
        for name in ("attended", "state"):
            at = getattr(here, name)
            line.append(f"{at:.0f}" if name == "attended" else f"{at / 1024:,.0f}")
            known = sorted(
                ((math.log(getattr(losses, name)), values) for losses, values in curve),
                key=lambda point: point[0],
            )
            between = _between(known, math.log(at)) if at else None
            line += ["", ""] if between is None else [
                _ratio(matrix(every) - between, axis) for axis in (1, 0)
            ]  # fmt: skip
        lines.append(line)
    head = [f"{ours} read with", "attended", f"to {theirs} at as many", "over seeds"]
    return table([*head, "state, KB", f"to {theirs} at as much", "over seeds"], lines)


def _between(known: Sequence[tuple[float, np.ndarray]], at: float) -> np.ndarray | None:
    """Losses interpolated; None beyond the ends."""
    for (low, below), (high, above) in pairwise(known):
        if low <= at <= high:
            share = (at - low) / (high - low) if high > low else 0.0
            return (1 - share) * below + share * above
    return None


def recall_table(found: dict[str, dict[int, list[list[dict[str, Any]]]]]) -> str:
    """Right answers by memory and length, of all seeds together (Wilson's interval), and of the
    worst and best seed.
    """
    lengths = list(next(iter(found.values())))
    lines = []
    for task in TASKS:
        for memory, by_length in found.items():
            line = [task, memory]
            for rows in by_length.values():
                asked = [row for of_seed in rows for row in of_seed if row["task"] == task]
                if not asked:
                    line.append("")
                    continue
                shares = [row["right"] / row["trials"] for row in asked]
                whole = rate(sum(r["right"] for r in asked), sum(r["trials"] for r in asked))
                line.append(f"{whole} {min(shares):.2f}..{max(shares):.2f}")
            lines.append(line)
    return table(["task", "memory", *(tokens_text(length) for length in lengths)], lines)


def cost_table(found: dict[str, list[dict[str, float]]]) -> str:
    """Cost by memory and past."""
    lines = [
        [memory, tokens_text(int(at["past"])), f"{at['tokens_per_second']:,.0f}"]
        + [f"{at['whole']:,.0f}"]
        + [f"{at[name] / 1024:,.1f}" for name in ("state", "read", "searched")]
        for memory, by_past in found.items()
        for at in by_past
    ]
    head = ["memory", "past", "tokens/s there", "tokens/s of the past", "state, KB"]
    return table([*head, "read a token, KB", "searched a token, KB"], lines)


def draw(
    figure: Any, pasts: Sequence[int], by_past: dict[str, list[Losses_]],
    points: Sequence[Point],
) -> None:  # fmt: skip
    """Perplexity by past, by bytes of the state, and by tokens attended to; what is far above all
    that models give as they were trained is left out.
    """
    left, middle, right = figure.subplots(1, 3, sharey=True)
    for memory, of_past in by_past.items():
        values = [mean(every).perplexity for every in of_past]
        spread = [np.exp(matrix(every).mean(1)) for every in of_past]
        (line,) = left.plot(range(len(pasts)), values, "o-", markersize=4, label=memory)
        low, high = ([limit(of) for of in spread] for limit in (min, max))
        left.fill_between(range(len(pasts)), low, high, alpha=0.15, color=line.get_color())
        mine = [mean(every) for kind, _, every in points if kind == memory]
        for axes, name in ((middle, "state"), (right, "attended")):
            at = sorted((getattr(here, name), here.perplexity) for here in mine)
            axes.plot(*zip(*at), "o-", markersize=4, color=line.get_color())
    left.set_xticks(range(len(pasts)), [tokens_text(past) for past in pasts])
    left.set_xlabel("tokens of the past")
    left.set_ylabel("perplexity of the same targets")
    right.legend(*left.get_legend_handles_labels(), loc="center right")
    left.set_ylim(top=1.04 * max(mean(every).perplexity for of in by_past.values() for every in of))
    middle.set_xscale("symlog", linthresh=1 << 14)
    middle.set_xlim(-(1 << 11), 1 << 23)
    middle.set_xlabel("bytes of the past")
    right.set_xscale("log", base=2)
    right.set_xlabel("tokens attended to")
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
