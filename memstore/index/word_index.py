"""Find the blocks that contain the words of a question: BM25 over the blocks of a scope.

bm25s is not used: it weighs a fixed corpus once, but here documents come and go, and how rare a
word is depends on the scope.
"""

import math
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple
from unicodedata import combining, normalize

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh32_intdigest

from memstore.disk.tables.runs import BlockWords
from memstore.index.block_rows import Ranges, Remembered, Rows, Scope

_SHIFT = np.uint64(32)
_WORD = re.compile(r"[^\W_]+")
_STEM = 5  # letters of a word that its forms share
_OWN = 4  # times that a block's own word is counted; one around it is counted once
_AROUND = 300  # characters on each side
_CODE = 3.0  # how much a word with a digit counts of a question


def split_words(text: str) -> list[int]:
    """The words of a text, in order, as 32-bit hashes: runs of letters and digits of any script,
    without case and accents. A word of more than five letters is followed by its first five, which
    most of its forms share ("refund", "refunded").

    Text and question must be split alike. Compatible forms of a character count as one (NFKD).
    """
    return [_hash(word) for word in _words(text)]


def weigh_words(question: str) -> dict[int, float]:
    """The hash and weight of each word of a question: 3 for a word with a digit, because learned
    scores hardly distinguish "CP-40" from "CP-60".
    """
    return {_hash(word): 1.0 if word.isalpha() else _CODE for word in _words(question)}


def _hash(word: str) -> int:
    return xxh32_intdigest(word.encode("utf-8", "surrogatepass"))


def _words(text: str) -> Iterator[str]:
    if not text.isascii():
        text = "".join(c for c in normalize("NFKD", text) if not combining(c))
        text = normalize("NFC", text)
    for word in _WORD.findall(text.casefold()):
        yield word
        if word.isalpha() and len(word) > _STEM:
            yield word[:_STEM]


def around(text: str, start: int, end: int) -> str:
    """The 300 characters before and the 300 after characters start .. end of a text."""
    return text[max(0, start - _AROUND) : start] + text[end : end + _AROUND]


def count_words(text: str, near: str = "") -> list[tuple[int, int]]:
    """The words that a memory stores for a block: the distinct words of its text, each counted four
    times, and of the text around it, each counted once, because a question's words may be in the
    sentence before the one that answers.
    """
    found = Counter({word: _OWN * n for word, n in Counter(split_words(text)).items()})
    found.update(split_words(near))
    return sorted(found.items())


