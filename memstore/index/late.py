"""Late interaction: how near the nearest token of every block comes to each row of a question.

A token landmark is a vector a token and head. Whatever a selector makes of it, it asks for the
maxima of products over the tokens of blocks, exactly, by one product after the other over pieces
that stay in a processor's cache.
"""

import threading

import torch
from torch import Tensor

from memstore.errors import InvalidInput
from memstore.index.base import Scope
from memstore.index.packed import Layer
from memstore.index.rows import Ranges, total

LANDMARK_DTYPES = {"int8": torch.int8, "float16": torch.float16, "float32": torch.float32}
INT8_STEPS = 127.0  # a landmark in int8 is a unit vector times this

_PIECE = 1 << 18  # numbers of a piece, a megabyte in float32


class TokenIndex:
    """Token landmarks of many documents, block by block in one tensor. Safe for several threads.

    A document's last block may be short; the rows that it lacks repeat its last token, which
    changes no maximum.
    """

    def __init__(self, heads: int, width: int, block_size: int, dtype: torch.dtype) -> None:
        """An empty index of landmarks [.., heads, width] in `dtype`, one of LANDMARK_DTYPES."""
        self.shape, self.block_size, self.dtype = (heads, width), block_size, dtype
        self._lock = threading.RLock()
        self._held = Layer(torch.empty(heads, 0, block_size * width, dtype=dtype))

    def add(self, document: int, first_block: int, landmarks: Tensor) -> None:
        """Append landmarks [tokens, heads, width] of blocks first_block ..; they must follow the
        blocks that the document has, and only its last block may be short. Raises InvalidInput.
        """
        heads, width = self.shape
        if tuple(landmarks.shape[1:]) != self.shape or landmarks.dtype != self.dtype:
            raise InvalidInput(
                f"token landmarks {list(landmarks.shape)} {landmarks.dtype} do not fit the index: "
                f"expected [tokens, {heads}, {width}] {self.dtype}"
            )
        missing = -len(landmarks) % self.block_size
        if missing:
            landmarks = torch.cat([landmarks, landmarks[-1:].expand(missing, -1, -1)])
        blocks = landmarks.view(-1, self.block_size, heads, width).transpose(1, 2)
        with self._lock:
            self._held.add(document, first_block, blocks.reshape(len(blocks), heads, -1))
            self._held.scopes.clear()

    def reserve(self, blocks: int) -> None:
        """Make room for that many more blocks, so that adding them in pieces moves nothing."""
        with self._lock:
            self._held.reserve(blocks)

    def remove(self, document: int) -> None:
        """Drop a document's landmarks; an unknown one is no error."""
        self.truncate(document, 0)

    def truncate(self, document: int, blocks: int) -> None:
        """Drop the landmarks of blocks >= `blocks`."""
        with self._lock:
            self._held.rows.keep(document, 0, blocks)
            self._held.scopes.clear()

    def span(self, document: int) -> tuple[int, int]:
        """The blocks [first, end) that are held of a document; (0, 0) if none."""
        with self._lock:
            return self._held.rows.span(document)

    @property
    def bytes(self) -> int:
        """Memory held for landmarks."""
        return self._held.keys.nbytes

    def maxima(self, q: Tensor, head: int, scope: Scope) -> Tensor:
        """The greatest product of each row with the landmarks of each block, [R, blocks of the
        scope] float32; a landmark in int8 counts as the unit vector that it stands for.

        q: [R, width] float32. Raises DocumentNotFound if the scope names blocks that are not held,
        InvalidInput for queries of another shape.
        """
        heads, width = self.shape
        if q.dim() != 2 or q.shape[1] != width or not 0 <= head < heads:
            raise InvalidInput(
                f"queries of shape {list(q.shape)} for head {head} do not fit the index: expected "
                f"[rows, {width}] and a head below {heads}"
            )
        q = q.float() / INT8_STEPS if self.dtype == torch.int8 else q.float()
        keys, ranges = self._resolve(scope)
        out = torch.empty(len(q), total(ranges))
        piece = max(1, _PIECE // (self.block_size * width))
        rows = torch.empty(piece * self.block_size, width)
        at = 0
        for start, end in ranges:
            for first in range(start, end, piece):
                some = keys[head, first : min(first + piece, end)].view(-1, width)
                if some.dtype != torch.float32:
                    some = rows[: len(some)].copy_(some)
                best = (q @ some.T).view(len(q), -1, self.block_size).amax(-1)
                out[:, at : at + best.shape[1]] = best
                at += best.shape[1]
        return out

    def keys(self, scope: Scope) -> Tensor:
        """Landmarks float32 [blocks of the scope, block_size, heads, width], in int8 the vectors
        that they stand for; a short block repeats its last token. Raises DocumentNotFound.
        """
        heads, width = self.shape
        held, ranges = self._resolve(scope)
        parts = [held[:, :0], *(held[:, start:end] for start, end in ranges)]
        joined = torch.cat(parts, dim=1).view(heads, -1, self.block_size, width)
        steps = INT8_STEPS if self.dtype == torch.int8 else 1.0
        return joined.permute(1, 2, 0, 3).float() / steps

    def _resolve(self, scope: Scope) -> tuple[Tensor, Ranges]:
        """The landmarks as they are now and the scope's rows in them; rows only ever move into new
        tensors.
        """
        with self._lock:
            rows = self._held.rows
            return self._held.keys, self._held.scopes.get(scope, lambda: rows.ranges(scope))
