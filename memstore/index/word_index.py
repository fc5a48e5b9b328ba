"""Which blocks hold the words of a question: BM25 over the blocks of a scope.

Its own and not bm25s, which weighs a fixed corpus once: here documents come and go, and how rare a
word is depends on the scope.
"""

import math
import re
import threading
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple
from unicodedata import normalize

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh32_intdigest

from memstore.disk.format.block_words import BlockWords
from memstore.index.block_rows import Ranges, Remembered, Rows
from memstore.index.scope import Scope

K1, B = 1.2, 0.75

_WORD = re.compile(r"[^\W_]+")
_SHIFT = np.uint64(32)


def split(text: str) -> list[int]:
    """The words of a text in their order, as 32-bit hashes: runs of letters and digits of any
    script, in lower case.

    Text and question must be split alike. Compatible forms of a character count as one (NFKC).
    """
    words = _WORD.findall(normalize("NFKC", text).lower())
    return [xxh32_intdigest(word.encode("utf-8", "surrogatepass")) for word in words]


def count(text: str) -> list[tuple[int, int]]:
    """The distinct words of a text and how often each is there: what a memory keeps of a block."""
    return sorted(Counter(split(text)).items())


class _Postings(NamedTuple):
    """Words of rows, in order of hash and row."""

    keys: np.ndarray  # uint64 [n]: hash, row
    counts: np.ndarray  # uint16 [n]

    @classmethod
    def of(cls, keys: np.ndarray, counts: np.ndarray) -> "_Postings":
        order = np.argsort(keys)
        return cls(keys[order], counts[order])

    def find(self, word: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows that hold a word, and how often."""
        low, high = np.searchsorted(self.keys, _bounds(word))
        return self.keys[low:high].astype(np.uint32), self.counts[low:high]


class WordIndex:
    """The words of the blocks of many documents. Safe for several threads.

    Words that come are sorted when they are first asked for, and sorted into the older ones when
    there are half as many: adding stays cheap, and few places are looked at.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._rows, self._lengths = Rows(), np.zeros(0, dtype=np.float32)
        self._new: list[tuple[np.ndarray, np.ndarray]] = []  # keys and counts, in no order
        self._sorted: list[_Postings] = []  # each more than twice as large as the next
        self._scopes = Remembered()

    def add(self, document: int, first_block: int, words: BlockWords) -> None:
        """Append the words of blocks first_block ..; they must follow the blocks that the document
        has. Raises InvalidInput.
        """
        n = len(words.sizes)
        with self._lock:
            start = self._rows.end
            self._rows.append(document, first_block, n)
            if self._rows.end > len(self._lengths):
                grown = np.zeros(self._rows.end * 3 // 2 + 64, dtype=np.float32)
                grown[:start] = self._lengths[:start]
                self._lengths = grown
            block = np.repeat(np.arange(n), words.sizes)
            self._lengths[start : start + n] = np.bincount(block, words.counts, minlength=n)
            keys = words.hashes.astype(np.uint64) << _SHIFT | (block + start).astype(np.uint64)
            self._new.append((keys, words.counts))
            self._scopes.clear()

    def remove(self, document: int) -> None:
        """Drop a document's words; an unknown one is no error."""
        self.truncate(document, 0)

    def truncate(self, document: int, blocks: int) -> None:
        """Drop the words of blocks >= `blocks`."""
        with self._lock:
            self._rows.keep(document, 0, blocks)
            self._scopes.clear()

    def trim(self, document: int, first_block: int) -> None:
        """Drop the words of blocks < `first_block`."""
        with self._lock:
            self._rows.keep(document, first_block, 1 << 62)
            self._scopes.clear()

    def span(self, document: int) -> tuple[int, int]:
        """The blocks [first, end) that are held of a document; (0, 0) if none."""
        with self._lock:
            return self._rows.span(document)

    @property
    def bytes(self) -> int:
        """Memory held for words."""
        with self._lock:
            held = [*self._new, *self._sorted]
            return self._lengths.nbytes + sum(keys.nbytes + counts.nbytes for keys, counts in held)

    def scores(self, words: Mapping[int, float], scope: Scope) -> Tensor:
        """BM25 of each block of the scope, [blocks] float32: the sum over the words of a question
        of weight · idf · tf / (tf + K1·(1 - B + B·length / mean length)).

        idf = ln(1 + (N - df + .5) / (df + .5)) over the N blocks of the scope, of which df hold the
        word (as Lucene has it). words: hash -> weight, 1 for a plain word. Raises DocumentNotFound
        if the scope names blocks that are not held.
        """
        with self._lock:
            self._settle()
            found: _Scope = self._scopes.get(scope, lambda: self._look(scope))
            scores = np.zeros(self._rows.end, dtype=np.float32)
            for word, weight in words.items():
                parts = [postings.find(word) for postings in self._sorted]
                rows = np.concatenate([found.none, *(rows for rows, _ in parts)])
                counts = np.concatenate([found.none, *(counts for _, counts in parts)])
                inside = found.holds[rows]
                rows, counts = rows[inside], counts[inside].astype(np.float32)
                idf = math.log(1 + (found.blocks - len(rows) + 0.5) / (len(rows) + 0.5))
                scores[rows] += weight * idf * counts / (counts + found.damping[rows])
        pieces = [scores[:0], *(scores[start:end] for start, end in found.ranges)]
        return torch.from_numpy(np.concatenate(pieces))

    def _look(self, scope: Scope) -> "_Scope":
        ranges = self._rows.ranges(scope)
        holds = np.zeros(self._rows.end, dtype=bool)
        for start, end in ranges:
            holds[start:end] = True
        blocks, lengths = int(holds.sum()), self._lengths[: self._rows.end]
        mean = float(lengths[holds].mean(dtype=np.float64)) if blocks else 0.0
        damping = K1 * (1 - B + B * lengths / (mean or 1.0))
        return _Scope(ranges, holds, blocks, damping, np.zeros(0, dtype=np.uint32))

    def _settle(self) -> None:
        """Sort what is new, and leave out what was dropped once that is half of all."""
        if self._rows.end > 2 * self._rows.live + 64:
            self._leave_out()
        if self._new:
            self._sorted.append(_Postings.of(*map(np.concatenate, zip(*self._new))))
            self._new = []
        while len(self._sorted) > 1 and len(self._sorted[-2].keys) <= 2 * len(
            self._sorted[-1].keys
        ):
            self._sorted[-2:] = [_Postings.of(*map(np.concatenate, zip(*self._sorted[-2:])))]

    def _leave_out(self) -> None:
        """Number anew the rows that some document has."""
        runs = sorted(
            (run.start, document, run) for document, runs in self._rows.runs.items() for run in runs
        )
        rows = Rows()
        number = np.full(self._rows.end, -1, dtype=np.int64)
        for start, document, run in runs:
            number[start : start + run.size] = np.arange(rows.end, rows.end + run.size)
            rows.append(document, run.first_block, run.size)
        held = [*self._sorted, *self._new]
        self._sorted, self._new = [], []
        for keys, counts in held:
            row = number[keys.astype(np.uint32)]
            keys = (keys >> _SHIFT << _SHIFT | row.astype(np.uint64))[row >= 0]
            self._new.append((keys, counts[row >= 0]))
        self._lengths = self._lengths[: len(number)][number >= 0]
        self._rows = rows
        self._scopes.clear()


class _Scope(NamedTuple):
    """What is known of a scope before a word is asked for."""

    ranges: Ranges
    holds: np.ndarray  # bool [rows]: is the row in it
    blocks: int
    damping: np.ndarray  # float32 [rows]: what a count is damped by
    none: np.ndarray  # of no rows


def _bounds(word: int) -> np.ndarray:
    """Between which keys those of a word lie."""
    first = np.uint64(word) << _SHIFT
    return np.array([first, first | np.uint64(0xFFFF_FFFF)], dtype=np.uint64)
