"""Late interaction: how near the nearest token of every block comes to each row of a question.

A token landmark is a vector a token. A selector asks for the exact maxima of products
over the tokens of blocks, which are computed over pieces that fit in a processor's cache.
"""

import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from memstore.index.block_rows import Remembered, Rows, Scope

INT8_STEPS = 127.0  # a landmark is a unit vector times this, in int8

_PIECE = 1 << 18  # numbers of a piece, a megabyte in float32


class TokenIndex:
    """Token landmarks of many documents, block by block in one array; a block has as many tokens
    as it was added with. Safe for several threads.
    """

    def __init__(self, width: int) -> None:
        """An empty index of landmarks of so many numbers."""
        self.width = width
        self._lock = threading.RLock()
        self._rows, self._scopes = Rows(), Remembered()  # of blocks
        # Nothing in use is written over: a search goes on while documents come and go.
        self._tokens = np.empty((0, width), np.int8)  # (capacity, width)
        self._ends = np.zeros(1, np.int64)  # (capacity + 1): tokens before each row, and in all

    def add(
        self,
        document: int,
        first_block: int,
        landmarks: Tensor,
        lengths: Sequence[int] | np.ndarray,
    ) -> None:
        """Append landmarks int8 [tokens, width] of blocks first_block .. of so many tokens each;
        they must follow the blocks that the document has. Raises InvalidInput.
        """
        sizes = np.asarray(lengths, dtype=np.int64)
        with self._lock:
            if 2 * self._rows.live < self._rows.end and self._full(len(sizes), len(landmarks)):
                self._leave_out_holes()
            if self._full(len(sizes), len(landmarks)):
                self._grow(len(sizes), len(landmarks), 1 / 2)
            row = self._rows.end
            self._rows.append(document, first_block, len(sizes))
            start = int(self._ends[row])
            self._tokens[start : start + len(landmarks)] = landmarks.numpy()
            self._ends[row + 1 : row + 1 + len(sizes)] = start + np.cumsum(sizes)
            self._scopes.clear()

    def reserve(self, tokens: int) -> None:
        """Make room for that many more tokens, so that adding them in pieces moves nothing."""
        with self._lock:
            if self._full(0, tokens):
                # and for a few that come later: to move all for them takes seconds
                self._grow(0, tokens, 1 / 16)

    def _full(self, blocks: int, tokens: int) -> bool:
        end = self._rows.end
        room = len(self._ends) - 1 - end, len(self._tokens) - int(self._ends[end])
        return blocks > room[0] or tokens > room[1]

    def _grow(self, blocks: int, tokens: int, more: float) -> None:
        """Move everything to where there is room for more, and for a share beyond."""
        end = self._rows.end
        tokens += int(self._ends[end])
        moved = np.empty((int((1 + more) * tokens) + 64, self.width), np.int8)
        moved[: self._ends[end]] = self._tokens[: self._ends[end]]
        ends = np.empty(int((1 + more) * (end + blocks)) + 64, np.int64)
        ends[: end + 1] = self._ends[: end + 1]
        self._tokens, self._ends = moved, ends

    def _leave_out_holes(self) -> None:
        runs, rows = self._rows.all(), Rows()
        lengths, tokens = [np.zeros(1, np.int64)], [self._tokens[:0]]
        for document, run in runs:
            ends = self._ends[run.start : run.start + run.size + 1]
            rows.append(document, run.first_block, run.size)
            lengths.append(np.diff(ends))
            tokens.append(self._tokens[ends[0] : ends[-1]])
        self._rows, self._ends = rows, np.cumsum(np.concatenate(lengths))
        self._tokens = np.concatenate(tokens)

    def remove(self, document: int) -> None:
        """Drop a document's landmarks; an unknown one is no error."""
        with self._lock:
            if self._rows.trim(document):
                self._scopes.clear()

    def span(self, document: int) -> tuple[int, int]:
        """The blocks [first, end) that are held of a document; (0, 0) if none."""
        with self._lock:
            return self._rows.span(document)

    @property
    def bytes(self) -> int:
        """Memory held for landmarks."""
        return self._tokens.nbytes

    def maxima(self, q: Tensor, scope: Scope) -> Tensor:
        """The greatest product of each row with the landmarks of each block, [R, blocks of the
        scope] float32; a landmark counts as the unit vector that it stands for.

        q: [R, width] float32. Raises DocumentNotFound if the scope names blocks that are not held.
        """
        with self._lock:
            ranges = self._scopes.get(scope, lambda: self._rows.ranges(scope))
            tokens, ends = torch.from_numpy(self._tokens), self._ends
        q, at = q.float() / INT8_STEPS, 0
        out = np.empty((len(q), sum(end - start for start, end in ranges)), np.float32)
        longest = [int(np.diff(ends[start : end + 1]).max()) for start, end in ranges]
        most = max(_PIECE // self.width, *longest, 0)
        rows = torch.empty(most, self.width)
        for block, end in ranges:
            while block < end:
                first = int(ends[block])
                stop = int(np.searchsorted(ends[: end + 1], first + most, "right")) - 1
                some = rows[: ends[stop] - first].copy_(tokens[first : ends[stop]])
                products = (q @ some.T).numpy()
                into = out[:, at : at + stop - block]
                np.maximum.reduceat(products, ends[block:stop] - first, axis=1, out=into)
                at, block = at + stop - block, stop
        return torch.from_numpy(out)
