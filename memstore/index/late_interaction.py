"""Late interaction: how near the nearest token of every block comes to each row of a question.

A token landmark is a vector a token. A selector asks for the exact maxima of products
over the tokens of blocks, which are computed over pieces that fit in a processor's cache.
"""

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from memstore.errors import DocumentNotFound, InvalidInput
from memstore.index.block_rows import ALL_BLOCKS, Layer, Ranges, Scope

INT8_STEPS = 127.0  # a landmark is a unit vector times this, in int8

_PIECE = 1 << 18  # numbers of a piece, a megabyte in float32


class _Resolved(NamedTuple):
    """A scope's blocks as they lie in the rows, one a token."""

    ranges: Ranges  # no block lies in two
    lengths: np.ndarray  # int64 [blocks]: tokens of each
    ends: np.ndarray  # int64 [blocks]: where each ends, counted in `ranges`

    @property
    def starts(self) -> np.ndarray:
        """Where each begins."""
        return self.ends - self.lengths


class TokenIndex:
    """Token landmarks of many documents, block by block in one tensor; a block has as many tokens
    as it was added with. Safe for several threads.
    """

    def __init__(self, width: int) -> None:
        """An empty index of landmarks of so many numbers."""
        self.width = width
        self._lock = threading.RLock()
        # the tokens of a document, as if they were its blocks
        self._held = Layer(torch.empty(1, 0, width, dtype=torch.int8))
        self._blocks: dict[int, _Blocks] = {}

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
        if tuple(landmarks.shape[1:]) != (self.width,) or landmarks.dtype != torch.int8:
            raise InvalidInput(
                f"token landmarks {list(landmarks.shape)} {landmarks.dtype} do not fit the index: "
                f"expected [tokens, {self.width}] torch.int8"
            )
        sizes = np.asarray(lengths, dtype=np.int64)
        if int(sizes.sum()) != len(landmarks) or (sizes < 1).any():
            raise InvalidInput(
                f"token landmarks of {len(landmarks)} tokens are not those of blocks of "
                f"{int(sizes.sum())}, with a token at least each"
            )
        with self._lock:
            held = self._blocks.get(document)
            if held is not None and held.end != first_block:
                raise InvalidInput(
                    f"document {document}: block {first_block} added after {held.end} blocks; add "
                    "them in order"
                )
            if not len(sizes):
                return
            if held is None:
                held = _Blocks(first_block, 0, np.zeros(0, np.int64))
            self._held.add(document, held.end_token, landmarks[:, None])
            self._held.scopes.clear()
            self._blocks[document] = held.extended(sizes)

    def reserve(self, tokens: int) -> None:
        """Make room for that many more tokens, so that adding them in pieces moves nothing."""
        with self._lock:
            self._held.reserve(tokens)

    def remove(self, document: int) -> None:
        """Drop a document's landmarks; an unknown one is no error."""
        self.trim(document, ALL_BLOCKS)

    def trim(self, document: int, first_block: int) -> None:
        """Drop the landmarks of blocks < `first_block`."""
        with self._lock:
            held = self._blocks.pop(document, None)
            if held is None:
                return
            kept = held.kept(first_block, held.end)
            if len(kept.lengths):
                self._blocks[document] = kept
            self._held.rows.trim(document, kept.first_token)
            self._held.scopes.clear()

    def span(self, document: int) -> tuple[int, int]:
        """The blocks [first, end) that are held of a document; (0, 0) if none."""
        with self._lock:
            held = self._blocks.get(document)
            return (0, 0) if held is None else (held.first, held.end)

    @property
    def bytes(self) -> int:
        """Memory held for landmarks."""
        return self._held.keys.nbytes

    def maxima(self, q: Tensor, scope: Scope) -> Tensor:
        """The greatest product of each row with the landmarks of each block, [R, blocks of the
        scope] float32; a landmark counts as the unit vector that it stands for.

        q: [R, width] float32. Raises DocumentNotFound if the scope names blocks that are not held,
        InvalidInput for queries of another shape.
        """
        if q.dim() != 2 or q.shape[1] != self.width:
            raise InvalidInput(
                f"queries of shape {list(q.shape)} do not fit the index: expected [rows, "
                f"{self.width}]"
            )
        q = q.float() / INT8_STEPS
        keys, resolved = self._resolve(scope)
        out = np.empty((len(q), len(resolved.lengths)), np.float32)
        if not out.size:
            return torch.from_numpy(out)
        starts, ends = resolved.starts, resolved.ends
        most = max(_PIECE // self.width, int(resolved.lengths.max()))
        rows = torch.empty(most, self.width)
        block = before = 0  # tokens of the ranges before
        for start, end in resolved.ranges:
            last = int(np.searchsorted(ends, before + end - start, "right"))
            while block < last:
                stop = min(last, int(np.searchsorted(ends, starts[block] + most, "right")))
                low, high = starts[block] - before, ends[stop - 1] - before
                some = rows[: high - low].copy_(keys[0, start + low : start + high])
                first = starts[block:stop] - starts[block]
                products = (q @ some.T).numpy()
                np.maximum.reduceat(products, first, axis=1, out=out[:, block:stop])
                block = stop
            before += end - start
        return torch.from_numpy(out)

    def _resolve(self, scope: Scope) -> tuple[Tensor, _Resolved]:
        """The landmarks as they are now and the scope's blocks in them; rows only ever move into
        new tensors.
        """
        with self._lock:
            found: _Resolved = self._held.scopes.get(scope, lambda: self._look_up(scope))
            return self._held.keys, found

    def _look_up(self, scope: Scope) -> _Resolved:
        tokens: list[tuple[int, int, int]] = []
        lengths = [np.zeros(0, np.int64)]
        for document, first, end in scope:
            if end <= first:
                continue
            held = self._blocks.get(document)
            if held is None or first < held.first or end > held.end:
                raise DocumentNotFound(
                    f"document {document} has no blocks {first}..{end - 1}: it was forgotten or "
                    "changed; look at the memory's documents again"
                )
            if first == held.first and end == held.end:
                tokens.append((document, *self._held.rows.span(document)))
                lengths.append(held.lengths)
                continue
            some = held.kept(first, end)
            tokens.append((document, some.first_token, some.end_token))
            lengths.append(some.lengths)
        joined = np.concatenate(lengths)
        return _Resolved(self._held.rows.ranges(tokens), joined, np.cumsum(joined))


class _Blocks(NamedTuple):
    """The blocks that are held of a document."""

    first: int
    first_token: int
    lengths: np.ndarray  # int64: tokens of each

    @property
    def end(self) -> int:
        """The block that follows."""
        return self.first + len(self.lengths)

    @property
    def end_token(self) -> int:
        """The token that follows."""
        return self.first_token + int(self.lengths.sum())

    def extended(self, lengths: np.ndarray) -> "_Blocks":
        """With more blocks."""
        return self._replace(lengths=np.concatenate([self.lengths, lengths]))

    def kept(self, first: int, end: int) -> "_Blocks":
        """Those of them that are among blocks first .. end."""
        low = min(max(0, first - self.first), len(self.lengths))
        gone, lengths = self.lengths[:low], self.lengths[low : max(low, end - self.first)]
        return _Blocks(self.first + low, self.first_token + int(gone.sum()), lengths)
