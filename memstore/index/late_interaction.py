"""Late interaction: the greatest product of each row of a question with the tokens of every block.

Each token has a landmark vector. The exact maxima over the tokens of blocks are computed in pieces
that fit in a processor's cache.
"""

import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from memstore.index.block_rows import Layer, Ranges, Scope, not_held

INT8_STEPS = 127.0  # a landmark is a unit vector times this, in int8

_PIECE = 1 << 18  # numbers of a piece, a megabyte in float32


class TokenIndex:
    """Token landmarks of many documents, block by block in one array; blocks have any number of
    tokens. Safe for several threads.
    """

    def __init__(self, width: int) -> None:
        """An empty index of landmarks of `width` numbers."""
        self.width = width
        self._lock = threading.RLock()
        self._tokens = Layer(torch.empty(1, 0, width, dtype=torch.int8))  # a row a token
        # of each document, int64 [blocks + 1]: tokens before each block, and in all
        self._ends: dict[int, np.ndarray] = {}

    def add(self, document: int, landmarks: Tensor, lengths: Sequence[int] | np.ndarray) -> None:
        """Set or replace a document's landmarks int8 [tokens, width]; lengths: tokens of each
        block.
        """
        with self._lock:
            self.remove(document)
            self._tokens.add(document, 0, landmarks[:, None])
            self._ends[document] = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more tokens, so that adding them in pieces does not move any."""
        with self._lock:
            self._tokens.reserve(tokens)

    def remove(self, document: int) -> None:
        """Drop a document's landmarks; an unknown document is ignored."""
        with self._lock:
            self._ends.pop(document, None)
            self._tokens.rows.trim(document)
            self._tokens.scopes.clear()

    @property
    def bytes(self) -> int:
        """Memory of the landmarks."""
        return self._tokens.keys.nbytes

    def maxima(self, q: Tensor, scope: Scope) -> Tensor:
        """The greatest product of each row with the landmarks of each block, [R, blocks of the
        scope] float32; a landmark counts as the unit vector that it encodes.

        q: [R, width] float32. Raises DocumentNotFound if the scope has blocks that the index lacks.
        """
        with self._lock:
            ranges, ends = self._tokens.scopes.get(scope, lambda: self._look(scope))
            tokens = self._tokens.keys[0]
        q, block = q.float() / INT8_STEPS, 0
        out = np.empty((len(q), len(ends) - 1), np.float32)
        most = max(_PIECE // self.width, int(np.diff(ends).max(initial=0)))
        rows = torch.empty(most, self.width)
        for start, end in ranges:
            shift = start - int(ends[block])
            last = int(np.searchsorted(ends, end - shift))
            while block < last:
                first = int(ends[block])
                stop = int(np.searchsorted(ends[: last + 1], first + most, "right")) - 1
                held = tokens[first + shift : int(ends[stop]) + shift]
                products = (q @ rows[: len(held)].copy_(held).T).numpy()
                into = out[:, block:stop]
                np.maximum.reduceat(products, ends[block:stop] - first, axis=1, out=into)
                block = stop
        return torch.from_numpy(out)

    def _look(self, scope: Scope) -> tuple[Ranges, np.ndarray]:
        """The rows of a scope, and the tokens before each of its blocks, int64 [blocks + 1]."""
        runs, lengths = [], [np.zeros(1, np.int64)]
        for document, first, end in scope:
            ends = self._ends.get(document, lengths[0])
            if not 0 <= first <= end < len(ends):
                raise not_held(document, first, end)
            runs.append((document, int(ends[first]), int(ends[end])))
            lengths.append(np.diff(ends[first : end + 1]))
        return self._tokens.rows.ranges(runs), np.cumsum(np.concatenate(lengths))
