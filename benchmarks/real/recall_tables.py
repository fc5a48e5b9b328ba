"""The tables of recall.py: answers, their differences, and right answers less false ones; and how
many passages a baseline reads and below which best score it abstains, chosen on validation texts.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.common.intervals import paired_interval
from benchmarks.common.tables import rate, table, tokens_text
from benchmarks.real.planted import TASKS

Row = dict[str, Any]  # what came of one question by one method
UNANSWERABLE = ("absent", "absent_reworded")


def answers(rows: Sequence[Row], length: int, methods: Sequence[str]) -> str:
    """How often answers are right at one length, and where nothing answers how often nothing is
    said: tasks by methods.
    """
    lines = []
    for task, title in TASKS.items():
        here = [row for row in rows if row["task"] == task and row["length"] == length]
        if not here:
            continue
        cells = [_rate([outcome(row) for row in here if row["method"] == m]) for m in methods]
        lines.append([title, max(sum(r["method"] == m for r in here) for m in methods), *cells])
    return table([f"{tokens_text(length)} tokens", "questions", *methods], lines)


def differences(rows: Sequence[Row], length: int, methods: Sequence[str]) -> str:
    """How much more often the memory is right than each other method is on the same questions, with
    an interval of 95%: tasks by methods.
    """
    here = [row for row in rows if row["length"] == length]
    found = {(row["method"], row["question"]): outcome(row) for row in here}
    others = [method for method in methods if method != "memory"]
    lines = []
    for task, title in TASKS.items():
        asked = [r["question"] for r in here if r["task"] == task and r["method"] == "memory"]
        if not asked:
            continue
        cells = []
        for method in others:
            pairs = [q for q in asked if (method, q) in found]
            by_pair = [found["memory", q] - found[method, q] for q in pairs]
            cells.append(_difference(by_pair) if by_pair else "")
        lines.append([title, *cells])
    return table([f"memory minus .., {tokens_text(length)} tokens", *others], lines)


def worths(rows: Sequence[Row], methods: Sequence[str]) -> str:
    """Right answers less false ones, of methods that were asked what nothing answers: lengths by
    methods.
    """
    lines = []
    for length in sorted({row["length"] for row in rows}):
        cells = []
        for method in methods:
            own = [r for r in rows if r["method"] == method and r["length"] == length]
            told = any(row["task"] in UNANSWERABLE for row in own)
            cells.append(f"{worth(own):.3f}" if told else "")
        lines.append([tokens_text(length), *cells])
    return table(["right less false, the mean over kinds", *methods], lines)


def counts(rows: Sequence[Row]) -> list[Row]:
    """How many answers are right by length, task and method, of how many questions, and where
    blocks were chosen how many of them a question read, the mean.
    """
    keys = dict.fromkeys((row["length"], row["task"], row["method"]) for row in rows)
    found = []
    for key in sorted(keys):
        some = [row for row in rows if (row["length"], row["task"], row["method"]) == key]
        told = {"questions": len(some), "right": round(sum(map(outcome, some)), 2)}
        if all("read" in row for row in some):
            told["blocks_read"] = round(float(np.mean([len(row["read"]) for row in some])), 2)
        found.append(dict(zip(("length", "task", "method"), key)) | told)
    return found


def _rate(right: Sequence[float]) -> str:
    return rate(round(sum(right)), len(right)) if right else ""


def _difference(by_pair: Sequence[float]) -> str:
    low, high = paired_interval(by_pair)
    return f"{np.mean(by_pair):+.3f} ({low:+.3f} to {high:+.3f})"


# Tuning


@dataclass(frozen=True)
class Tuned:
    """A baseline reads its best `k` passages, nothing where its best score is below `threshold`
    (None: never). worth: what this was worth on the validation texts.
    """

    k: int
    threshold: float | None
    worth: float


def outcome(row: Row) -> float:
    """How right a row is, 0..1: where nothing answers, whether the method said nothing."""
    if row["task"] in UNANSWERABLE:
        return float(not row.get("answered", True))
    return float(row["right"])


def worth(rows: Sequence[Row]) -> float:
    """Right answers less false ones, the mean over kinds and lengths: the share of its questions
    that were answered rightly by a kind that has answers, minus the share answered at all by one
    that has none. Abstaining counts 0 everywhere, and so does a wrong answer that there is.
    """
    return sum(_weights(rows))


def tune(rows: Sequence[Row]) -> dict[str, Tuned]:
    """The K and the threshold of the greatest worth for each baseline with rows "name@K".

    Of equal ones it takes the smaller K, then the lower threshold.
    """
    methods: dict[str, dict[int, list[Row]]] = {}
    for row in rows:
        name, _, number = row["method"].partition("@")
        if number.isdigit() and name != "memory":
            methods.setdefault(name, {}).setdefault(int(number), []).append(row)
    found: dict[str, Tuned] = {}
    for name, by_count in methods.items():
        tried = [_best_threshold(k, some) for k, some in sorted(by_count.items())]
        found[name] = max(tried, key=lambda one: one.worth)
    return found


def _weights(rows: Sequence[Row]) -> list[float]:
    """What each row adds to the worth of all."""
    cells = Counter((row["length"], row["task"]) for row in rows)
    found = []
    for row in rows:
        value = outcome(row) - 1 if row["task"] in UNANSWERABLE else outcome(row)
        found.append(value / cells[row["length"], row["task"]] / len(cells))
    return found


def _best_threshold(k: int, rows: Sequence[Row]) -> Tuned:
    """The threshold above which the rows of a method that always answers weigh most."""
    pairs = sorted(zip((row["best"] for row in rows), _weights(rows)), reverse=True)
    whole = sum(weight for _, weight in pairs)
    best, threshold, so_far = whole, None, 0.0
    for at, (score, weight) in enumerate(pairs):
        so_far += weight
        last = at + 1 == len(pairs) or pairs[at + 1][0] < score
        if last and so_far > best + 1e-9:
            best, threshold = so_far, score
        elif last and threshold is not None and abs(so_far - best) <= 1e-9:
            threshold = score
    return Tuned(k, threshold, best)
