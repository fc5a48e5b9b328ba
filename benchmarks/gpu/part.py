"""What a part of the GPU benchmark is, and the process that does its cases and tells what it found.

A part is a module of this folder with `cases(setting)`: named cases, each a call that yields rows.
A case that fails is told with its error and stops no other; an error that leaves the device
unusable ends the process, and the parent goes on with the next case in a new one.
"""

import gc
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from benchmarks.common.device_timing import Device

UNUSABLE = 3  # exit status: the device answers nothing any more


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
    """Where a part runs, and how large it is there. tiny: in seconds, on a CPU, in Triton's
    interpreter; what it measures then says nothing.
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
    def meter(self) -> "Device":
        """What times, made when it is first asked for."""
        from benchmarks.common.device_timing import Device

        return Device(1 if self.tiny else 20, self.device, small=self.tiny)


def work(module: str, setting: Setting, done: list[str], to_parent: Connection, log: Path) -> None:
    """Do the cases of a part that are not done, in a process of its own."""
    os.setpgrp()  # so that what this process starts can be ended with it
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1), os.dup2(file, 2)
    # of a fork they may be its parent's, and go elsewhere
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    _prepare(setting)
    from benchmarks.common.timing import end_with_parent

    end_with_parent()
    to_parent.send(("machine", _machine(setting)))
    cases = import_module(module).cases(setting)
    gc.freeze()  # what is imported stays: between cases nothing looks through it
    to_parent.send(("cases", [name for name, _ in cases]))
    for name, run in cases:
        if name in done:
            continue
        print(f"\n== {module}: {name}", flush=True)
        to_parent.send(("begin", name))
        began = time.perf_counter()
        failure = None
        try:
            for row in run():
                to_parent.send(("row", _told(row, setting)))
        except Exception as error:
            import traceback

            traceback.print_exc()
            failure = _line(error)
        usable = _tidied(setting)
        to_parent.send(("end", time.perf_counter() - began, failure))
        if not usable:
            os._exit(UNUSABLE)
    if "meter" in setting.__dict__:
        meter = setting.meter
        to_parent.send(
            ("rates", {"bytes": meter.stream, "operations": meter.products, "up": meter.load})
        )
    to_parent.close()


def _prepare(setting: Setting) -> None:
    if not setting.cuda:
        import_module("benchmarks.gpu.interpreter")
    import torch

    torch.manual_seed(setting.seed)
    torch.set_num_threads(1 if setting.tiny else min(16, os.cpu_count() or 1))
    if setting.cuda:
        torch.zeros(1, device=setting.device)  # or no case could say it better


def _machine(setting: Setting) -> dict[str, Any]:
    from importlib import metadata

    import torch

    # plain strings, or who reads them imports torch
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


def _told(row: Row, setting: Setting) -> dict[str, Any]:
    """A row as JSON has it, with what it comes to of the device's measured rates."""
    told = {name: value for name, value in vars(row).items() if value or name == "right"}
    if row.right is None:
        del told["right"]
    if row.seconds and row.floor:
        told["of_peak"] = row.floor / row.seconds
    elif row.seconds and (row.operations or row.bytes):
        floor = setting.meter.floor(row.bytes, row.operations, up=row.up)
        told["of_peak"] = floor / row.seconds
    return told


def _tidied(setting: Setting) -> bool:
    """Let the next case begin with an empty device; False where it answers no more."""
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
