"""A trace of lookups: what was asked for, what was predicted and what was missed, in a file that a
replay can read.

The file is zstd over msgpack: a header {"format", "unit_bytes"}, then one entry a lookup or
prediction: [kind, microseconds since the trace began, layer, documents, blocks, heads, missed], of
which the last four are lists with one number a unit; missed is empty for predictions and for
lookups without a miss. Units of several layers make several entries.
"""

import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgpack
import msgspec
import zstandard

from memstore.block import BlockKey
from memstore.decode import Block, Count, Layer, Positive, typed
from memstore.disk.files import check_outside_memories
from memstore.errors import InvalidInput
from memstore.paths import expanded

TRACE_FORMAT = 1
_LOOKUP, _PREDICTION = 0, 1
_MOST_ENTRY = 1 << 28  # bytes
_FLUSH = 1 << 16  # bytes between frames that a reader can decode


def check_trace(path: Path | str) -> None:
    """Can a new trace be written here? Raises InvalidInput (something lies there, or it is in a
    memory's directory), OSError.
    """
    path = expanded(path)
    check_outside_memories(path)
    if os.path.lexists(path):
        raise InvalidInput(f"{path} exists already; name a new file for the trace")
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


class TraceWriter:
    """Writes lookups and predictions as they come; may be used from several threads. A forked child
    writes nothing.

    A lookup is never lost to its trace: the first error of writing ends the trace, and `close`
    raises it, with the name of the file.
    """

    def __init__(self, path: Path | str, *, unit_bytes: int) -> None:
        """unit_bytes: of one unit in a slot. Raises as check_trace."""
        check_trace(path)
        self._pid, self._path = os.getpid(), path
        self._error: OSError | None = None
        # Unbuffered: nothing is left for a forked child to write a second time.
        self._file = open(expanded(path), "xb", buffering=0)  # noqa: SIM115 - open for as long as the trace is
        self._stream = zstandard.ZstdCompressor(level=9).stream_writer(self._file)
        self._pack = msgpack.Packer().pack
        self._lock = threading.Lock()
        self._began = time.perf_counter()
        self._pending = 0
        self._put(self._pack({"format": TRACE_FORMAT, "unit_bytes": unit_bytes}))

    def lookup(self, units: Sequence[BlockKey], missed: list[int]) -> None:
        """One lease: its units, and the places among them of those that were not there."""
        self._write(_LOOKUP, units, missed)

    def prediction(self, units: Sequence[BlockKey]) -> None:
        """Units that were predicted at this moment."""
        self._write(_PREDICTION, units, [])

    def _write(self, kind: int, units: Sequence[BlockKey], missed: list[int]) -> None:
        if not units or self._pid != os.getpid():
            return
        documents, layers, blocks, heads = zip(*units)
        if layers.count(layers[0]) < len(layers):  # an entry has one layer
            for layer in dict.fromkeys(layers):
                places = [place for place, other in enumerate(layers) if other == layer]
                among = [at for at, place in enumerate(places) if place in missed]
                self._write(kind, [units[place] for place in places], among)
            return
        micros = int((time.perf_counter() - self._began) * 1e6)
        self._put(self._pack([kind, micros, layers[0], documents, blocks, heads, missed]))

    def _put(self, data: bytes) -> None:
        with self._lock:
            if self._file.closed:
                return
            try:
                self._stream.write(data)
                self._pending += len(data)
                if self._pending > _FLUSH:
                    self._stream.flush(zstandard.FLUSH_BLOCK)
                    self._pending = 0
            except OSError as error:
                self._error = error
                self._file.close()

    def close(self) -> None:
        """End the file; idempotent. Raises the OSError that ended the trace early."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if not self._file.closed:
                try:
                    self._stream.close()  # closes the file too
                except OSError as error:
                    self._error = error
                finally:
                    self._file.close()
            failed, self._error = self._error, None
        if failed is not None:
            failed.filename = str(self._path)
            raise failed


@dataclass(frozen=True)
class TraceEntry:
    """One lookup, or one prediction."""

    is_lookup: bool
    seconds: float  # since the trace began
    units: list[BlockKey]
    missed: list[int] = field(default_factory=list)  # places in `units`


def read_trace(path: Path | str) -> Iterator[TraceEntry]:
    """The entries of a trace in order; a file that was cut short gives what it holds.

    Raises InvalidInput for a file that is no trace, or of a newer format.
    """
    with expanded(path).open("rb") as file:
        stream = zstandard.ZstdDecompressor().stream_reader(file, closefd=False)
        unpacker: Any = msgpack.Unpacker(stream, max_buffer_size=_MOST_ENTRY)
        try:
            header = typed(next(unpacker, None), _Header)
            if header.format != TRACE_FORMAT:
                raise ValueError("this version does not read its format")
            for values in unpacker:
                entry = typed(values, _Entry)
                units = [
                    BlockKey(d, entry.layer, b, h)
                    for d, b, h in zip(entry.documents, entry.blocks, entry.heads, strict=True)
                ]
                if not units or max(entry.missed, default=0) >= len(units):
                    raise ValueError("an entry misses units that it does not have")
                yield TraceEntry(entry.kind == _LOOKUP, entry.micros / 1e6, units, entry.missed)
        except (zstandard.ZstdError, ValueError, msgpack.UnpackException) as error:
            raise InvalidInput(f"{path} is no trace of lookups: {error}") from None


class _Header(msgspec.Struct):
    format: int
    unit_bytes: Positive


class _Entry(NamedTuple):
    kind: Literal[0, 1]
    micros: Count
    layer: Layer
    documents: list[int]
    blocks: list[Block]
    heads: list[Layer]
    missed: list[Count]
