"""What a process that reads a document in and its workers say to each other, over pipes: a length,
and as many bytes of MessagePack.
"""

from collections.abc import Sequence
from typing import IO, Self, TypeVar

import msgspec
import torch
from torch import Tensor

from memstore.model.passages.passage_records import Computed

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
