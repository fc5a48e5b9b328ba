"""A server as a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.paths import ROOT


@contextmanager
def process(memory: Path | str, *options: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """`memstore serve` as a process of its own, and where it answers."""
    command = [sys.executable, "-m", "memstore", "serve", "--store", str(memory), "--port", "0"]
    started = subprocess.Popen(
        [*command, *options, "--grace", "2", "--json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert started.stdout is not None
        yield started, json.loads(started.stdout.readline())["url"]
    finally:
        started.kill()
        started.wait()
