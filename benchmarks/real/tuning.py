"""How many passages a baseline reads, and below which best score it abstains: chosen on validation
texts, applied to others.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]  # what came of one question by one method

UNANSWERABLE = ("absent", "absent_reworded")


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
    """Of each baseline that has rows of methods "name@K" the K and the threshold of the greatest
    worth; of equal ones the smaller K, then the lower threshold.
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
    """rows: of a method that answers whatever it is asked."""
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
