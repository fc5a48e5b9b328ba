"""Words of blocks in order of hash and row: in memory, or in pieces that are read as they are asked
for.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from memstore.errors import CorruptMemory
from memstore.index.file_parts import StoredParts

PIECE = 1 << 16  # postings under one checksum
POSTING = 10  # bytes

_MOST_HELD = 128  # pieces, of .66 MB each
_SHIFT = np.uint64(32)


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
        """The rows uint32 that hold a word, ascending, and how often uint16."""
        low, high = np.searchsorted(self.keys, _bounds(word))
        return self.keys[low:high].astype(np.uint32), self.counts[low:high]

    @property
    def firsts(self) -> np.ndarray:
        """The first key of each piece, uint64."""
        return self.keys[::PIECE].copy()

    def pieces(self) -> Iterator[np.ndarray]:
        """What a file holds of them, uint8, piece by piece: keys, then counts."""
        for at in range(0, len(self.keys), PIECE):
            keys, counts = self.keys[at : at + PIECE], self.counts[at : at + PIECE]
            yield np.concatenate([keys.view(np.uint8), counts.view(np.uint8)])


class StoredPostings:
    """Postings in pieces that are read as they are asked for; those that were asked for last are
    held. Safe for several threads.
    """

    def __init__(self, stored: StoredParts, firsts: np.ndarray, rows: int) -> None:
        """stored: what HeldPostings.pieces are; firsts: uint64 [pieces], the first key of each;
        rows: how many there are.
        """
        self._stored, self._firsts, self._rows = stored, firsts, rows
        self._lock = threading.Lock()
        self._held: OrderedDict[int, HeldPostings] = OrderedDict()

    def find(self, word: int) -> tuple[np.ndarray, np.ndarray]:
        """As HeldPostings.find. Raises CorruptMemory, StoreUnavailable."""
        return self.find_each([word])[0]

    def bring(self, words: Iterable[int]) -> None:
        """Have what `find_each` of words needs. Raises as `find`."""
        self._read([piece for word in words for piece in self._pieces_of(word)])

    def find_each(self, words: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        """`find` of several words, for which all that is missing is read together."""
        among = [self._pieces_of(word) for word in words]
        pieces = self._read([piece for some in among for piece in some])
        return [
            _joined([pieces[piece].find(word) for piece in some])
            for word, some in zip(words, among)
        ]

    def _pieces_of(self, word: int) -> range:
        begin, end = _bounds(word)
        first = max(0, int(np.searchsorted(self._firsts, begin, "left")) - 1)
        return range(first, int(np.searchsorted(self._firsts, end, "right")))

    def _read(self, numbers: Iterable[int]) -> dict[int, HeldPostings]:
        """Pieces by number."""
        wanted = dict.fromkeys(numbers)
        with self._lock:
            found = {number: self._held[number] for number in wanted if number in self._held}
        missing = [number for number in wanted if number not in found]
        for number, content in zip(missing, self._stored.read(missing)):
            end = len(content) // 10 * 8
            found[number] = HeldPostings(content[:end].view("<u8"), content[end:].view("<u2"))
            if found[number].keys.astype(np.uint32).max() >= self._rows:
                raise CorruptMemory("words are of passages that there are not")
        with self._lock:
            for number in wanted:
                self._held[number] = found[number]
                self._held.move_to_end(number)
            while len(self._held) > _MOST_HELD:
                self._held.popitem(last=False)
        return found


def piece_bytes(postings: int) -> np.ndarray:
    """Bytes of the pieces of so many postings, int64."""
    begins = np.arange(0, postings, PIECE, dtype=np.int64)
    sizes: np.ndarray = POSTING * np.minimum(PIECE, postings - begins)
    return sizes


def keys_of(hashes: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Keys of words, uint32 [n], in rows [n]."""
    keys: np.ndarray = hashes.astype(np.uint64) << _SHIFT | rows.astype(np.uint64)
    return keys


def _bounds(word: int) -> np.ndarray:
    """Between which keys those of a word lie."""
    first = np.uint64(word) << _SHIFT
    return np.array([first, first | np.uint64(0xFFFF_FFFF)], dtype=np.uint64)


def _joined(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    if len(parts) == 1:
        return parts[0]
    rows = np.concatenate([np.zeros(0, np.uint32), *(rows for rows, _ in parts)])
    return rows, np.concatenate([np.zeros(0, np.uint16), *(counts for _, counts in parts)])
