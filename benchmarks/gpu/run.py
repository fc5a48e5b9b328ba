"""Runs parts one after the other, each in a process of its own, within the time of one call; what a
call does not reach, the next one does.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import Setting, work
from benchmarks.gpu.state import State

START = 150.0  # seconds that a process may take until its first case
LEAST = 15.0  # seconds of a call in which something is still begun


@dataclass(frozen=True)
class Part:
    """A module; seconds that it and one case of it may take, over all calls."""

    module: str
    about: str
    seconds: float
    case_seconds: float


def _parts(**parts: tuple[str, float, float]) -> dict[str, Part]:
    return {name: Part(f"benchmarks.gpu.{name}", *rest) for name, rest in parts.items()}


# What is worth most comes first: a call may be the last.
PARTS = _parts(
    rates=("what the device does at most", 60, 40),
    correct=("kernels against their references", 270, 80),
    softmax=("grouped softmax beside SDPA, FlashAttention, Flex", 360, 150),
    retrieval=("search, attention to blocks, gathering", 150, 60),
    tiers=("device and page-locked tiers", 160, 90),
    train=("training steps", 200, 90),
    readers=("Hugging Face decoders: decoding", 320, 180),
    decode=("decoding steps of the landmark model", 450, 200),
    index=("FAISS beside the exact search", 200, 100),
    suite=("this repository's own tests on the device", 450, 240),
)


class Run:
    """A call: some parts, until its time is over."""

    def __init__(
        self, state: State, setting: Setting, seconds: float, log: Path, *, patience: float = 1.0
    ) -> None:
        """seconds: of the call. patience: by how much parts and cases may take longer."""
        self.state, self.setting, self.log, self.patience = state, setting, log, patience
        self.ends = time.monotonic() + seconds
        # a process that has CUDA may not be forked; without, forks spare the imports
        forking = "fork" if "torch" in sys.modules else "forkserver"
        self._context: Any = multiprocessing.get_context("spawn" if setting.cuda else forking)
        every = ["benchmarks.gpu.interpreter", "torch", "torch._dynamo", "benchmarks.gpu.part"]
        if self._context.get_start_method() == "forkserver":
            self._context.set_forkserver_preload(every)
        elif not setting.cuda:
            for name in every:
                import_module(name)

    def parts(self, names: Sequence[str]) -> None:
        """One after the other, those that are not done."""
        for name in names:
            while self.state.left(name) != [] and self._time(name) > 0:
                if time.monotonic() + LEAST > self.ends:
                    print(f"no time left for {name}: the next call goes on from here", flush=True)
                    return
                self._process(name)
            self._overdue(name)

    def _time(self, name: str) -> float:
        return self.patience * PARTS[name].seconds - float(self.state.part(name)["seconds"])

    def _overdue(self, name: str) -> None:
        """Say of the cases that a part has no time for that it has none."""
        for case in self.state.left(name) or []:
            error = f"no time left of the part's {PARTS[name].seconds:.0f} s"
            self.state.part(name)["found"].setdefault(case, {}).update(seconds=0.0, error=error)
        self.state.save()

    def _process(self, name: str) -> None:
        """One process of a part: until it ends, or takes too long."""
        part, kept = PARTS[name], self.state.part(name)
        left = self.state.left(name)
        done = [] if left is None else [case for case in kept["cases"] if case not in left]
        print(f"{name}: {part.about} ...", flush=True)
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=work, args=(part.module, self.setting, done, theirs, self.log)
        )
        began, spent = time.monotonic(), float(kept["seconds"])
        process.start()
        theirs.close()
        case: str | None = None
        why = "interrupted"
        try:
            case, why = self._listen(ours, name, began)
        finally:
            _end(process, 0 if why else 2)  # one that has told everything is about to end
        kept["seconds"] = spent + time.monotonic() - began
        if why == "call":
            print(f"{name}: stopped; the next call goes on from here", flush=True)
        elif case is not None:  # it ended inside a case
            why = why or f"the process ended by itself ({process.exitcode}); {_last(self.log)}"
            found = kept["found"].setdefault(case, {"rows": []})
            found |= {"seconds": time.monotonic() - began, "error": why}
            print(f"{name}: {case}: {why}", flush=True)
        elif self.state.left(name) is None or (process.exitcode and len(done) == _ended(kept)):
            kept["error"] = why or f"it did not begin; {_last(self.log)}"
            print(f"{name}: {kept['error']}", flush=True)
        self.state.save()

    def _listen(self, ours: Connection, name: str, began: float) -> tuple[str | None, str]:
        """Take what a process tells; returns the case under way when it ended or was out of time,
        and why: "call" for the call's time.
        """
        part, kept = PARTS[name], self.state.part(name)
        spent = float(kept["seconds"])
        overall = began + self.patience * part.seconds - spent
        limit, case = began + self.patience * START, None
        while True:
            until = min(limit, overall, self.ends)
            if not ours.poll(max(0.0, until - time.monotonic())):
                if until == self.ends:
                    return case, "call"
                if until == overall:
                    return case, f"the part took longer than its {part.seconds:.0f} s"
                return case, f"took longer than {part.case_seconds if case else START:.0f} s"
            try:
                kind, *told = ours.recv()
            except EOFError:
                return case, ""
            kept["seconds"] = spent + time.monotonic() - began
            if kind == "machine":
                self.state.content["machines"][-1] |= told[0]
            elif kind == "cases":
                kept["cases"] = told[0]
            elif kind == "begin":
                case = told[0]
                limit = time.monotonic() + self.patience * part.case_seconds
                kept["found"][case] = {"rows": []}
            elif kind == "row":
                kept["found"][case]["rows"].append(told[0])
            elif kind == "rates":
                kept["rates"] = told[0]
            elif kind == "end":
                kept["found"][case]["seconds"] = told[0]
                if told[1] is not None:
                    kept["found"][case]["error"] = told[1]
                    print(f"{name}: {case}: {told[1]}", flush=True)
                case, limit = None, time.monotonic() + self.patience * START
            self.state.save()


def _ended(kept: dict[str, Any]) -> int:
    return sum("seconds" in found for found in kept["found"].values())


def _end(process: Any, patience: float) -> None:
    """End a process, and what it started. patience: seconds that it may take to end by itself."""
    process.join(patience if process.is_alive() else None)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _last(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1][:300] if lines else "it said nothing"
