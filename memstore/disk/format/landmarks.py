"""Landmark keys as they are stored: runs of consecutive blocks, that say what they are.

A value is a header (msgpack: kind, dtype, shape of one key) and the keys' raw bits.
"""

from typing import Any, NamedTuple

import msgpack
import numpy as np

from memstore.block import Geometry
from memstore.disk.format.keys import read_landmarks_key
from memstore.errors import CorruptMemory

# blocks whose landmark keys share one value: few values to open, little to write again at a commit
LANDMARK_RUN = 256

_MOST_HEADER = 1024  # bytes


class LandmarkRun(NamedTuple):
    """Landmark keys of consecutive blocks of one document and layer."""

    document: int
    layer: int
    first_block: int
    keys: np.ndarray  # raw bits [blocks, num_kv_heads, head_dim]

    @property
    def end_block(self) -> int:
        """The block that follows."""
        return self.first_block + len(self.keys)


def encode_run(keys: np.ndarray, geometry: Geometry) -> bytes:
    """The value of a run; keys: raw bits [blocks, num_kv_heads, head_dim]."""
    header: bytes = msgpack.packb(_header(geometry))
    return header + keys.tobytes()


def decode_run(key: bytes, value: bytes, geometry: Geometry) -> LandmarkRun:
    """The landmark keys of an entry; a copy. Raises CorruptMemory, also for what is none of this
    geometry.
    """
    heads, dim, itemsize = geometry.num_kv_heads, geometry.head_dim, geometry.itemsize
    document, layer, first_block = read_landmarks_key(key)
    what = f"document {document}, layer {layer}, block {first_block}"
    try:
        unpacker = msgpack.Unpacker(max_buffer_size=_MOST_HEADER, max_array_len=8)
        unpacker.feed(value[:_MOST_HEADER])
        header, start = unpacker.unpack(), unpacker.tell()
    except (ValueError, msgpack.UnpackException) as error:
        raise CorruptMemory(
            f"{what}: no landmark keys ({error}); update memstore, or run verify"
        ) from error
    if header != _header(geometry):
        raise CorruptMemory(
            f"{what}: expected landmark keys {geometry.dtype} {[heads, dim]}, found {header}; "
            "update memstore, or run verify"
        )
    size = len(value) - start
    if not size or size % (heads * dim * itemsize):
        raise CorruptMemory(f"landmark keys of {what} have an impossible length; run verify")
    keys = np.frombuffer(value, f"<i{itemsize}", offset=start).reshape(-1, heads, dim)
    return LandmarkRun(document, layer, first_block, keys)


def _header(geometry: Geometry) -> dict[str, Any]:
    shape = [geometry.num_kv_heads, geometry.head_dim]
    return {"kind": "landmark", "dtype": geometry.dtype, "shape": shape}
