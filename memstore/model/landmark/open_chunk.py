"""State of a landmark model's session: attached documents, its own blocks, and the open chunk,
whose keys and values are not in a block yet; and positions of blocks for the chunk's queries.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memstore.index.block_rows import locator
from memstore.model.landmark.transformer import LandmarkReader
from memstore.model.lookup_settings import LookupSettings

Run = tuple[int, int, int]
"""Blocks first .. end of a document: (document, first, end)."""


@dataclass
class SessionBlocks:
    """Blocks of a session, oldest first: attached documents, then its own blocks, which have a
    document id of the store.
    """

    # (document id, blocks); others are attached by `attach`
    documents: Sequence[tuple[int, int]] = ()
    own_document: int | None = None
    own_first: int = 0  # own blocks before this one were let go
    own_end: int = 0

    @property
    def own(self) -> int:
        """Number of the session's own blocks."""
        return self.own_end - self.own_first

    @property
    def count(self) -> int:
        """Number of all blocks."""
        return self.attached + self.own

    def __post_init__(self) -> None:
        self.attach(self.documents)

    def attach(self, documents: Sequence[tuple[int, int]]) -> None:
        """Attach these documents instead of the earlier ones."""
        self.documents = [*documents]
        self._runs = tuple((document, 0, blocks) for document, blocks in documents if blocks)
        self.attached = sum(blocks for _, blocks in documents)

    def runs(self, end: int) -> tuple[Run, ...]:
        """The `end` oldest blocks, at least those of the documents."""
        runs, own = self._runs, min(self.own, end - self.attached)
        if self.own_document is not None and own > 0:
            runs = (*runs, (self.own_document, self.own_first, self.own_first + own))
        return runs


@dataclass(frozen=True)
class Prefix:
    """The slots before a chunk for a memory of `blocks` blocks, the last `recent` of them recent
    (docs/appendix/method.md section 4).

    size: prefix slots of block_size + 1 positions each; the chunk starts after them. Stingy mapping
    gives old blocks slots from the left; a fixed distance gives them none. Chosen recent blocks
    take the right-most slots in order.
    """

    blocks: int
    recent: int
    size: int

    @classmethod
    def of(cls, blocks: int, own: int, top_k: int, fixed: bool) -> "Prefix":
        """The prefix for `blocks` blocks of which the last `own` are the session's own."""
        recent = min(own, top_k)
        return cls(blocks, recent, recent if fixed else min(blocks, top_k + 1))

    @property
    def old(self) -> int:
        """The number of blocks older than the recent ones."""
        return self.blocks - self.recent