class HeldPostings(NamedTuple):
    """Postings in memory."""

    keys: np.ndarray  # uint64 [n], ascending: hash, row
    counts: np.ndarray  # uint16 [n]

    @classmethod
    def of(cls, keys: np.ndarray, counts: np.ndarray) -> "HeldPostings":
        """Build from keys in any order."""
        order = np.argsort(keys)
        return cls(keys[order], counts[order])

    def find(self, word: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows (uint32, ascending) that contain a word, and its counts (uint16)."""
        first = np.uint64(word) << _SHIFT
        bounds = np.array([first, first | np.uint64(0xFFFF_FFFF)], dtype=np.uint64)
        low, high = np.searchsorted(self.keys, bounds)
        return self.keys[low:high].astype(np.uint32), self.counts[low:high]


def by_row(words: BlockWords, first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys and counts, in any order, of the words of blocks in rows `first` .., and the number of
    words of each block, float32.
    """
    block = np.repeat(np.arange(len(words.sizes)), words.sizes)
    keys = words.hashes.astype(np.uint64) << _SHIFT | (block + first).astype(np.uint64)
    lengths = np.bincount(block, words.counts, minlength=len(words.sizes))
    return keys, words.counts, lengths.astype(np.float32)


K1, B = 1.2, 0.75

_RARE = 4096  # blocks; a word in no more of them is rare


class WordsBeside(NamedTuple):
    """Words of a question whose squared scores are added to other scores, times a weight."""

    words: Mapping[int, float]  # hash -> weight
    weight: float


class RareBlocks(NamedTuple):
    """Blocks of a scope that contain a rare word of a question."""

    documents: np.ndarray  # int64 [n]
    blocks: np.ndarray  # int64 [n]
    scores: np.ndarray  # float32 [n]


class WordIndex:
    """The words of the blocks of many documents. Safe for several threads.

    New words are sorted at the next search, and merged into the older ones when they are half as
    many: adding stays cheap, and a search looks in few places.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._rows, self._lengths = Rows(), np.zeros(0, dtype=np.float32)
        self._new: list[HeldPostings] = []  # in no order
        self._sorted: list[HeldPostings] = []  # each more than twice as large as the next
        self._scopes = Remembered()

    @classmethod
    def of(
        cls,
        documents: Iterable[tuple[int | None, int]],
        lengths: np.ndarray,
        postings: HeldPostings,
    ) -> "WordIndex":
        """An index of sorted words. documents: for each its number (None: not indexed) and its
        blocks, in consecutive rows; lengths: float32 [rows], words of each.
        """
        index = cls()
        for number, blocks in documents:
            if number is None:
                index._rows.end += blocks
            else:
                index._rows.append(number, 0, blocks)
        index._lengths, index._sorted = lengths, [postings]
        return index

    def add(self, document: int, words: BlockWords) -> None:
        """Replace the words of a document's blocks."""
        with self._lock:
            self.remove(document)
            start = self._rows.end
            self._rows.append(document, 0, len(words.sizes))
            if self._rows.end > len(self._lengths):
                grown = np.zeros(self._rows.end * 3 // 2 + 64, dtype=np.float32)
                grown[:start] = self._lengths[:start]
                self._lengths = grown
            *new, self._lengths[start : self._rows.end] = by_row(words, start)
            self._new.append(HeldPostings(*new))
            self._scopes.clear()

    def remove(self, document: int) -> None:
        """Drop a document's words; an unknown document is ignored."""
        with self._lock:
            if self._rows.trim(document):
                self._scopes.clear()

    @property
    def bytes(self) -> int:
        """Memory of the words."""
        with self._lock:
            held = [*self._new, *self._sorted]
            return self._lengths.nbytes + sum(keys.nbytes + counts.nbytes for keys, counts in held)

    def scores(
        self, words: Mapping[int, float], scope: Scope, whole: Scope | None = None
    ) -> Tensor:
        """BM25 of each block of the scope, as a share of the most that a block could have, [blocks]
        float32 from 0 to 1: the sum over the words of a question of
        weight · idf · tf / (tf + K1·(1 - B + B·length / mean length)), divided by that of
        weight · idf.

        idf = ln(1 + (N - df + .5) / (df + .5)) over the N blocks of `whole` (None: of the scope),
        of which df hold the word in their own text (as Lucene has it), and the mean is theirs.
        words: hash -> weight, 1 for a plain word. Raises DocumentNotFound if a scope names blocks
        that are not held.
        """
        with self._lock:
            self._settle()
            wanted = None if whole is None else self._rows.numbers(scope)
            found = self._of(scope if whole is None else whole)
            scores = _scores(self._weighted(words, found), found, wanted)
        if wanted is None:
            pieces = (scores[start:end] for start, end in found.ranges)
            scores = np.concatenate([scores[:0], *pieces])
        return torch.from_numpy(scores)

    def holding(self, words: Sequence[int], scope: Scope) -> list[int]:
        """The number of blocks of a scope that contain each word. Raises as `scores`."""
        with self._lock:
            self._settle()
            found = self._of(scope)
            distinct = dict.fromkeys(words, 1.0)
            weighted = self._weighted(distinct, found)
            counts = dict(zip(distinct, (word.holding for word in weighted)))
        return [counts[word] for word in words]

    def rare(self, words: Mapping[int, float], whole: Scope) -> RareBlocks:
        """The blocks of a scope that contain a rare word. Raises as `scores`."""
        with self._lock:
            self._settle()
            found = self._of(whole)
            weighted, rare = self._weighted(words, found), np.zeros_like(found.holds)
            for _, holding, parts in weighted:
                if holding <= _RARE:
                    for rows, _ in parts:
                        rare[rows] = True
            known = np.flatnonzero(rare & found.holds)
            return RareBlocks(*self._rows.places(known), _scores(weighted, found, known))

    def _of(self, scope: Scope) -> "_Scope":
        found: _Scope = self._scopes.get(scope, lambda: self._look(scope))
        return found

    def _weighted(self, words: Mapping[int, float], found: "_Scope") -> list["_Weighted"]:
        weighted = list[_Weighted]()
        for word, weight in words.items():
            parts = [postings.find(word) for postings in self._sorted]
            holding = found.holding.get(word)
            if holding is None:
                own = (found.holds[rows] & (counts >= _OWN) for rows, counts in parts)
                holding = sum(int(rows.sum()) for rows in own)
                found.holding[word] = holding
            idf = math.log(1 + (found.blocks - holding + 0.5) / (holding + 0.5))
            weighted.append(_Weighted(weight * idf, holding, parts))
        whole = sum(word.most for word in weighted)
        return [word._replace(most=word.most / whole) for word in weighted]

    def _look(self, scope: Scope) -> "_Scope":
        ranges = self._rows.ranges(scope)
        holds = np.zeros(self._rows.end, dtype=bool)
        for start, end in ranges:
            holds[start:end] = True
        blocks, lengths = int(holds.sum()), self._lengths[: self._rows.end]
        mean = float(lengths[holds].mean(dtype=np.float64)) if blocks else 0.0
        damping = K1 * (1 - B + B * lengths / (mean or 1.0))
        return _Scope(ranges, holds, blocks, damping, {})

    def _settle(self) -> None:
        """Sort new words, and leave out dropped ones if they are half of all."""
        if self._rows.end > 2 * self._rows.live + 64:
            self._leave_out_holes()
        if self._new:
            self._sorted.append(HeldPostings.of(*map(np.concatenate, zip(*self._new))))
            self._new = []
        while len(self._sorted) > 1 and len(self._sorted[-2].keys) <= 2 * len(
            self._sorted[-1].keys
        ):
            self._sorted[-2:] = [HeldPostings.of(*map(np.concatenate, zip(*self._sorted[-2:])))]

    def _leave_out_holes(self) -> None:
        number, rows = np.full(self._rows.end, -1, dtype=np.int64), Rows()
        for document, run in self._rows.all():
            number[run.start : run.start + run.size] = np.arange(rows.end, rows.end + run.size)
            rows.append(document, run.first_block, run.size)
        for held in (self._sorted, self._new):
            for at, (keys, counts) in enumerate(held):
                row = number[keys.astype(np.uint32)]  # ascends as before
                keys = (keys >> _SHIFT << _SHIFT | row.astype(np.uint64))[row >= 0]
                held[at] = HeldPostings(keys, counts[row >= 0])
        self._lengths = self._lengths[: len(number)][number >= 0]
        self._rows = rows
        self._scopes.clear()


class _Scope(NamedTuple):
    """What a search needs of a scope, whatever the words."""

    ranges: Ranges
    holds: np.ndarray  # bool [rows]: is the row in it
    blocks: int
    damping: np.ndarray  # float32 [rows]: what a count is damped by
    holding: dict[int, int]  # of words that were asked for: how many blocks hold them


class _Weighted(NamedTuple):
    """A word of a question with its weight in a scope."""

    most: float  # the score that a block has for it at most; 1 for all words together
    holding: int  # how many blocks of the scope hold it
    parts: list[tuple[np.ndarray, np.ndarray]]  # rows that do, and how often


def _scores(words: Iterable[_Weighted], found: _Scope, wanted: np.ndarray | None) -> np.ndarray:
    """Scores float32 of rows of a scope: [wanted], or of all rows, 0 outside the scope."""
    damping = found.damping if wanted is None else found.damping[wanted]
    scores = np.zeros(len(damping), dtype=np.float32)
    for most, _, parts in words:
        for rows, counts in parts:
            if wanted is None:
                among = found.holds[rows]
                at = rows[among]
            else:
                at, among = _among(wanted, rows)
            tf = counts[among].astype(np.float32)
            scores[at] += most * tf / (tf + damping[at])
    return scores


def _among(wanted: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which wanted rows are among ascending rows: their positions in `wanted`, and in `rows`."""
    if not len(rows):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    near = np.searchsorted(rows, wanted).clip(max=len(rows) - 1)
    at = np.flatnonzero(rows[near] == wanted)
    return at, near[at]
