"""The process that a demonstration asks, forked from the one that has read."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from memstore.__main__ import main as command_line
from memstore.cli import demo
from support.forked import forked


@contextmanager
def forked_questions() -> Iterator[None]:
    """Demonstrations meanwhile ask a fork that has imported everything, and opened nothing."""

    def run(
        command: Sequence[str], *, input: str, check: bool, **options: Any
    ) -> "subprocess.CompletedProcess[str]":
        words = command[command.index("memstore") :]
        process = forked(command_line, words, stdin=subprocess.PIPE, **options)
        out, _ = process.communicate(input)
        return subprocess.CompletedProcess(command, process.returncode, out)

    begun = SimpleNamespace(**{**vars(subprocess), "run": run})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "subprocess", begun)
        yield
