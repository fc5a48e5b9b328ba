"""The tables of the memories that are compared."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.common.intervals import mean_interval
from benchmarks.common.tables import rate, table, tokens_text
from benchmarks.paper.baselines_measures import TASKS, Losses_, matrix
from benchmarks.paper.measures import mean


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