class Candidates:
    """The blocks that a chunk may read, as of its beginning; a candidate is a block's number, 0 =
    the oldest.

    prefix: their slots; documents: number of blocks of attached documents, the oldest ones; old:
    runs of old blocks; locate: (document, block) of a candidate; fading: added to the scores of old
    blocks for their age, [old], or None. Attached documents have no age. The age of an
    own block is the number of blocks from it on; recent blocks are top_k or younger.
    """

    def __init__(
        self,
        blocks: SessionBlocks,
        settings: LookupSettings,
        *,
        fixed: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        top_k, recency = settings.top_k, settings.recency
        self.prefix = Prefix.of(blocks.count, blocks.own, top_k, fixed)
        self.documents = blocks.attached
        self.old = blocks.runs(self.prefix.old)
        self.locate = locator(blocks.runs(self.prefix.blocks))
        self.fading: Tensor | None = None
        old_own = self.prefix.old - self.documents
        if recency and old_own > 0:
            age = torch.arange(blocks.own, blocks.own - old_own, -1, dtype=dtype)
            fading = -recency * (age / top_k).log()
            self.fading = torch.nn.functional.pad(fading, (self.prefix.old - old_own, 0)).to(device)


FinishedBlocks = dict[int, tuple[Tensor, Tensor, Tensor]]
"""Finished blocks of each layer in stored form: k and v [n, Hkv, block_size, D], landmark keys [n,
Hkv, D].
"""


@dataclass
class _Layer:
    """Keys without positions, rotated keys, and values, [1, Hkv, capacity, D]."""

    k: Tensor
    rotated: Tensor
    v: Tensor
    recent_landmarks: Tensor  # (R, Hkv, D), of the session's latest own blocks


class OpenChunk:
    """The latest tokens of a session, before they are complete blocks: keys and values of `length`
    positions after the prefix, landmarks included.
    """

    def __init__(self, model: LandmarkReader, settings: LookupSettings) -> None:
        """At most settings.top_k landmark keys of own blocks are held here."""
        shape, dtype, device = model.shape, model.dtype, model.device
        self._shape, self._rope, self._recent = shape, model.rope, settings.top_k
        self.length = 0
        # content tokens of the last block once a document's end closes it early
        self.tail: int | None = None
        size = (1, shape.num_kv_heads, (settings.chunk_blocks + 1) * shape.stride, shape.head_dim)
        self._layers = []
        for _ in range(shape.num_layers):
            k, rotated, v = (torch.zeros(size, dtype=dtype, device=device) for _ in range(3))
            landmarks = k.new_zeros(0, shape.num_kv_heads, shape.head_dim)
            self._layers.append(_Layer(k, rotated, v, landmarks))
        # first position and number of the rows that `_turns` is for
        self._step: tuple[int, int] | None = None
        self.place(Prefix(0, 0, 0))

    def place(self, prefix: Prefix) -> None:
        """Move the chunk to the positions after this prefix, and rotate its keys accordingly."""
        self._prefix, self.base, self._step = prefix, prefix.size * self._shape.stride, None
        if self.length:
            for layer in self._layers:
                k = layer.k[:, :, : self.length]
                layer.rotated[:, :, : self.length] = self._rope.rotate(
                    k, *self._rope.angles(self.base, self.base + self.length, k)
                )

    def append(
        self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, memory: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Write k, v [1, Hkv, T, D] at the end of a layer; return the layer's rotated keys and its
        values [1, Hkv, length + T, D], and q scaled under every rotation, [1 + R, 1, H, T, D].

        The first rotation is for the chunk. Of the others (R = 0 without `memory`), rotation r <
        size scores a block in slot r; with a fixed distance, rotation `size` (the last) scores
        every old block. The caller adds T to `length` after all layers have their tokens.
        """
        layer, rows = self._layers[layer_idx], q.shape[2]
        first, end = self.length, self.length + rows
        cos, sin = self._rotations(rows, q)
        layer.k.narrow(2, first, rows).copy_(k)
        layer.v.narrow(2, first, rows).copy_(v)
        layer.rotated.narrow(2, first, rows).copy_(self._rope.rotate(k, cos[0], sin[0]))
        if not memory:
            cos, sin = cos[:1], sin[:1]
        rotated = self._rope.rotate(q * self._shape.head_dim**-0.5, cos, sin)
        return layer.rotated.narrow(2, 0, end), layer.v.narrow(2, 0, end), rotated

    def _rotations(self, rows: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [1 + R, 1, 1, T, D] of every rotation of the next `rows` queries, which all
        layers of a step share.
        """
        start = self.base + self.length
        if self._step != (start, rows):
            slots = [0, *(slot * self._shape.stride for slot in range(self._prefix.size))]
            turns = [self._rope.angles(start - slot, start - slot + rows, x) for slot in slots]
            distance = self._shape.old_block_distance
            if distance is not None and self._prefix.blocks:
                cos, sin = self._rope.angles(distance, distance + 1, x)
                turns.append((cos.expand(rows, -1), sin.expand(rows, -1)))
            cos, sin = (torch.stack(parts)[:, None, None] for parts in zip(*turns))
            self._step, self._turns = (start, rows), (cos, sin)
        return self._turns

    # The chunk's end

    def pad(self, positions: int) -> None:
        """Leave `positions` empty: the missing content of a document's last block."""
        for layer in self._layers:
            for x in (layer.k, layer.rotated, layer.v):
                x[:, :, self.length : self.length + positions] = 0
        self.length += positions

    def finished(self) -> FinishedBlocks:
        """The complete blocks in stored form, in the KV dtype and on the CPU: keys rotated by the
        offset in the block only.
        """
        b, size, dtype = self._shape.stride, self._shape.block_size, self._shape.kv_dtype
        n = self.length // b
        cos, sin = self._rope.angles(0, b, self._layers[0].k)
        parts = []
        for layer in self._layers:
            k, v = (x[0, :, : n * b].unflatten(1, (n, b)) for x in (layer.k, layer.v))
            parts += [self._rope.rotate(k, cos, sin).to(dtype), v.to(dtype)]
        # In one piece, since every copy from a device waits for it: (layers, K and V, n, Hkv, b,
        # D).
        stored = torch.stack(parts).to("cpu").unflatten(0, (-1, 2)).transpose(2, 3)
        content, landmarks = (
            stored[..., :size, :].contiguous(),
            stored[:, 0, :, :, size].contiguous(),
        )
        return {index: (*content[index], landmarks[index]) for index in range(len(self._layers))}

    def drop_finished(self, blocks: FinishedBlocks) -> None:
        """Drop the blocks that the memory holds now; their landmarks stay as recent ones."""
        b = self._shape.stride
        moved = self.length // b * b
        rest = self.length - moved
        for index, layer in enumerate(self._layers):
            for x in (layer.k, layer.v):
                x[:, :, :rest] = x[:, :, moved : self.length].clone()
            self.remember(index, blocks[index][2])
        self.length = rest

    def remember(self, layer_idx: int, landmarks: Tensor) -> None:
        """Note the landmark keys [n, Hkv, D] of the session's newest own blocks."""
        layer = self._layers[layer_idx]
        kept = torch.cat([layer.recent_landmarks.to(landmarks.dtype), landmarks.to(layer.k.device)])
        layer.recent_landmarks = kept[max(0, len(kept) - self._recent) :]

    def recent_landmarks(self, layer_idx: int) -> Tensor:
        """Landmark keys [R, Hkv, D] of the latest own blocks, oldest first."""
        return self._layers[layer_idx].recent_landmarks
