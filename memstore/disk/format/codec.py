"""The codecs of a memory's records by name: lossless (`raw`, `zstd`) or quantised (`int8`)."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from memstore.disk.format.lossless import Raw, Zstd
from memstore.disk.format.quantised import Int8
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
        """The most bytes that a head of so many rows takes, unless its values have to be stored
        unencoded.
        """
        ...


_ALL: tuple[Codec, ...] = (Raw(), Zstd(), Int8())
CODECS: dict[str, Codec] = {codec.name: codec for codec in _ALL}


def get_codec(name: str) -> Codec:
    """A codec by name. Raises InvalidConfig, which lists the names."""
    if name not in CODECS:
        raise InvalidConfig(f"codec {name!r} is unknown; choose one of {', '.join(CODECS)}")
    return CODECS[name]
