"""Numbers table rows by document and block, and stores one layer's keys in such rows."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memstore.errors import DocumentNotFound, InvalidInput

Scope = Sequence[tuple[int, int, int]]
"""(document, first_block, end_block) runs, oldest first: the candidates of a search, numbered 0, 1,
.. in this order.
"""


def locator(scope: Scope) -> Callable[[int], tuple[int, int]]:
    """A function that returns document and block of a candidate."""
    starts = [*accumulate((end - first for _, first, end in scope), initial=0)]

    def locate(candidate: int) -> tuple[int, int]:
        run = bisect_right(starts, candidate) - 1
        document, first, _ = scope[run]
        return document, first + candidate - starts[run]

    return locate


Ranges = list[tuple[int, int]]
"""(start, end) rows, in the order of a scope. Candidates are numbered along their concatenation."""

ALL_BLOCKS = 1 << 62  # more than any document has: who trims that far drops them all
_MOST = 64  # scopes that are remembered


@dataclass(slots=True)
class Run:
    """Consecutive blocks of one document in consecutive rows."""

    first_block: int
    start: int
    size: int

    @property
    def end_block(self) -> int:
        """The block after the last one."""
        return self.first_block + self.size


class Rows:
    """Rows 0 .. end of a table that only grows; dropped blocks leave holes. Runs are ordered by
    age.
    """

    def __init__(self) -> None:
        self.end = 0
        self.live = 0  # rows that some document has
        self._runs: dict[int, list[Run]] = {}
        self._by_row: np.ndarray | None = None  # int64 [runs, 3]: `places`, while nothing changes

    def append(self, document: int, first_block: int, n: int) -> None:
        """Give the next n rows to blocks first_block .. of a document.

        Raises InvalidInput unless they follow the blocks that the document has.
        """
        runs = self.of(document)
        if runs and runs[-1].end_block != first_block:
            raise InvalidInput(
                f"document {document}: block {first_block} added after {runs[-1].end_block} "
                "blocks; add them in order"
            )
        if n == 0:
            return
        if runs and runs[-1].start + runs[-1].size == self.end:
            runs[-1].size += n
        else:
            runs = [*runs, Run(first_block, self.end, n)]
        self._put(document, runs)
        self.end += n
        self.live += n

    def trim(self, document: int, first_block: int = ALL_BLOCKS) -> bool:
        """Drop the document's blocks before first_block; return whether there were any."""
        before = self.live
        kept = []
        for run in self.of(document):
            gone = min(max(0, first_block - run.first_block), run.size)
            self.live -= gone
            if gone < run.size:
                kept.append(Run(run.first_block + gone, run.start + gone, run.size - gone))
        if self.live < before:
            self._put(document, kept)
        return self.live < before

    def of(self, document: int) -> list[Run]:
        """The runs of a document; do not change them."""
        return self._runs.get(document, [])

    def _put(self, document: int, runs: list[Run]) -> None:
        self._runs.pop(document, None)
        self._by_row = None
        if runs:
            self._runs[document] = runs

    def spans(self) -> dict[int, tuple[int, int]]:
        """The blocks [first, end) of each document."""
        return {n: (runs[0].first_block, runs[-1].end_block) for n, runs in self._runs.items()}

    def all(self) -> list[tuple[int, Run]]:
        """Every document's runs, in the order of the rows."""
        runs = [(document, run) for document, of in self._runs.items() for run in of]
        return sorted(runs, key=lambda run: run[1].start)

    def ranges(self, scope: Scope) -> Ranges:
        """The rows of a scope; adjacent ranges are joined. Raises DocumentNotFound."""
        found: Ranges = []
        for document, first, end in scope:
            if end <= first:
                continue
            runs = self.of(document)
            if not runs or first < runs[0].first_block or end > runs[-1].end_block:
                raise not_held(document, first, end)
            for run in runs:
                low, high = max(first, run.first_block), min(end, run.end_block)
                if low < high:
                    ahead = run.start - run.first_block
                    if found and found[-1][1] == low + ahead:
                        found[-1] = (found[-1][0], high + ahead)
                    else:
                        found.append((low + ahead, high + ahead))
        return found

    def numbers(self, scope: Scope) -> np.ndarray:
        """The rows of a scope, int64 [blocks]: faster than `ranges` for many short runs. Raises
        DocumentNotFound.
        """
        asked = np.array(scope, np.int64).reshape(-1, 3)
        documents, which = np.unique(asked[:, 0], return_inverse=True)
        runs = [self.of(document) for document in documents.tolist()]
        if any(len(of_document) != 1 for of_document in runs):
            parts = [np.arange(*rows) for rows in self.ranges(scope)]
            return np.concatenate([np.zeros(0, np.int64), *parts])
        held = np.array([(run.first_block, run.end_block, run.start) for (run,) in runs], np.int64)
        held = held.reshape(-1, 3)[which]
        sizes = asked[:, 2] - asked[:, 1]
        if ((asked[:, 1] < held[:, 0]) | (asked[:, 2] > held[:, 1]) & (sizes > 0)).any():
            self.ranges(scope)  # says which are not held
        before = np.cumsum(sizes) - sizes
        shift = held[:, 2] - held[:, 0] + asked[:, 1] - before
        return np.repeat(shift, sizes) + np.arange(int(sizes.sum()))

    def places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The documents and blocks, int64 [n] each, of rows [n] that are in use."""
        if self._by_row is None:
            runs = [(run.start, document, run.first_block) for document, run in self.all()]
            self._by_row = np.array(runs, np.int64).reshape(-1, 3)
        at = np.searchsorted(self._by_row[:, 0], rows, "right") - 1
        starts, documents, firsts = self._by_row[at].T
        return documents, rows - starts + firsts


def not_held(document: int, first: int, end: int) -> DocumentNotFound:
    """The error for a scope with blocks that are not in the index."""
    return DocumentNotFound(
        f"document {document} has no blocks {first}..{end - 1}: it was removed or changed; list "
        "the memory's documents again"
    )


class Remembered:
    """A cache of results by scope, until `clear`."""

    def __init__(self) -> None:
        self._found: dict[tuple[tuple[int, int, int], ...], Any] = {}
        self._latest: tuple[tuple[tuple[int, int, int], ...], Any] | None = None

    def get(self, scope: Scope, look: Callable[[], Any]) -> Any:
        """The cached result for this scope, else that of look()."""
        key = tuple(scope)
        # to hash a thousand documents takes as long as a search
        if self._latest is None or self._latest[0] != key:
            if key not in self._found:
                if len(self._found) >= _MOST:
                    self._found.clear()
                self._found[key] = look()
            self._latest = key, self._found[key]
        return self._latest[1]

    def clear(self) -> None:
        """Forget all results, because rows have changed."""
        self._found.clear()
        self._latest = None


def to_rows(candidates: Tensor, ranges: Ranges) -> Tensor:
    """Convert positions in the concatenation of `ranges` (-1: none) to rows of the table."""
    shifts, ends, seen = [], [], 0
    for start, end in ranges:
        shifts.append(start - seen)
        seen += end - start
        ends.append(seen)
    if len(ranges) <= 1:
        return torch.where(candidates < 0, candidates, candidates + sum(shifts))
    of_ends, of_shifts = (torch.tensor(some, device=candidates.device) for some in (ends, shifts))
    which = torch.searchsorted(of_ends[:-1], candidates.contiguous(), right=True)
    return torch.where(candidates < 0, candidates, candidates + of_shifts[which])


@dataclass
class Layer:
    """One layer's keys in rows, and lookups since their last change."""

    keys: Tensor  # (Hkv, capacity, D)
    rows: Rows = field(default_factory=Rows)
    scopes: Remembered = field(default_factory=Remembered)

    def add(self, document: int, first_block: int, keys: Tensor) -> None:
        """Append keys [n, Hkv, D]."""
        n = len(keys)
        self.rows.append(document, first_block, n)  # raises before anything is written
        start = self.rows.end - n
        if self.rows.end > self.keys.shape[1]:
            holes = 2 * self.rows.live < self.rows.end
            self._move(start, (self.rows.live if holes else self.rows.end) * 3 // 2 + 64, holes)
            start = self.rows.end - n
        self.keys[:, start : start + n] = keys.transpose(0, 1)

    def reserve(self, n: int) -> None:
        """Make room for n more keys at once."""
        if self.rows.end + n > self.keys.shape[1]:
            # and for a few that come later: to move all for them takes seconds
            self._move(self.rows.end, (self.rows.end + n) * 17 // 16 + 64, False)

    def _move(self, written: int, room: int, holes: bool) -> None:
        """Move the keys into new tensors, without holes if `holes`; a thread that searches the old
        tensors is not disturbed.
        """
        old, rows = self.keys, self.rows
        n = rows.end - written
        moved = Rows()
        self.keys = _empty((old.shape[0], room, old.shape[2]), old.dtype, old.device)
        if not holes:
            self.keys[:, :written] = old[:, :written]
        else:
            for document, run in rows.all():
                start = run.start
                stop = min(start + run.size, written)  # the newest rows are not written yet
                self.keys[:, moved.end : moved.end + stop - start] = old[:, start:stop]
                moved.append(document, run.first_block, run.size)
            # The newest rows are the last of the last run: they stay last.
            assert moved.end >= n
            self.rows = moved


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor; on the CPU NumPy makes it, with huge pages, whose first use is
    cheaper.
    """
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.empty(size, dtype=np.uint8)).view(dtype).view(shape)
