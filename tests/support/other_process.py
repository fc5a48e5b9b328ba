"""A process that a test talks to line by line."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

from support.paths import ROOT


@contextmanager
def other_process(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run code in a process of its own; it has `database`'s imports, `say` and `hear`."""
    prelude = """
        import os, sys
        from memstore.disk.lmdb.database import *
        from memstore.errors import *
        from memstore.disk.lmdb.transaction import *
        def say(*words): print(*words, flush=True)
        def hear(): return sys.stdin.readline().strip()
    """
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(prelude) + textwrap.dedent(code),
            *map(str, arguments),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def hear(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline().strip()


def say(process: subprocess.Popen[str], word: str = "go") -> None:
    process.stdin.write(word + "\n")
    process.stdin.flush()
