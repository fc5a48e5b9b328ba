"""Landmark attention over a chunk and a memory: the seam between a model and its store, in
position-free q, k, v.

One `MemoryAttention` serves one session. For every layer it keeps the open chunk's keys and values,
and a layer step goes: local scores and the gate; a search for the rows whose gate is open; a lease
on the distinct units found; one attention over chunk and slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from memstore.block import BlockKey
from memstore.errors import BudgetExceeded
from memstore.kernels import api
from memstore.kernels.api import NEG, LocalAttention
from memstore.model.config import ModelConfig
from memstore.model.rotary import Prefix, Rope
from memstore.model.selection import Selection, in_range, merge, select
from memstore.store.memory_store import MemoryStore
from memstore.tiers.base import Lease

Blocks = dict[int, tuple[Tensor, Tensor, Tensor]]
"""Finished blocks of each layer in stored form: k and v [n, Hkv, block_size, D], landmark keys [n,
Hkv, D].
"""

_GIVEN_BACK = 0.1  # of attention mass, by a row that skips its lookup
_FEW = 256  # units of a step that are looked up without tensors


@dataclass
class Lookups:
    """Lookups of (token, head, layer): done, and skipped because the gate was below the cutoff."""

    done: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class Read:
    """One unit read by the last row of a step: its attention mass, and the tier that had it."""

    layer: int
    head: int
    document: int
    block: int
    mass: float
    tier: str


class Observer(Protocol):
    """Told about every step while it runs (memstore.model.predict)."""

    def attended(self, layer: int, local: LocalAttention) -> None:
        """A layer has attended to its chunk, and will read memory next."""

    def missed(self) -> None:
        """A lease had to fetch some of its units."""


@dataclass
class Memory:
    """What a session remembers, oldest first: attached documents, then its own blocks, under an id
    of the store.
    """

    documents: list[tuple[int, int]] = field(default_factory=list)  # (document id, blocks)
    own_document: int | None = None
    own_first: int = 0  # own blocks before this one were let go
    own_end: int = 0

    @property
    def own(self) -> int:
        """How many blocks of its own the session has."""
        return self.own_end - self.own_first

    @property
    def blocks(self) -> int:
        """How many blocks there are in all."""
        return sum(blocks for _, blocks in self.documents) + self.own

    def scope(self, end: int) -> tuple[tuple[int, int, int], ...]:
        """Candidates 0..end as (document, first, end) runs."""
        runs = [(document, 0, blocks) for document, blocks in self.documents if blocks]
        if self.own_document is not None and self.own:
            runs.append((self.own_document, self.own_first, self.own_end))
        kept, left = [], end
        for document, first, last in runs:
            take = min(left, last - first)
            if take > 0:
                kept.append((document, first, first + take))
            left -= take
        return tuple(kept)


@dataclass(frozen=True)
class _Open:
    """The rows of a layer step whose gate is open: rows [H, T] bool, how many, and the heads that
    have one.
    """

    rows: Tensor
    count: int
    heads: list[int]

    @classmethod
    def of(cls, rows: Tensor) -> "_Open":
        """Count rows [H, T]."""
        counts = [sum(of_head) for of_head in rows.tolist()]
        return cls(rows, sum(counts), [head for head, count in enumerate(counts) if count])


@dataclass
class _Layer:
    """The open chunk of one layer: keys without position and rotated, and values, [1, Hkv,
    capacity, D].
    """

    k: Tensor
    rotated: Tensor
    v: Tensor
    recent_landmarks: Tensor  # (R, Hkv, D), of the session's latest own blocks


class MemoryAttention:
    """Attention of one session over its open chunk and its memory."""

    def __init__(
        self,
        config: ModelConfig,
        rope: Rope,
        cmt_keys: Sequence[Tensor] | None,
        store: MemoryStore,
        memory: Memory,
        *,
        retrieve: bool = True,
        on_read: Callable[[list[Read]], None] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """retrieve=False: only the recent blocks are read, and nothing is searched (the default way
        to ingest).

        dtype, device: of the queries, keys and values to come; the store's leases must be there
        too. Finished blocks have the config's kv_dtype and are on the CPU.
        """
        self.config, self.rope, self.cmt_keys, self.store, self.memory = (
            config,
            rope,
            cmt_keys,
            store,
            memory,
        )
        self.retrieve, self.on_read = retrieve, on_read
        self.lookups = Lookups()
        self.read_all_rows = False  # report what every row reads, not only a step's last
        self.observer: Observer | None = None
        self.length = 0  # positions of the open chunk, landmarks included
        # content tokens of the last block once a document's end closes it early
        self.tail: int | None = None
        self._fixed = config.old_block_position == "fixed"
        # of landmark scores: they choose, and weigh blocks
        self._exact = torch.promote_types(dtype, torch.float32)
        self._layers = [self._empty(dtype, torch.device(device)) for _ in range(config.num_layers)]
        # first position and number of the rows that `_turns` is for
        self._step: tuple[int, int] | None = None
        self.start_chunk()

    def _empty(self, dtype: torch.dtype, device: torch.device) -> _Layer:
        shape = (
            1,
            self.config.num_kv_heads,
            (self.config.chunk_blocks + 1) * self.config.stride,
            self.config.head_dim,
        )
        k, rotated, v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(3))
        return _Layer(k, rotated, v, k.new_zeros(0, self.config.num_kv_heads, self.config.head_dim))

    def start_chunk(self) -> None:
        """Place the open chunk behind the memory as it is now."""
        self._prefix = Prefix.of(
            self.memory.blocks, self.memory.own, self.config.top_k, self._fixed
        )
        self._base = self._prefix.size * self.config.stride
        self._old_scope = self.memory.scope(self._prefix.old)
        self._scope = self.memory.scope(self._prefix.blocks)
        self._bias = self._recency()
        self._step = None
        if self.length:
            for layer in self._layers:
                k = layer.k[:, :, : self.length]
                layer.rotated[:, :, : self.length] = self.rope.rotate(
                    k, *self.rope.angles(self._base, self._base + self.length, k)
                )

    def _recency(self) -> Tensor | None:
        """What is added to the scores of old blocks for their age: [candidates], 0 for attached
        documents, which have none. The age of a block is how many came after it, itself included;
        the recent ones are top_k or younger.
        """
        old_own = self._prefix.old - (self.memory.blocks - self.memory.own)
        if not self.config.recency or old_own <= 0:
            return None
        age = torch.arange(self.memory.own, self.memory.own - old_own, -1, dtype=self._exact)
        fading = -self.config.recency * (age / self.config.top_k).log()
        return torch.nn.functional.pad(fading, (self._prefix.old - old_own, 0)).to(
            self._layers[0].k.device
        )

    # One layer step

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append k, v [1, Hkv, T, D] to the layer's chunk and attend with q -> [1, H, T, D]; all
        position-free.

        The caller advances `length` by T when every layer has attended (`Session` does).
        """
        searched = self.retrieve and layer_idx in (self.config.memory_layers or ())
        candidates = self._prefix.blocks if searched else self._prefix.recent
        rotated, local = self._local(layer_idx, q, k, v, memory=candidates > 0)
        if self.observer is not None:
            self.observer.attended(layer_idx, local)
        if candidates == 0:
            return local.output
        local, opened = self._gate(local)
        if opened.count == 0:
            return local.output
        return self._attend_memory(layer_idx, rotated, local, opened, searched)

    def guess(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> list[BlockKey]:
        """The old units that `attend` would read with these q, k, v, block by block; nothing is
        kept or counted.

        For a layer that has not attended to these positions yet. Raises DocumentNotFound.
        """
        if (
            not self.retrieve
            or not self._old_scope
            or layer_idx not in (self.config.memory_layers or ())
        ):
            return []
        rotated, local = self._local(layer_idx, q, k, v, memory=True)
        opened = self._opened(local)
        if opened.count == 0:
            return []
        near = self._recent_scores(layer_idx, rotated) if self._prefix.recent else None
        chosen = self._search(layer_idx, rotated, near, opened).candidates
        group = self.config.num_heads // self.config.num_kv_heads
        wanted = {
            (candidate, head // group)
            for head, of_head in enumerate(chosen.flatten(1).tolist())
            for candidate in of_head
            if 0 <= candidate < self._prefix.old
        }
        return [
            BlockKey(document, layer_idx, block, head)
            for candidate, head in sorted(wanted)
            for document, block in [self._locate(candidate)]
        ]

    def _local(
        self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, memory: bool
    ) -> tuple[Tensor, LocalAttention]:
        """Write k, v into the layer's chunk behind what is there, and attend to the chunk.

        Returns the scaled queries under every rotation for memory [R, 1, H, T, D] (R = 0 without
        `memory`), and the result.
        """
        layer, rows = self._layers[layer_idx], q.shape[2]
        first, end = self.length, self.length + rows
        self._reserve(layer, end)
        cos, sin = self._rotations(rows, q)
        layer.k.narrow(2, first, rows).copy_(k)
        layer.v.narrow(2, first, rows).copy_(v)
        layer.rotated.narrow(2, first, rows).copy_(self.rope.rotate(k, cos[0], sin[0]))
        if not memory:
            cos, sin = cos[:1], sin[:1]
        rotated = self.rope.rotate(q * self.config.head_dim**-0.5, cos, sin)
        local = api.local_attention(
            rotated[0],
            layer.rotated.narrow(2, 0, end),
            layer.v.narrow(2, 0, end),
            self.config.block_size,
            k_cmt=None if self.cmt_keys is None else self.cmt_keys[layer_idx],
            last_length=self.tail,
        )
        return rotated[1:], local

    def _reserve(self, layer: _Layer, end: int) -> None:
        missing = end - layer.k.shape[2]
        if missing > 0:
            grow = (0, 0, 0, max(missing, layer.k.shape[2]))
            layer.k, layer.rotated, layer.v = (
                torch.nn.functional.pad(x, grow) for x in (layer.k, layer.rotated, layer.v)
            )

    def _rotations(self, rows: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [1 + R, 1, 1, T, D] of every rotation of the next `rows` queries; every layer
        of a step has the same.

        The first is for the chunk. Of the others, rotation r < size scores a block in slot r; with
        a fixed distance, rotation `size` (the last) scores every old block.
        """
        start = self._base + self.length
        if self._step != (start, rows):
            slots = [0, *(slot * self.config.stride for slot in range(self._prefix.size))]
            turns = [self.rope.angles(start - slot, start - slot + rows, x) for slot in slots]
            if self._fixed and self._prefix.blocks:
                distance = self.config.old_block_distance
                cos, sin = self.rope.angles(distance, distance + 1, x)
                turns.append((cos.expand(rows, -1), sin.expand(rows, -1)))
            cos, sin = (torch.stack(parts)[:, None, None] for parts in zip(*turns))
            self._step, self._turns = (start, rows), (cos, sin)
        return self._turns

    def _opened(self, local: LocalAttention) -> _Open:
        """The rows whose gate is not below the cutoff; without a context miss token, all."""
        if self.cmt_keys is None:
            every = torch.ones_like(local.gate[0], dtype=torch.bool)
            return _Open(every, every.numel(), list(range(self.config.num_heads)))
        return _Open.of(local.gate[0] >= self.config.cmt_cutoff)

    def _gate(self, local: LocalAttention) -> tuple[LocalAttention, _Open]:
        """Close the rows below the cutoff, and count.

        What a closed row would have given to memory, up to _GIVEN_BACK, goes to what it has seen.
        """
        opened, rows = self._opened(local), local.gate[0].numel()
        self.lookups.done += opened.count
        self.lookups.skipped += rows - opened.count
        if opened.count < rows:
            closed = local.gate.masked_fill(opened.rows, 0.0)
            seen = (1 - closed.clamp(max=_GIVEN_BACK))[..., None].to(local.output.dtype)
            local = LocalAttention(local.output / seen, local.gate - closed, local.lse)
        return local, opened

    def _attend_memory(
        self, layer_idx: int, rotated: Tensor, local: LocalAttention, opened: _Open, search: bool
    ) -> Tensor:
        """Read memory for the tokens with an open head; the rest keep their local output. rotated:
        [R, 1, H, T, D].
        """
        rows = rotated.shape[3]
        if rows == 1 or opened.count == opened.rows.numel():
            return self._read(layer_idx, rotated, local, opened, search)
        tokens = opened.rows.any(0).nonzero().flatten()
        if len(tokens) == rows:
            return self._read(layer_idx, rotated, local, opened, search)
        part = LocalAttention(
            local.output[:, :, tokens], local.gate[:, :, tokens], local.lse[:, :, tokens]
        )
        output = local.output.clone()
        output[:, :, tokens] = self._read(
            layer_idx,
            rotated[:, :, :, tokens],
            part,
            replace(opened, rows=opened.rows[:, tokens]),
            search,
            is_last=bool(tokens[-1] == rows - 1),
        )
        return output

    def _read(
        self,
        layer_idx: int,
        rotated: Tensor,
        local: LocalAttention,
        opened: _Open,
        search: bool,
        is_last: bool = True,
    ) -> Tensor:
        near = self._recent_scores(layer_idx, rotated) if self._prefix.recent else None
        if search:
            chosen = self._search(layer_idx, rotated, near, opened)
            first = 0
        else:
            recent = torch.arange(self._prefix.recent, device=rotated.device).expand(
                rotated.shape[2], 1, -1
            )
            chosen, first = Selection(recent, None), self._prefix.old
        slot_of, scores = self._place(layer_idx, chosen, first, rotated, near)
        candidates = chosen.candidates + first if first else chosen.candidates
        of, end = opened.heads[0], opened.heads[-1] + 1
        if end - of == self.config.num_heads:
            return self._attend_units(
                layer_idx, rotated, local, candidates, slot_of, scores, is_last
            )
        part = LocalAttention(local.output[:, of:end], local.gate[:, of:end], local.lse[:, of:end])
        output = local.output.clone()
        output[:, of:end] = self._attend_units(
            layer_idx,
            rotated[:, :, of:end],
            part,
            candidates[of:end],
            slot_of[of:end],
            scores[of:end],
            is_last,
            of,
        )
        return output

    def _recent_scores(self, layer_idx: int, rotated: Tensor) -> Tensor:
        """Landmark scores [P, H, T, R] of every recent block in every slot."""
        keys = self._layers[layer_idx].recent_landmarks.to(self._exact)  # (R, Hkv, D)
        keys = keys.permute(1, 2, 0).repeat_interleave(
            self.config.num_heads // self.config.num_kv_heads, 0
        )  # (H, D, R)
        return rotated[: self._prefix.size, 0].to(self._exact) @ keys

    def _search(
        self, layer_idx: int, rotated: Tensor, near: Tensor | None, opened: _Open
    ) -> Selection:
        config, prefix = self.config, self._prefix
        shared = config.granularity != "per_token_per_head"
        # every old block is scored in one place
        query = rotated[prefix.size if self._fixed else 0, 0]
        hits = self.store.search_landmarks(
            layer_idx,
            query,
            self._old_scope,
            config.top_k,
            return_lse=shared,
            open_rows=opened.rows,
            bias=self._bias,
        )
        scores, candidates, lse = hits.scores.to(self._exact), hits.candidates, hits.lse
        if near is not None:
            own_slots = torch.arange(prefix.size - prefix.recent, prefix.size, device=near.device)
            recent = near[own_slots].diagonal(dim1=0, dim2=3)  # (H, T, R): each at its own slot
            scores, candidates = merge(scores, candidates, recent, prefix.old, config.top_k)
            if lse is not None:
                lse = torch.logaddexp(lse.to(self._exact), recent.logsumexp(-1))
        # where no slot depends on it, the order among units is free
        if self._fixed and near is None and not shared:
            candidates = in_range(scores, candidates, config.score_range)
            group = config.num_heads // config.num_kv_heads
            searched_heads = group * len({head // group for head in opened.heads})
            if opened.count < searched_heads * opened.rows.shape[1]:
                candidates = candidates.masked_fill(~opened.rows[..., None], -1)
            return Selection(candidates, scores)
        return select(
            config.granularity,
            scores,
            candidates,
            lse,
            opened.rows,
            config.num_kv_heads,
            config.score_range,
        )

    def _place(
        self, layer_idx: int, chosen: Selection, first: int, rotated: Tensor, near: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The rotation of every chosen unit [H, T or 1, K], and its landmark score there for every
        row [H, T, K].
        """
        prefix, rows = self._prefix, rotated.shape[3]
        if self._fixed and near is None and chosen.scores is not None:
            return torch.full_like(chosen.candidates, prefix.size), chosen.scores
        candidates = chosen.candidates + first
        present = chosen.candidates >= 0
        is_recent = present & (candidates >= prefix.old)
        rank = torch.arange(candidates.shape[-1], device=candidates.device)
        # recent ones from here on, this one included
        later = is_recent.flip(-1).cumsum(-1).flip(-1)
        slots = torch.where(is_recent, prefix.size - later, prefix.size if self._fixed else rank)
        slots = slots.clamp(0, rotated.shape[0] - 1)
        wide = candidates.expand(-1, rows, -1)
        h = torch.arange(wide.shape[0], device=wide.device)[:, None, None]
        t = torch.arange(rows, device=wide.device)[None, :, None]
        if self._fixed and chosen.scores is not None:
            scores = chosen.scores
        elif prefix.old and (present & ~is_recent).any():
            keys = self.store.landmark_keys(
                layer_idx, self._old_scope, wide.where(wide < prefix.old, -1)
            ).to(self._exact)
            queries = rotated[slots.expand(-1, rows, -1), 0, h, t]  # (H, T, K, D)
            scores = (queries * keys).sum(-1)
            if self._bias is not None:
                scores = scores + self._bias[wide.clamp(0, prefix.old - 1)]
        else:
            scores = rotated.new_full(wide.shape, NEG, dtype=self._exact)
        if near is not None and is_recent.any():
            at_slot = near[
                slots.clamp(max=prefix.size - 1).expand(-1, rows, -1),
                h,
                t,
                (wide - prefix.old).clamp(min=0),
            ]
            scores = torch.where(is_recent.expand_as(wide), at_slot, scores)
        return slots, scores

    # Units

    def _attend_units(
        self,
        layer_idx: int,
        rotated: Tensor,
        local: LocalAttention,
        candidates: Tensor,
        rotations: Tensor,
        scores: Tensor,
        is_last: bool,
        first_head: int = 0,
    ) -> Tensor:
        """Lease the distinct units and attend; if they exceed the budget, in halves of the rows:
        slower and right.

        For the heads from first_head on that the tensors have: rotated [R, 1, h, T, D], candidates
        [h, T or 1, K].
        """
        try:
            lease, slots = self._lease(layer_idx, candidates, first_head)
        except BudgetExceeded:
            rows = candidates.shape[1]
            if rows == 1:
                raise
            halves = []
            for part in (slice(0, rows // 2), slice(rows // 2, rows)):
                piece = LocalAttention(
                    local.output[:, :, part], local.gate[:, :, part], local.lse[:, :, part]
                )
                halves.append(
                    self._attend_units(
                        layer_idx,
                        rotated[:, :, :, part],
                        piece,
                        candidates[:, part],
                        rotations[:, part],
                        scores[:, part],
                        is_last and part.stop == rows,
                        first_head,
                    )
                )
            return torch.cat(halves, 2)
        with lease:
            recording = self.on_read is not None and (is_last or self.read_all_rows)
            output, mass = api.memory_attention(
                rotated,
                lease.k,
                lease.v,
                self.store.slot_lengths,
                slots[None],
                rotations[None],
                scores[None],
                local,
                gated=self.cmt_keys is not None,
                return_mass=recording,
            )
            if recording and mass is not None:
                for row in range(0 if self.read_all_rows else mass.shape[2] - 1, mass.shape[2]):
                    own = min(row, candidates.shape[1] - 1)
                    self._record(
                        layer_idx,
                        candidates[:, own],
                        mass[0, :, row],
                        slots[:, own],
                        lease,
                        first_head,
                    )
        return output

    def _lease(self, layer_idx: int, candidates: Tensor, first_head: int) -> tuple[Lease, Tensor]:
        """A lease on the distinct units of candidates [h, T or 1, K] of the heads from first_head
        on, and their slots in the same shape (-1 = none).
        """
        if candidates.numel() <= _FEW:
            return self._lease_few(layer_idx, candidates, first_head)
        kv_heads = self.config.num_kv_heads
        head = torch.arange(first_head, first_head + len(candidates), device=candidates.device)[
            :, None, None
        ]
        kv_head = head // (self.config.num_heads // kv_heads)
        present = candidates >= 0
        units, inverse = torch.where(present, candidates * kv_heads + kv_head, -1).unique(
            return_inverse=True
        )
        absent = int(len(units) > 0 and units[0] < 0)
        keys = [
            BlockKey(document, layer_idx, block, unit % kv_heads)
            for unit in units[absent:].tolist()
            for document, block in [self._locate(unit // kv_heads)]
        ]
        lease = self._leased(layer_idx, keys)
        slots = torch.nn.functional.pad(lease.slots, (absent, 0), value=-1).to(inverse.device)
        return lease, slots[inverse]

    def _lease_few(
        self, layer_idx: int, candidates: Tensor, first_head: int
    ) -> tuple[Lease, Tensor]:
        """The same without tensors: a decoding step has few units, and every call costs more than
        the units do.
        """
        group = self.config.num_heads // self.config.num_kv_heads
        wanted = [
            (candidate, head // group) if candidate >= 0 else None
            for head, of_head in enumerate(candidates.flatten(1).tolist(), first_head)
            for candidate in of_head
        ]
        units: dict[tuple[int, int] | None, int] = dict.fromkeys(wanted, -1)
        distinct = [unit for unit in units if unit is not None]
        keys = [
            BlockKey(document, layer_idx, block, head)
            for candidate, head in distinct
            for document, block in [self._locate(candidate)]
        ]
        lease = self._leased(layer_idx, keys)
        if len(distinct) == len(wanted):
            return lease, lease.slots.to(candidates.device).view(candidates.shape)
        units.update(zip(distinct, lease.held))
        return lease, torch.tensor([units[unit] for unit in wanted], device=candidates.device).view(
            candidates.shape
        )

    def _leased(self, layer_idx: int, units: list[BlockKey]) -> Lease:
        lease = self.store.lease(units)
        if self.observer is not None and lease.fetched:
            self.observer.missed()
        return lease

    def _locate(self, candidate: int) -> tuple[int, int]:
        """(document, block) of a candidate."""
        for document, first, end in self._scope:
            if candidate < end - first:
                return document, first + candidate
            candidate -= end - first
        raise IndexError(candidate)

    def _record(
        self,
        layer_idx: int,
        candidates: Tensor,
        mass: Tensor,
        slots: Tensor,
        lease: Lease,
        first_head: int,
    ) -> None:
        reads = [
            Read(
                layer_idx,
                head,
                *self._locate(candidate),
                weight,
                lease.fetched.get(slot, lease.tier),
            )
            for head, row in enumerate(
                zip(candidates.tolist(), mass.tolist(), slots.tolist()), first_head
            )
            for candidate, weight, slot in zip(*row)
            if candidate >= 0 and weight > 0
        ]
        if reads and self.on_read is not None:
            self.on_read(reads)

    # The chunk's end

    def pad(self, positions: int) -> None:
        """Leave `positions` of the open chunk empty: the missing content of a document's last
        block.
        """
        for layer in self._layers:
            self._reserve(layer, self.length + positions + 1)
            for x in (layer.k, layer.rotated, layer.v):
                x[:, :, self.length : self.length + positions] = 0
        self.length += positions

    def finished(self, kv_dtype: torch.dtype) -> Blocks:
        """The complete blocks of the open chunk in stored form, on the CPU: keys rotated by the
        offset in the block only.
        """
        b, size = self.config.stride, self.config.block_size
        n = self.length // b
        cos, sin = self.rope.angles(0, b, self._layers[0].k)
        parts = []
        for layer in self._layers:
            k, v = (x[0, :, : n * b].unflatten(1, (n, b)) for x in (layer.k, layer.v))
            parts += [self.rope.rotate(k, cos, sin).to(kv_dtype), v.to(kv_dtype)]
        # In one piece, since every copy from a device waits for it: (layers, K and V, n, Hkv, b,
        # D).
        stored = torch.stack(parts).to("cpu").unflatten(0, (-1, 2)).transpose(2, 3)
        content, landmarks = (
            stored[..., :size, :].contiguous(),
            stored[:, 0, :, :, size].contiguous(),
        )
        return {index: (*content[index], landmarks[index]) for index in range(len(self._layers))}

    def drop_finished(self, blocks: Blocks) -> None:
        """Let the finished blocks go from the open chunk (the memory has them now) and start the
        next chunk behind them.
        """
        b = self.config.stride
        moved = self.length // b * b
        rest = self.length - moved
        for index, layer in enumerate(self._layers):
            for x in (layer.k, layer.v):
                x[:, :, :rest] = x[:, :, moved : self.length].clone()
            self.remember(index, blocks[index][2])
        self.length = rest
        self.start_chunk()

    def remember(self, layer_idx: int, landmarks: Tensor) -> None:
        """Note the landmark keys [n, Hkv, D] of the session's newest own blocks; only the latest
        top_k are kept.
        """
        layer = self._layers[layer_idx]
        kept = torch.cat([layer.recent_landmarks.to(landmarks.dtype), landmarks.to(layer.k.device)])
        layer.recent_landmarks = kept[max(0, len(kept) - self.config.top_k) :]
