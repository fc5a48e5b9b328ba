"""Which rows of a table hold which blocks of which documents."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memstore.errors import DocumentNotFound, InvalidInput
from memstore.index.scope import Scope

Ranges = list[tuple[int, int]]
"""(start, end) rows, in the order of a scope: the concatenation of these rows is the numbering of
its candidates.
"""

_MOST = 64  # scopes that are remembered


@dataclass
class Run:
    """Consecutive blocks of one document in consecutive rows."""

    first_block: int
    start: int
    size: int

    @property
    def end_block(self) -> int:
        """The block after the last."""
        return self.first_block + self.size


class Rows:
    """Rows 0 .. end of a table that only grows; what is dropped leaves a hole. Runs are in order of
    age.
    """

    def __init__(self) -> None:
        self.runs: dict[int, list[Run]] = {}
        self.end = 0
        self.live = 0  # rows that some document has

    def append(self, document: int, first_block: int, n: int) -> None:
        """Give the next n rows to blocks first_block .. of a document.

        Raises InvalidInput if they do not follow the blocks it has.
        """
        runs = self.runs.get(document, [])
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
            self.runs[document] = [*runs, Run(first_block, self.end, n)]
        self.end += n
        self.live += n

    def keep(self, document: int, first: int, end: int) -> None:
        """Drop the document's blocks outside [first, end)."""
        kept = []
        for run in self.runs.pop(document, []):
            low, high = max(first, run.first_block), min(end, run.end_block)
            self.live -= run.size - max(0, high - low)
            if low < high:
                kept.append(Run(low, run.start + low - run.first_block, high - low))
        if kept:
            self.runs[document] = kept

    def span(self, document: int) -> tuple[int, int]:
        """The blocks [first, end) of a document; (0, 0) if none."""
        runs = self.runs.get(document)
        return (runs[0].first_block, runs[-1].end_block) if runs else (0, 0)

    def ranges(self, scope: Scope) -> Ranges:
        """The rows of a scope; neighbours are joined. Raises DocumentNotFound."""
        found: Ranges = []
        for document, first, end in scope:
            if end <= first:
                continue
            held_first, held_end = self.span(document)
            if first < held_first or end > held_end:
                raise DocumentNotFound(
                    f"document {document} has no blocks {first}..{end - 1}: it was forgotten or "
                    "changed; look at the memory's documents again"
                )
            for start, stop in self._rows(document, first, end):
                join(found, start, stop)
        return found

    def numbers(self, scope: Scope) -> np.ndarray:
        """The rows of a scope one by one, int64 [blocks]: `ranges` for many short runs. Raises
        DocumentNotFound.
        """
        asked = np.array(scope, np.int64).reshape(-1, 3)
        documents, which = np.unique(asked[:, 0], return_inverse=True)
        runs = [self.runs.get(document, []) for document in documents.tolist()]
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

    def _rows(self, document: int, first: int, end: int) -> Iterator[tuple[int, int]]:
        for run in self.runs[document]:
            low, high = max(first, run.first_block), min(end, run.end_block)
            if low < high:
                yield low - run.first_block + run.start, high - run.first_block + run.start


class Remembered:
    """What was looked up for a scope, until `clear`."""

    def __init__(self) -> None:
        self._found: dict[tuple[tuple[int, int, int], ...], Any] = {}
        self._latest: tuple[tuple[tuple[int, int, int], ...], Any] | None = None

    def get(self, scope: Scope, look: Callable[[], Any]) -> Any:
        """look(), or what it returned for this scope before."""
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
        """Forget everything: rows have changed."""
        self._found.clear()
        self._latest = None

    def __len__(self) -> int:
        return len(self._found)


def join(ranges: Ranges, start: int, end: int) -> None:
    """Append a range, as part of the last where it follows it."""
    if ranges and ranges[-1][1] == start:
        ranges[-1] = (ranges[-1][0], end)
    else:
        ranges.append((start, end))


def total(ranges: Sequence[tuple[int, int]]) -> int:
    """Rows in all."""
    return sum(end - start for start, end in ranges)


def to_candidates(rows: Tensor, ranges: Ranges) -> Tensor:
    """Rows of a table (-1 = none) as positions in the concatenation of `ranges`."""
    if len(ranges) <= 1:
        start = ranges[0][0] if ranges else 0
        return rows if start == 0 else torch.where(rows < 0, rows, rows - start)
    shifts, seen = [], 0
    for start, end in ranges:
        shifts.append(seen - start)
        seen += end - start
    order = sorted(range(len(ranges)), key=lambda i: ranges[i][0])
    starts = torch.tensor([ranges[i][0] for i in order], device=rows.device)
    shift = torch.tensor([shifts[i] for i in order], device=rows.device)
    which = torch.searchsorted(starts, rows, right=True) - 1
    return torch.where(rows < 0, rows, rows + shift[which.clamp_min(0)])


def to_rows(candidates: Tensor, ranges: Ranges) -> Tensor:
    """The inverse of to_candidates."""
    if len(ranges) <= 1:
        start = ranges[0][0] if ranges else 0
        return (
            candidates
            if start == 0
            else torch.where(candidates < 0, candidates, candidates + start)
        )
    firsts, shifts, seen = [], [], 0
    for start, end in ranges:
        firsts.append(seen)
        shifts.append(start - seen)
        seen += end - start
    which = (
        torch.searchsorted(torch.tensor(firsts, device=candidates.device), candidates, right=True)
        - 1
    )
    shift = torch.tensor(shifts, device=candidates.device)[which.clamp_min(0)]
    return torch.where(candidates < 0, candidates, candidates + shift)
