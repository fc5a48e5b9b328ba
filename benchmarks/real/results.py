"""Results that outlive a killed run: JSON lines, one a question and method."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Results:
    """Rows in a file that only grows; what is there is not measured again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: dict[tuple[str, str], Row] = {}
        if path.exists():
            content = path.read_text()
            if content and not content.endswith("\n"):
                path.write_text(content + "\n")
            for line in content.splitlines():
                try:
                    row = json.loads(line)
                except ValueError:  # what a killed process was writing
                    continue
                self._rows[row["question"], row["method"]] = row

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def add(self, row: Row) -> None:
        """Keep a row of a question and method."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self._rows[row["question"], row["method"]] = row
