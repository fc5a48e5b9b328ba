"""The words of blocks: which there are in each, and how often."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple, Self

import numpy as np

from memstore.errors import InvalidInput

Words = Iterable[tuple[int, int]]
"""The distinct words of a block: (32-bit hash, how often)."""

_MOST = 0xFFFF  # times that a word may be in a block


class BlockWords(NamedTuple):
    """The words of consecutive blocks, those of a block in order of their hashes."""

    sizes: np.ndarray  # uint32 [blocks]: distinct words of each
    hashes: np.ndarray  # uint32 [all of them]
    counts: np.ndarray  # uint16 [all of them]: 1 ..

    @classmethod
    def of(cls, blocks: Sequence[Words]) -> Self:
        """The words that are told block by block. Raises InvalidInput for a hash, or a count, that
        is none, and for a word told twice.
        """
        each = [sorted(words) for words in blocks]
        flat = np.array(list(chain.from_iterable(each)), dtype=np.int64).reshape(-1, 2)
        sizes = np.array([len(words) for words in each], dtype=np.uint32)
        hashes, counts = flat[:, 0], flat[:, 1]
        if len(flat) and not (
            0 <= hashes.min() <= hashes.max() < 1 << 32
            and 1 <= counts.min() <= counts.max() <= _MOST
        ):
            raise InvalidInput(
                f"words of a block are (32-bit hash, count from 1 to {_MOST}); got others"
            )
        words = cls(sizes, hashes.astype(np.uint32), counts.astype(np.uint16))
        if not words.in_order:
            raise InvalidInput("a word of a block is told twice; count it once")
        return words

    @classmethod
    def none(cls) -> Self:
        """Of no blocks."""
        return cls(np.zeros(0, np.uint32), np.zeros(0, np.uint32), np.zeros(0, np.uint16))

    @classmethod
    def joined(cls, parts: "Sequence[BlockWords]") -> Self:
        """The words of several runs of blocks, one after the other."""
        return cls(*(np.concatenate(column) for column in zip(cls.none(), *parts)))

    @property
    def in_order(self) -> bool:
        """Do the hashes of every block ascend?"""
        block = np.repeat(np.arange(len(self.sizes), dtype=np.uint64), self.sizes)
        key = block << np.uint64(32) | self.hashes
        return bool((key[1:] > key[:-1]).all())

    def cut(self, first: int, end: int) -> "BlockWords":
        """The words of blocks first .. end of these."""
        ends = np.cumsum(self.sizes, dtype=np.int64)
        low = int(ends[first - 1]) if first else 0
        high = int(ends[end - 1]) if end > first else low
        return BlockWords(self.sizes[first:end], self.hashes[low:high], self.counts[low:high])
