"""A worker: a process that computes passages for the one that reads a document in, as that one sees
it; and what they say to each other, over pipes: a length, and as many bytes of MessagePack.
"""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, NoReturn, Self, TypeVar

import msgspec
import torch
from torch import Tensor

from memstore import errors
from memstore.child import python_command
from memstore.disk.files import occupy_standard_streams
from memstore.errors import MemstoreError
from memstore.model.passages.passage_encoding import Computed

_LENGTH = 8  # bytes, little-endian


class Asked(msgspec.Struct, array_like=True):
    """Passages (ids) to be computed, through the first layers only or (None) through all."""

    passages: list[list[int]]
    layers: int | None


class _Array(msgspec.Struct, array_like=True):
    dtype: str
    shape: list[int]
    data: memoryview

    @classmethod
    def of(cls, x: Tensor) -> Self:
        data = x.contiguous().view(-1).view(torch.uint8).numpy().data
        return cls(str(x.dtype).removeprefix("torch."), list(x.shape), data)

    @property
    def tensor(self) -> Tensor:
        dtype: torch.dtype = getattr(torch, self.dtype)
        if not self.data.nbytes:
            return torch.empty(self.shape, dtype=dtype)
        whole = torch.frombuffer(self.data, dtype=torch.uint8).clone()  # where numbers may begin
        return whole.view(dtype).view(self.shape)


class Told(msgspec.Struct, array_like=True):
    """Of every passage its keys, its values and its landmarks, if there are some; or what ended the
    worker: the name of a MemstoreError, "" for what is none, and what it says.
    """

    passages: list[tuple[_Array, _Array, _Array | None]] = []
    error: tuple[str, str] | None = None

    @classmethod
    def of(cls, computed: Sequence[Computed]) -> Self:
        """What was computed."""
        return cls(
            [
                (_Array.of(k), _Array.of(v), None if found is None else _Array.of(found))
                for k, v, found in computed
            ]
        )

    @property
    def computed(self) -> list[Computed]:
        """The same again."""
        return [
            Computed(k.tensor, v.tensor, None if found is None else found.tensor)
            for k, v, found in self.passages
        ]


Message = TypeVar("Message", Asked, Told)


def send(pipe: IO[bytes], message: Asked | Told) -> None:
    """Raises OSError."""
    data = msgspec.msgpack.encode(message)
    pipe.write(len(data).to_bytes(_LENGTH, "little"))
    pipe.write(data)
    pipe.flush()


def receive(pipe: IO[bytes], kind: type[Message]) -> Message:
    """The next message. Raises EOFError where the pipe ends."""
    length = pipe.read(_LENGTH)
    size = int.from_bytes(length, "little")
    data = bytearray(pipe.read(size))  # which torch may take for its own
    if len(length) < _LENGTH or len(data) < size:
        raise EOFError
    return msgspec.msgpack.decode(data, type=kind)


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
