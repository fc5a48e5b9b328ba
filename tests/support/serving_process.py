"""A server as a process of its own."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.commands import start


@contextmanager
def process(memory: Path, *options: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """`memstore serve` as a process of its own, and where it answers."""
    words = ["serve", "--store", memory, "--port", "0", *options, "--json"]
    started = start(*words, fresh=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert started.stdout is not None
        yield started, json.loads(started.stdout.readline())["url"]
    finally:
        started.kill()
        started.wait()
