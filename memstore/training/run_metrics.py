"""What a training run says of itself: a line of numbers every few steps, in a file and to whoever
listens.
"""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memstore.training.objectives import Loss

Report = Callable[[dict[str, Any]], None]


class Metrics:
    """Sums over steps, and lines of JSON."""

    def __init__(self, path: Path, report: Report) -> None:
        self._path, self._report = path, report
        self._steps, self._loss = 0, 0.0
        self._right: Counter[str] = Counter()
        self._asked: Counter[str] = Counter()

    def add(self, loss: float, window: Loss, chunk: Loss | None) -> None:
        """Count a step: its loss, and what was right of its windows and chunks."""
        self._steps, self._loss = self._steps + 1, self._loss + loss
        for kind, part in (("window", window), ("chunk", chunk)):
            if part is not None:
                self._right[f"{kind}_accuracy"] += int(part.correct)
                self._asked[f"{kind}_accuracy"] += part.answers
                self._right[f"{kind}_lookup_accuracy"] += int(part.lookups_correct)
                self._asked[f"{kind}_lookup_accuracy"] += part.lookups

    def log(self, **line: Any) -> None:
        """Write a line that ends with the mean loss and the accuracies since the last one."""
        line["loss"] = round(self._loss / self._steps, 4)
        line |= {n: round(self._right[n] / asked, 4) for n, asked in self._asked.items() if asked}
        self._steps, self._loss = 0, 0.0
        self._right.clear()
        self._asked.clear()
        self.write(line)

    def write(self, line: dict[str, Any]) -> None:
        """Add a line as it is. Raises OSError."""
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            error.filename = str(self._path)
            raise
        self._report(line)
