"""A server as a process of its own: Python anew, or a fork of one that has imported everything."""

import json
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from support.commands import start
from support.fork_server import ForkServer

_COMMAND = """
import os, sys
from memstore.__main__ import main
sys.argv = ["memstore", *arguments]
try:
    main()
except SystemExit as end:
    os._exit(end.code)
"""


@contextmanager
def process(memory: Path | str, *options: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """`memstore serve` as a process of its own, and where it answers."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = start(*_serve(memory, options), fresh=True, **streams)
    try:
        assert started.stdout is not None
        yield started, json.loads(started.stdout.readline())["url"]
    finally:
        started.kill()
        started.wait()


def begin(children: ForkServer, said: Path, memory: Path | str, *options: str) -> tuple[int, str]:
    """Begin `memstore serve` as a job of `children`, to be ended there; its pid and where it
    answers. said: a file for what it prints.
    """
    children.imports("support.serving")
    pid = children.start("python_job", said, _COMMAND, *_serve(memory, options))
    while not (said.exists() and said.read_text().endswith("\n")):
        time.sleep(0.02)
    return pid, json.loads(said.read_text())["url"]


def _serve(memory: Path | str, options: Iterable[str]) -> list[str]:
    return ["serve", "--store", str(memory), "--port", "0", *options, "--json"]
