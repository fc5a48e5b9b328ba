"""A server as a process of its own."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.commands import start

BRIEF = """
from dataclasses import dataclass
from memstore.serve import settings
@dataclass(frozen=True)
class Brief(settings.ServeSettings):
    grace: settings.Seconds = 1.0
settings.ServeSettings = Brief
from memstore.__main__ import main
main()
"""


@contextmanager
def process(
    memory: Path, *options: str, brief: bool = False
) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """`memstore serve` as a process of its own, and where it answers. brief: answers have a second
    when it is told to stop.
    """
    words = ["serve", "--store", memory, "--port", "0", *options, "--json"]
    program = ("-c", BRIEF) if brief else ("-m", "memstore")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = start(*words, fresh=True, program=program, **pipes)
    try:
        assert started.stdout is not None
        yield started, json.loads(started.stdout.readline())["url"]
    finally:
        started.kill()
        started.wait()
