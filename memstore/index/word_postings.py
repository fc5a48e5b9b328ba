"""Words of blocks in order of hash and row: in memory, or in a file that is mapped and checked
piece by piece as it is read.
"""

from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from memstore.errors import CorruptMemory

PIECE = 1 << 16  # postings under one checksum

_SHIFT = np.uint64(32)


class Postings(Protocol):
    """Where words are."""

    def find(self, word: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows uint32 that hold a word, ascending, and how often uint16."""


class HeldPostings(NamedTuple):
    """Postings in memory."""

    keys: np.ndarray  # uint64 [n], ascending: hash, row
    counts: np.ndarray  # uint16 [n]

    @classmethod
    def of(cls, keys: np.ndarray, counts: np.ndarray) -> "HeldPostings":
        """Of keys in any order."""
        order = np.argsort(keys)
        return cls(keys[order], counts[order])

    def find(self, word: int) -> tuple[np.ndarray, np.ndarray]:
        """See Postings."""
        low, high = np.searchsorted(self.keys, _bounds(word))
        return self.keys[low:high].astype(np.uint32), self.counts[low:high]

    def digests(self) -> np.ndarray:
        """The checksum of each piece, uint64 [pieces]."""
        pieces = range(0, len(self.keys), PIECE)
        return np.array(
            [_digest(self.keys[at : at + PIECE], self.counts[at : at + PIECE]) for at in pieces],
            np.uint64,
        )


class MappedPostings:
    """Postings in a mapped file. Safe for several threads."""

    def __init__(
        self, keys: np.ndarray, counts: np.ndarray, firsts: np.ndarray, digests: np.ndarray
    ) -> None:
        """keys, counts: as HeldPostings has them, mapped; firsts: uint64 [pieces], the first key of
        each piece; digests: HeldPostings.digests.
        """
        self.keys, self.counts = keys, counts
        self._firsts, self._digests = firsts, digests
        self._checked = np.zeros(len(digests), dtype=bool)

    def find(self, word: int) -> tuple[np.ndarray, np.ndarray]:
        """See Postings. Raises CorruptMemory for a damaged piece."""
        begin, end = _bounds(word)
        first = max(0, int(np.searchsorted(self._firsts, begin, "left")) - 1)
        last = int(np.searchsorted(self._firsts, end, "right"))
        keys, counts = self._pieces(first, last)
        low, high = np.searchsorted(keys, _bounds(word))
        return keys[low:high].astype(np.uint32), counts[low:high]

    def all(self) -> HeldPostings:
        """Everything, read into memory. Raises CorruptMemory."""
        keys, counts = self._pieces(0, len(self._digests))
        return HeldPostings(keys.copy(), counts.copy())

    def _pieces(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and counts of pieces first .. last - 1."""
        for piece in np.flatnonzero(~self._checked[first:last]) + first:
            some = slice(int(piece) * PIECE, (int(piece) + 1) * PIECE)
            if _digest(self.keys[some], self.counts[some]) != self._digests[piece]:
                raise CorruptMemory(
                    "the words in index/passages.lists are damaged; run `memstore index`"
                )
            self._checked[piece] = True
        return self.keys[first * PIECE : last * PIECE], self.counts[first * PIECE : last * PIECE]


def keys_of(hashes: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Keys of words, uint32 [n], in rows [n]."""
    keys: np.ndarray = hashes.astype(np.uint64) << _SHIFT | rows.astype(np.uint64)
    return keys


def _bounds(word: int) -> np.ndarray:
    """Between which keys those of a word lie."""
    first = np.uint64(word) << _SHIFT
    return np.array([first, first | np.uint64(0xFFFF_FFFF)], dtype=np.uint64)


def _digest(keys: np.ndarray, counts: np.ndarray) -> int:
    digest = xxhash.xxh3_64(np.ascontiguousarray(keys).data)
    digest.update(np.ascontiguousarray(counts).data)
    return digest.intdigest()
