"""What has been done and found, in one JSON file that is whole at any time, and the table of it."""

import json
import os
import time
from pathlib import Path
from typing import Any

_HEAD = ["part", "what", "by", "ms", "TFLOP/s", "GB/s", "of the rates", "note"]


class State:
    """Of a directory: `gpu.json`, written anew after every row, and `gpu.md`, the table."""

    def __init__(self, directory: Path, asked: dict[str, Any]) -> None:
        """Raises ValueError where the file there was begun with other options."""
        directory.mkdir(parents=True, exist_ok=True)
        self.json, self.markdown = directory / "gpu.json", directory / "gpu.md"
        self.content: dict[str, Any] = {"asked": asked, "machines": [], "parts": {}}
        if self.json.exists():
            self.content = json.loads(self.json.read_text())
            if self.content["asked"] != asked:
                raise ValueError(
                    f"{self.json} was begun with {self.content['asked']}, not {asked}; name "
                    "another --out, or remove it"
                )

    def part(self, name: str) -> dict[str, Any]:
        """Of a part: seconds that it has taken, its cases' names, what they found."""
        empty: dict[str, Any] = {"seconds": 0.0, "cases": [], "found": {}}
        part: dict[str, Any] = self.content["parts"].setdefault(name, empty)
        return part

    def forget(self, name: str) -> None:
        """As if a part had never run."""
        self.content["parts"].pop(name, None)

    def left(self, name: str) -> list[str] | None:
        """Cases of a part that have no end yet; None where nobody knows its cases."""
        part = self.part(name)
        if "error" in part:
            return []
        ended = [case for case, found in part["found"].items() if "seconds" in found]
        return [case for case in part["cases"] if case not in ended] if part["cases"] else None

    def save(self) -> None:
        """All or nothing."""
        fresh = self.json.with_suffix(".new")
        fresh.write_text(json.dumps(self.content, indent=1))
        os.replace(fresh, self.json)

    def report(self) -> str:
        """The table, and what is not there; written beside the JSON, too."""
        said = f"{_heading(self.content)}\n\n{_table(self.content['parts'])}\n"
        self.markdown.write_text(said)
        return said


def _heading(content: dict[str, Any]) -> str:
    lines = []
    if not content["asked"]["device"].startswith("cuda"):
        lines.append("**Made on a CPU: no number here is a GPU's.**")
    for machine in content["machines"]:
        lines.append(", ".join(f"{name} {value}" for name, value in machine.items()))
    return "\n\n".join(lines)


def _table(parts: dict[str, Any]) -> str:
    rows = [_HEAD]
    for name, part in parts.items():
        if "error" in part:
            rows.append([name, "", "", "", "", "", "", f"**failed**: {part['error']}"])
        for case in part["cases"] or part["found"]:
            found = part["found"].get(case, {})
            rows += [[name, *_cells(row)] for row in found.get("rows", [])]
            if "error" in found:
                rows.append([name, case, "", "", "", "", "", f"**failed**: {found['error']}"])
            elif "seconds" not in found:
                rows.append([name, case, "", "", "", "", "", "not run yet"])
    cells = [[cell.replace("|", "/") for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_HEAD) - 1)]
    lines = [
        "| " + " | ".join([*(c.ljust(w) for c, w in zip(row, widths)), row[-1]]) + " |"
        for row in cells
    ]
    return "\n".join([lines[0], "|" + "---|" * len(_HEAD), *lines[1:]])


def _cells(row: dict[str, Any]) -> list[str]:
    seconds = row.get("seconds")
    note = row.get("note", "")
    if "right" in row:
        note = f"{'right' if row['right'] else '**WRONG**'}; {note}"
    return [
        row["what"],
        row.get("by", ""),
        "" if seconds is None else f"{1e3 * seconds:.4g}",
        _rate(row.get("operations"), seconds, 1e12),
        _rate(row.get("bytes"), seconds, 1e9),
        f"{row['of_peak']:.2f}" if "of_peak" in row else "",
        note,
    ]


def _rate(amount: float | None, seconds: float | None, unit: float) -> str:
    return f"{amount / seconds / unit:.3g}" if amount and seconds else ""


def now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
