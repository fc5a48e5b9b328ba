"""How the heads of a record are encoded: lossless (`raw`, `zstd`) or quantised (`int8`, `int4`; in
old memories also under zstd).
"""

import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import zstandard

from memstore.disk.format.lossless import Raw, Shuffled
from memstore.disk.format.quantised import Quantised
from memstore.errors import InvalidConfig


class Codec(Protocol):
    """How the units of a record are stored.

    A codec sees a head's K and V together and apart, the KV dtype's name, and through the arrays
    the shape, content alone. The same bits in are the same bytes out on every run,
    and decode to the same bits.
    """

    name: str
    lossless: bool

    def encode(self, units: np.ndarray, dtype: str) -> Sequence[bytes | memoryview]:
        """Encode units [n, 2, length, head_dim] of raw bits (K is [:, 0], V is [:, 1]), each by
        itself.
        """
        ...

    def decode(
        self, payload: bytes | memoryview, k: np.ndarray, v: np.ndarray, dtype: str, length: int
    ) -> None:
        """Decode one head's payload of `length` rows into k and v, contiguous [block_size,
        head_dim] of raw bits; the rows after them become zero.

        Raises ValueError if the payload does not decode to exactly that many values.
        """
        ...

    def head_bytes(self, rows: int, dim: int, itemsize: int) -> int:
        """Bytes that a head of so many rows takes at most (unless its values call for being stored
        as they are).
        """
        ...


class Zstd:
    """What another codec encodes, compressed."""

    level = 1

    def __init__(self, name: str, inner: Codec) -> None:
        self.name, self.lossless = name, inner.lossless
        self._inner = inner
        self._local = threading.local()  # neither object may be used by two threads at once

    def encode(self, units: np.ndarray, dtype: str) -> list[bytes]:
        compressor = getattr(self._local, "compressor", None)
        if compressor is None:
            compressor = self._local.compressor = zstandard.ZstdCompressor(level=self.level)
        return [compressor.compress(payload) for payload in self._inner.encode(units, dtype)]

    def decode(
        self, payload: bytes | memoryview, k: np.ndarray, v: np.ndarray, dtype: str, length: int
    ) -> None:
        decompressor = getattr(self._local, "decompressor", None)
        if decompressor is None:
            decompressor = self._local.decompressor = zstandard.ZstdDecompressor()
        most = 2 * k[:length].nbytes
        try:
            # zstandard makes room for what a frame declares, whatever the limit
            declared = zstandard.frame_content_size(payload)
            if declared > most:
                raise ValueError(f"{declared} bytes are declared, of {most} at most")
            inner = decompressor.decompress(payload, max_output_size=most)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from error
        self._inner.decode(inner, k, v, dtype, length)

    def head_bytes(self, rows: int, dim: int, itemsize: int) -> int:
        return self._inner.head_bytes(rows, dim, itemsize)


_ALL: tuple[Codec, ...] = (
    Raw(),
    Zstd("zstd", Shuffled()),
    Quantised(8),
    Quantised(4),
    Zstd("int8+zstd", Quantised(8)),
    Zstd("int4+zstd", Quantised(4)),
)
CODECS: dict[str, Codec] = {codec.name: codec for codec in _ALL}


# Of old memories: behind either, zstd gains nothing, since the codes use 7.8 of every 8 bits.
_RETIRED = {"int8+zstd": "int8", "int4+zstd": "int4"}
NEW_CODECS = tuple(name for name in CODECS if name not in _RETIRED)


def codec_for_new(name: str) -> Codec:
    """The codec of a new memory. Raises InvalidConfig."""
    if name in _RETIRED:
        raise InvalidConfig(
            f"codec {name!r} is only read, in old memories; choose {_RETIRED[name]}, which is as "
            "small"
        )
    if name not in NEW_CODECS:
        raise InvalidConfig(f"codec {name!r} is unknown; choose one of {', '.join(NEW_CODECS)}")
    return CODECS[name]


def get_codec(name: str) -> Codec:
    """A codec by name. Raises InvalidConfig, which lists the names there are."""
    if name not in CODECS:
        raise InvalidConfig(f"codec {name!r} is unknown; choose one of {', '.join(CODECS)}")
    return CODECS[name]
