"""What a run of blocks says of itself before its numbers: a msgpack map of its kind, of a
selector's its digest, and how many numbers follow.
"""

from typing import Any

import msgpack
import msgspec

from memstore.block import Geometry
from memstore.decode import Count, Positive
from memstore.disk.format.index_spec import IndexSpec

_MOST_HEADER = 1024  # bytes


class TokenHeader(msgspec.Struct):
    """Of token landmarks, as it is read."""

    kind: str
    digest: str
    dtype: str
    shape: tuple[int, int]
    blocks: Positive
    tokens: Positive


class WordHeader(msgspec.Struct):
    """Of words, as it is read."""

    kind: str
    digest: str
    blocks: Positive
    words: Count


def key_header(geometry: Geometry) -> dict[str, Any]:
    """What a run of landmark keys says of itself."""
    shape = [geometry.num_kv_heads, geometry.head_dim]
    return {"kind": "landmark", "dtype": geometry.dtype, "shape": shape}


def token_header(form: IndexSpec, blocks: int, tokens: int) -> dict[str, Any]:
    """What a run of token landmarks says of itself."""
    shape = [form.heads, form.width]
    told = {"kind": "token", "digest": form.digest, "dtype": form.dtype, "shape": shape}
    return {**told, "blocks": blocks, "tokens": tokens}


def word_header(form: IndexSpec, blocks: int, words: int) -> dict[str, Any]:
    """What a run of words says of itself."""
    return {"kind": "words", "digest": form.digest, "blocks": blocks, "words": words}


def read_header(value: bytes) -> tuple[Any, int]:
    """The header of a run's value as it is, and where the numbers begin. Raises ValueError."""
    try:
        unpacker = msgpack.Unpacker(max_buffer_size=_MOST_HEADER, max_array_len=8, max_map_len=8)
        unpacker.feed(value[:_MOST_HEADER])
        return unpacker.unpack(), unpacker.tell()
    except msgpack.UnpackException as error:
        raise ValueError(f"its header is not understood: {error}") from error


def expect(told: Any, expected: dict[str, Any]) -> None:
    """Raises ValueError for a header that is another."""
    if told != expected:
        raise ValueError(f"expected {expected}, found {told}; update memstore, or run verify")
