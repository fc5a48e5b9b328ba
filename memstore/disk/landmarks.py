"""Landmark keys as they are stored: runs of consecutive blocks, that say what they are.

A value is a header (msgpack: kind, dtype, shape of one key, keys a block) and the keys'
raw bits; in format 1, whose keys are a byte shorter, the raw bits alone.
"""

from typing import Any, NamedTuple

import msgpack
import msgspec
import numpy as np

from memstore.block import Geometry
from memstore.decode import Positive, typed
from memstore.disk.keys import read_landmarks_key
from memstore.errors import CorruptMemory

# blocks whose landmark keys share one value: few values to open, little to write again at a commit
LANDMARK_RUN = 256

_MOST_HEADER = 1024  # bytes


class LandmarkRun(NamedTuple):
    """Landmark keys of consecutive blocks of one document and layer."""

    document: int
    layer: int
    first_block: int
    keys: np.ndarray  # raw bits [n * per_block, num_kv_heads, head_dim]
    per_block: int = 1

    @property
    def blocks(self) -> int:
        """How many blocks the keys are of."""
        return len(self.keys) // self.per_block


def encode_run(keys: np.ndarray, per_block: int, geometry: Geometry) -> bytes:
    """The value of a run; keys: raw bits [n * per_block, num_kv_heads, head_dim]."""
    header: bytes = msgpack.packb(_header(geometry, per_block))
    return header + keys.tobytes()


def decode_run(key: bytes, value: bytes, geometry: Geometry) -> LandmarkRun:
    """The landmark keys of an entry; a copy. Raises CorruptMemory, also for what is none of this
    geometry.
    """
    heads, dim, itemsize = geometry.num_kv_heads, geometry.head_dim, geometry.itemsize
    document, layer, first_block, old = read_landmarks_key(key)
    start, per_block = 0, 1
    what = f"document {document}, layer {layer}, block {first_block}"
    if not old:
        try:
            unpacker = msgpack.Unpacker(max_buffer_size=_MOST_HEADER, max_array_len=8)
            unpacker.feed(value[:_MOST_HEADER])
            values, start = unpacker.unpack(), unpacker.tell()
            header = typed(values, _Header)
        except (ValueError, msgpack.UnpackException) as error:
            raise CorruptMemory(
                f"{what}: no landmark keys ({error}); update memstore, or run verify"
            ) from error
        per_block = header.per_block
        if values != _header(geometry, per_block):
            raise CorruptMemory(
                f"{what}: expected landmark keys {geometry.dtype} {[heads, dim]}, found "
                f"{values}; update memstore, or run verify"
            )
    size = len(value) - start
    if not size or size % (per_block * heads * dim * itemsize):
        raise CorruptMemory(f"landmark keys of {what} have an impossible length; run verify")
    keys = np.frombuffer(value, f"<i{itemsize}", offset=start).reshape(-1, heads, dim)
    return LandmarkRun(document, layer, first_block, keys, per_block)


class _Header(msgspec.Struct):
    kind: str
    dtype: str
    shape: tuple[int, int]
    per_block: Positive


def _header(geometry: Geometry, per_block: int) -> dict[str, Any]:
    shape = [geometry.num_kv_heads, geometry.head_dim]
    return {"kind": "landmark", "dtype": geometry.dtype, "shape": shape, "per_block": per_block}
