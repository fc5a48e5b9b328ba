"""The tokens of a document whose blocks are of equal size, as they are stored: characters of the
document before a part (u64), then its ids (u32), little-endian.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class TokenPart(NamedTuple):
    """A run of a document's tokens as it was committed."""

    first: int  # number of the part's first token in the document
    char_start: int  # characters of the document before that token
    ids: np.ndarray  # int64 [n]


def encode_tokens(char_start: int, ids: Sequence[int] | np.ndarray) -> bytes:
    """The value of a part. char_start: characters of the document before its first token. ids:
    content tokens (no landmarks), each below 2**32.
    """
    return char_start.to_bytes(8, "little") + np.asarray(ids, dtype="<u4").tobytes()


def decode_tokens(first: int, value: bytes) -> TokenPart:
    """The tokens of a value. Raises ValueError for what is none."""
    if len(value) < 12 or len(value) % 4:
        raise ValueError(f"{len(value)} bytes are an impossible length")
    ids = np.frombuffer(value, dtype="<u4", offset=8).astype(np.int64)
    return TokenPart(first, int.from_bytes(value[:8], "little"), ids)


def equal_lengths(tokens: int, block_size: int) -> np.ndarray:
    """Tokens of each block, int64 [blocks], where blocks are full but for the last."""
    blocks = -(-tokens // block_size)
    lengths = np.full(blocks, block_size, dtype=np.int64)
    if blocks:
        lengths[-1] = tokens - (blocks - 1) * block_size
    return lengths
