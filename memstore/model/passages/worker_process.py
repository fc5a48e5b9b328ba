"""A worker: a process that computes passages for the one that reads a document in, as that one sees
it.
"""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from memstore import errors
from memstore.child import python_command
from memstore.disk.files import occupy_standard_streams
from memstore.errors import MemstoreError
from memstore.model.passages.passage_records import Computed
from memstore.model.passages.worker_messages import Asked, Told, receive, send


class Worker:
    """One such process; it ends with this one, however that comes."""

    def __init__(self, command: Sequence[str]) -> None:
        """command: a module that answers Asked by Told, after an empty one as soon as it can; and
        its arguments. Raises OSError.
        """
        occupy_standard_streams()
        self._process = subprocess.Popen(
            python_command(*command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,  # what interrupts this process is not for it
        )

    def wait(self) -> None:
        """Until it can be asked. Raises as `compute` does."""
        self._told()

    def compute(self, passages: Sequence[Sequence[int]], layers: int | None) -> list[Computed]:
        """What is stored of passages (ids) of a forward pass; layers: as in `encode`.

        Raises the MemstoreError that computing them raised, MemstoreError for a process that ended.
        """
        assert self._process.stdin is not None
        try:
            send(self._process.stdin, Asked([list(ids) for ids in passages], layers))
        except OSError:
            self._lost()
        return self._told().computed

    def _told(self) -> Told:
        assert self._process.stdout is not None
        try:
            told = receive(self._process.stdout, Told)
        except EOFError:
            self._lost()
        if told.error is None:
            return told
        name, message = told.error
        if not name:
            raise _failure(f"failed ({message})")
        kind = getattr(errors, name)
        assert issubclass(kind, MemstoreError)
        raise kind(message)

    def _lost(self) -> NoReturn:
        status = self._process.wait()
        raise _failure(f"was ended by signal {-status}" if status < 0 else "did not start")

    def end(self) -> None:
        """Whatever it does."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Let go of what is held of one that has ended."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # what it was not told is of no use
                pipe.close()


def _failure(how: str) -> MemstoreError:
    return MemstoreError(
        f"a worker process {how}; what was read is kept, and the same ingest goes on from there; "
        "fewer workers take less memory"
    )
