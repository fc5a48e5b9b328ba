"""What a part of the GPU benchmark is, the process that runs its cases and records their rows, and
what has been done and found: a JSON file that is whole at any time, and its table.

A part is a module of this folder with `cases(setting)`: named cases, each a call that yields rows.
A case that fails is recorded with its error and stops no other. An error that leaves the device
unusable ends the process, and the command begins a new one with the next case.
"""

import gc
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.tables import table

if TYPE_CHECKING:
    import torch

    from benchmarks.gpu.meter import Meter


_HEAD = ["part", "what", "by", "ms", "TFLOP/s", "GB/s", "of the rates", "note"]


@dataclass(frozen=True)
class Row:
    """One line of the table. seconds: a median; operations, bytes: that the work needs at least, of
    bytes `up` from main memory; right: of a check, whether it passed; note: what else was found.
    """

    what: str
    by: str = ""
    seconds: float | None = None
    operations: float = 0
    bytes: float = 0
    up: bool = False
    right: bool | None = None
    note: str = ""
    floor: float | None = None  # seconds, where bytes and operations alone do not say it


Case = tuple[str, Callable[[], Iterable[Row]]]


@dataclass
class Setting:
    """Where a part runs, and how large it is there.

    tiny: it takes seconds on a CPU, in Triton's interpreter, and its numbers mean nothing.
    """

    device: str
    tiny: bool
    seed: int = 0

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")

    @cached_property
    def place(self) -> "torch.device":
        import torch

        return torch.device(self.device)

    @cached_property
    def meter(self) -> "Meter":
        """What times, made when it is first asked for."""
        from benchmarks.gpu.meter import Meter

        return Meter(1 if self.tiny else 20, self.device, small=self.tiny)


def prepare(setting: Setting) -> None:
    """What every process imports and sets first; without CUDA, Triton's kernels run on the CPU."""
    if not setting.cuda and find_spec("triton") is not None:
        tests = str(Path(__file__).parents[2] / "tests")
        if tests not in sys.path:
            sys.path.append(tests)
        import_module("support.triton_interpreter")
    import torch

    torch.manual_seed(setting.seed)
    torch.set_num_threads(1 if setting.tiny else min(16, os.cpu_count() or 1))


def work(name: str, setting: Setting, directory: Path) -> None:
    """Run the cases of a part that are left, in a process of its own that only this one's end, or
    the parent's, ends.
    """
    os.setpgrp()  # so that what this process starts can be ended with it
    file = os.open(directory / "gpu.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1), os.dup2(file, 2)
    # of a fork they may be its parent's, and go elsewhere
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    from benchmarks.common.timing import end_with_parent

    end_with_parent()
    prepare(setting)
    state = State(directory)
    part = state.part(name)
    state.content["machines"][-1] |= _machine(setting)
    cases = dict(import_module(f"benchmarks.gpu.{name}").cases(setting))
    part["cases"] = list(cases)
    for case in state.left(name) or []:
        print(f"\n== {name}: {case}", flush=True)
        found: dict[str, Any] = {"rows": []}
        part["found"][case] = found
        state.save()
        began = time.perf_counter()
        try:
            for row in cases[case]():
                found["rows"].append(_plain(row, setting))
                state.save()
        except Exception as error:
            traceback.print_exc()
            found["error"] = _line(error)
        found["seconds"] = time.perf_counter() - began
        if "meter" in vars(setting):
            meter = setting.meter
            part["rates"] = {"bytes": meter.stream, "operations": meter.products, "up": meter.load}
        state.save()
        if not _usable(setting):
            os._exit(1)


def _machine(setting: Setting) -> dict[str, Any]:
    import torch

    found = {"device": "cpu", "python": platform.python_version(), "torch": str(torch.__version__)}
    if setting.cuda:
        of = torch.cuda.get_device_properties(setting.device)
        found["device"] = f"{of.name}, {of.multi_processor_count} processors"
        found["bytes"] = f"{of.total_memory:,}"
        found["cuda"] = str(torch.version.cuda)
    for name in ("triton", "transformers", "flash-attn"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def _plain(row: Row, setting: Setting) -> dict[str, Any]:
    """A row as JSON has it, with its share of the device's measured rates."""
    plain = {name: value for name, value in vars(row).items() if value}
    if row.right is not None:
        plain["right"] = row.right
    floor = row.floor
    if row.seconds and not floor and (row.operations or row.bytes):
        floor = setting.meter.floor(row.bytes, row.operations, up=row.up)
    if row.seconds and floor:
        plain["of_peak"] = floor / row.seconds
    return plain


def _usable(setting: Setting) -> bool:
    """Let the next case begin with an empty device; False if it answers no more."""
    gc.collect()
    if not setting.cuda:
        return True
    import torch

    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception as error:
        print(f"the device is unusable now: {_line(error)}", flush=True)
        return False
    return True


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


# What has been found


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
        """Unfinished cases of a part; None before its cases are known."""
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
    rows: list[list[str]] = []
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
    return table(_HEAD, [[cell.replace("|", "/") for cell in row] for row in rows])


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
