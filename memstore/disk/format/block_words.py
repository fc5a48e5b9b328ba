"""Word counts of blocks in flat arrays: each block's distinct words (as hashes) and counts."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple, Self

import numpy as np

from memstore.errors import InvalidInput

Words = Iterable[tuple[int, int]]
"""The distinct words of a block: (32-bit hash, count)."""

_MAX_COUNT = 0xFFFF  # of one word in a block; counts are uint16


class BlockWords(NamedTuple):
    """The words of consecutive blocks, sorted by hash within each block."""

    sizes: np.ndarray  # uint32 [blocks]: distinct words per block
    hashes: np.ndarray  # uint32 [sum of sizes]
    counts: np.ndarray  # uint16 [sum of sizes]: at least 1

    @classmethod
    def of(cls, blocks: Sequence[Words]) -> Self:
        """Build from the words of each block. Raises InvalidInput for a hash or count out of range,
        and for a repeated word.
        """
        each = [sorted(words) for words in blocks]
        flat = np.array(list(chain.from_iterable(each)), dtype=np.int64).reshape(-1, 2)
        sizes = np.array([len(words) for words in each], dtype=np.uint32)
        hashes, counts = flat[:, 0], flat[:, 1]
        if len(flat) and not (
            0 <= hashes.min() <= hashes.max() < 1 << 32
            and 1 <= counts.min() <= counts.max() <= _MAX_COUNT
        ):
            raise InvalidInput(
                f"words of a block must be (32-bit hash, count from 1 to {_MAX_COUNT})"
            )
        words = cls(sizes, hashes.astype(np.uint32), counts.astype(np.uint16))
        if not words.in_order:
            raise InvalidInput("a word of a block is listed twice; list it once with its count")
        return words

    @property
    def in_order(self) -> bool:
        """Do the hashes of every block strictly ascend?"""
        block = np.repeat(np.arange(len(self.sizes), dtype=np.uint64), self.sizes)
        key = block << np.uint64(32) | self.hashes
        return bool((key[1:] > key[:-1]).all())
