"""What has been done and found, in one JSON file that is whole at any time, and the table of it."""

import json
import os
from pathlib import Path
from typing import Any

_HEAD = ["part", "what", "by", "ms", "TFLOP/s", "GB/s", "of the rates", "note"]


class State:
    """`gpu.json` of a directory, written again after every row, and `gpu.md`, the table."""

    def __init__(self, directory: Path) -> None:
        self.json, self.markdown = directory / "gpu.json", directory / "gpu.md"
        self.content: dict[str, Any] = {"machines": [], "parts": {}}
        if self.json.exists():
            self.content = json.loads(self.json.read_text())

    def part(self, name: str) -> dict[str, Any]:
        """Of a part: seconds that it has taken, its cases' names, what they found."""
        empty: dict[str, Any] = {"seconds": 0.0, "cases": [], "found": {}}
        part: dict[str, Any] = self.content["parts"].setdefault(name, empty)
        return part

    def left(self, name: str) -> list[str] | None:
        """Cases of a part that have no end yet; None before its cases are known."""
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
        """The table, and what is missing; written to `gpu.md`, too."""
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
    rows = [_HEAD, ["---"] * len(_HEAD)]
    for name, part in parts.items():
        if "error" in part:
            rows.append([name, *[""] * 6, f"**failed**: {part['error']}"])
        for case in part["cases"]:
            found = part["found"].get(case, {})
            rows += [[name, *_cells(row)] for row in found.get("rows", [])]
            if "error" in found:
                rows.append([name, case, *[""] * 5, f"**failed**: {found['error']}"])
            elif "seconds" not in found:
                rows.append([name, case, *[""] * 5, "not run yet"])
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)


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
