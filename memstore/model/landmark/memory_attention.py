"""A landmark model, and its attention over a chunk and a memory: the seam between a model and a
store, in position-free q, k, v.

One `MemoryAttention` serves one session. A layer step goes: local scores and the gate; a search for
the rows whose gate is open; a lease on the distinct KV blocks found; one attention over chunk and
slots.

Speculative prefetch: what the next lookup will read is on its way before it asks. Layer n's state
without its memory, taken through the rest of layer n and the projections of layer n + 1, gives
nearly the queries that layer n + 1 will search with. A prediction never changes a result: it only
tells the tiers what to fetch.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from memstore.block import BlockKey
from memstore.errors import BudgetExceeded, MemstoreError
from memstore.kernels import api
from memstore.kernels.api import LocalAttention
from memstore.model.adapter import ModelAdapter
from memstore.model.landmark.block_lookup import (
    BlockRequest,
    Lookup,
    OpenRows,
    Selection,
    lease_requested,
    requested_reads,
)
from memstore.model.landmark.open_chunk import Candidates, FinishedBlocks, OpenChunk
from memstore.model.lookup_settings import LookupSettings
from memstore.model.rotary import Rope
from memstore.model.session import Lookups, OnRead, SessionBlocks
from memstore.store.memory_store import MemoryStore
from memstore.tiers.slots import Lease


class LandmarkAdapter(ModelAdapter):
    """A reader whose every token and head looks blocks up by trained landmark keys."""

    rope: Rope
    # by layer [Hkv, D], the context miss token's key at position -1, whose share of attention is
    # the gate; None for a reader without a gate
    cmt_keys: Sequence[Tensor] | None
    # [L, H, D], what rows that skip their lookup get in its place; None = what they would have
    # given to memory goes to what they have seen
    cmt_values: Tensor | None
    landmark_id: int  # read after every block_size content tokens: its key is the landmark key

    def question_ids(self, question: str) -> list[int]:
        """The ids of a question, as typed; a model with a template overrides this."""
        return self.tokenizer.encode(question.rstrip())

    def next_projections(
        self, layer_idx: int, states: Tensor, attended: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """q, k, v of layer_idx + 1, position-free, if layer_idx, which began with states [B, T,
        hidden_size], attended to `attended` [B, H, T, D]: what speculative prefetch searches with.
        None for a model that cannot tell; then nothing is prefetched.
        """
        return None


GIVEN_BACK = 0.1  # of attention mass, by a row that skips its lookup


class Observer(Protocol):
    """Called in every step while it runs, as SpeculativePrefetch is."""

    def attended(self, layer: int, local: LocalAttention) -> None:
        """A layer has attended to its chunk, and will read memory next."""

    def missed(self) -> None:
        """A lease had to fetch some of its units."""


class MemoryAttention:
    """Attention of one session over its open chunk and its memory.

    on_read: called with what the last row of every step reads, or every row with read_all_rows;
    observer: called in every step.
    """

    def __init__(
        self,
        model: LandmarkAdapter,
        settings: LookupSettings,
        store: MemoryStore,
        blocks: SessionBlocks,
        *,
        retrieve: bool = True,
    ) -> None:
        """retrieve=False: only the recent blocks are read, nothing is searched, and rows that skip
        get no cmt_values (the default way to ingest). The store's leases must be on the model's
        device. Finished blocks have the shape's kv_dtype and are on the CPU.
        """
        self.shape, self.store, self.retrieve = model.shape, store, retrieve
        self.cmt_keys, self.cmt_values = model.cmt_keys, model.cmt_values
        self.on_read: OnRead | None = None
        self.read_all_rows = False
        self.observer: Observer | None = None
        self.blocks = blocks
        self.lookups = Lookups()
        shape, dtype = model.shape, model.dtype
        self._device = model.device
        self._exact = torch.promote_types(dtype, torch.float32)
        self.chunk = OpenChunk(
            shape,
            model.rope,
            blocks=settings.chunk_blocks,
            recent=settings.top_k,
            dtype=dtype,
            device=self._device,
        )
        self.lookup = Lookup(
            shape, settings, store, self.chunk, self._candidates(settings), self._exact
        )
        self.start_chunk()

    def locate(self, candidate: int) -> tuple[int, int]:
        """(document, block) of a candidate."""
        return self.lookup.candidates.locate(candidate)

    def _candidates(self, settings: LookupSettings) -> Candidates:
        return Candidates(
            self.blocks,
            top_k=settings.top_k,
            fixed=self.shape.old_block_distance is not None,
            recency=settings.recency,
            dtype=self._exact,
            device=self._device,
        )

    def start_chunk(self) -> None:
        """Place the open chunk behind the memory as it is now."""
        self.lookup.candidates = self._candidates(self.lookup.settings)
        self.chunk.place(self.lookup.candidates.prefix)

    def drop_finished(self, blocks: FinishedBlocks) -> None:
        """Let the finished blocks go from the open chunk (the memory has them now) and start the
        next chunk behind them.
        """
        self.chunk.drop_finished(blocks)
        self.start_chunk()

    # One layer step

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append k, v [1, Hkv, T, D] to the layer's chunk and attend with q -> [1, H, T, D]; all
        position-free.

        The caller advances the chunk by T when every layer has attended (`ChunkSession` does).
        """
        prefix = self.lookup.candidates.prefix
        searched = self.retrieve and layer_idx in self.shape.memory_layers
        candidates = prefix.blocks if searched else prefix.recent
        rotated, local = self._local(layer_idx, q, k, v, memory=candidates > 0)
        if self.observer is not None:
            self.observer.attended(layer_idx, local)
        if candidates == 0:
            return local.output
        local, opened = self._gate(layer_idx, local)
        if opened.count == 0:
            return local.output
        return self._attend_memory(layer_idx, rotated, local, opened, searched)

    def predicted_blocks(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> list[BlockKey]:
        """The old units that `attend` would read with these q, k, v, block by block; nothing is
        kept or counted.

        For a layer that has not attended to these positions yet. Raises DocumentNotFound.
        """
        candidates, group = self.lookup.candidates, self.shape.group
        if not (self.retrieve and candidates.old and layer_idx in self.shape.memory_layers):
            return []
        rotated, local = self._local(layer_idx, q, k, v, memory=True)
        opened = self._opened(local)
        if opened.count == 0:
            return []
        near = self.lookup.recent_scores(layer_idx, rotated)
        chosen = self.lookup.search(layer_idx, rotated, near, opened).candidates
        wanted = {
            (candidate, head // group)
            for head, of_head in enumerate(chosen.flatten(1).tolist())
            for candidate in of_head
            if 0 <= candidate < candidates.prefix.old
        }
        return [
            BlockKey(document, layer_idx, block, head)
            for candidate, head in sorted(wanted)
            for document, block in [candidates.locate(candidate)]
        ]

    def _local(
        self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, memory: bool
    ) -> tuple[Tensor, LocalAttention]:
        """Write k, v into the layer's chunk, and attend to the chunk; the queries under every
        rotation for memory [R, 1, H, T, D] (R = 0 without `memory`), and the result.
        """
        keys, values, rotated = self.chunk.append(layer_idx, q, k, v, memory=memory)
        local = api.local_attention(
            rotated[0],
            keys,
            values,
            self.shape.block_size,
            k_cmt=None if self.cmt_keys is None else self.cmt_keys[layer_idx],
            last_length=self.chunk.tail,
        )
        return rotated[1:], local

    def _opened(self, local: LocalAttention) -> OpenRows:
        """The rows whose gate is not below the cutoff; without a context miss token, all."""
        if self.cmt_keys is None:
            every = torch.ones_like(local.gate[0], dtype=torch.bool)
            return OpenRows(every, every.numel(), list(range(self.shape.num_heads)))
        return OpenRows.of(local.gate[0] >= self.lookup.settings.cmt_cutoff)

    def _gate(self, layer_idx: int, local: LocalAttention) -> tuple[LocalAttention, OpenRows]:
        """Close the rows below the cutoff, and count."""
        opened, rows = self._opened(local), local.gate[0].numel()
        self.lookups.done += opened.count
        self.lookups.skipped += rows - opened.count
        if opened.count < rows:
            local = self._close_rows(layer_idx, local, opened.rows)
        return local, opened

    def _attend_memory(
        self, layer_idx: int, rotated: Tensor, local: LocalAttention, opened: OpenRows, search: bool
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
        opened: OpenRows,
        search: bool,
        is_last: bool = True,
    ) -> Tensor:
        """Choose, place and attend; heads without an open row keep their local output."""
        near = self.lookup.recent_scores(layer_idx, rotated)
        if search:
            chosen = self.lookup.search(layer_idx, rotated, near, opened)
        else:
            prefix = self.lookup.candidates.prefix
            recent = torch.arange(prefix.old, prefix.blocks, device=rotated.device)
            chosen = Selection(recent.expand(rotated.shape[2], 1, -1), None)
        wanted = BlockRequest(layer_idx, chosen.candidates, 0, self.shape.group)
        places, scores = self.lookup.place(layer_idx, chosen, rotated, near)
        of, end = opened.heads[0], opened.heads[-1] + 1
        if end - of == self.shape.num_heads:
            return self._attend_requested(wanted, rotated, local, places, scores, is_last)
        part = LocalAttention(local.output[:, of:end], local.gate[:, of:end], local.lse[:, of:end])
        output = local.output.clone()
        output[:, of:end] = self._attend_requested(
            replace(wanted, candidates=chosen.candidates[of:end], first_head=of),
            rotated[:, :, of:end],
            part,
            places[of:end],
            scores[of:end],
            is_last,
        )
        return output

    def _close_rows(self, layer_idx: int, local: LocalAttention, kept: Tensor) -> LocalAttention:
        """Attention whose rows other than `kept` [H, T] read no memory. Where the layer has
        cmt_values and memory is searched, they take these in its place; elsewhere what they would
        have given to memory, up to GIVEN_BACK, goes to what they have seen.
        """
        closed = local.gate.masked_fill(kept, 0.0)
        if self.cmt_values is not None and self.retrieve:
            values = self.cmt_values[layer_idx, :, None]
            given = (closed[..., None] * values).to(local.output.dtype)
            return LocalAttention(local.output + given, local.gate - closed, local.lse)
        seen = (1 - closed.clamp(max=GIVEN_BACK))[..., None].to(local.output.dtype)
        return LocalAttention(local.output / seen, local.gate - closed, local.lse)

    def _attend_requested(
        self,
        wanted: BlockRequest,
        rotated: Tensor,
        local: LocalAttention,
        places: Tensor,
        scores: Tensor,
        is_last: bool,
    ) -> Tensor:
        """Lease the distinct KV blocks and attend; if they exceed the budget, in halves of the
        rows: slower and right.

        For the heads of `wanted`: rotated [R, 1, h, T, D], places [h, T or 1, K], scores [h, T, K].
        """
        try:
            lease, slots = lease_requested(self._lease, wanted, self.locate)
        except BudgetExceeded:
            rows = wanted.candidates.shape[1]
            if rows == 1:
                raise
            halves = []
            for part in (slice(0, rows // 2), slice(rows // 2, rows)):
                halves.append(
                    self._attend_requested(
                        wanted.part(part),
                        rotated[:, :, :, part],
                        LocalAttention(
                            local.output[:, :, part], local.gate[:, :, part], local.lse[:, :, part]
                        ),
                        places[:, part],
                        scores[:, part],
                        is_last and part.stop == rows,
                    )
                )
            return torch.cat(halves, 2)
        with lease:
            recording = self.on_read is not None and (is_last or self.read_all_rows)
            output, mass = api.memory_attention(
                rotated,
                lease.k,
                lease.v,
                self.store.tiers.top.lengths,
                slots[None],
                places[None],
                scores[None],
                local,
                gated=self.cmt_keys is not None,
                return_mass=recording,
            )
            if mass is not None:
                self._report_reads(wanted, mass, slots, lease)
        return output

    def _report_reads(
        self, wanted: BlockRequest, mass: Tensor, slots: Tensor, lease: Lease
    ) -> None:
        """Call on_read with what the last row read, or every row."""
        rows = mass.shape[2]
        for row in range(0 if self.read_all_rows else rows - 1, rows):
            reads = requested_reads(wanted, row, mass[0], slots, lease, self.locate)
            if reads.units and self.on_read is not None:
                self.on_read(reads)

    def _lease(self, units: list[BlockKey]) -> Lease:
        lease = self.store.lease(units)
        if self.observer is not None and lease.fetched:
            self.observer.missed()
        return lease


# steps in which nothing was missed or predicted to be, after which predicting pauses until a miss
_PATIENCE = 2


class SpeculativePrefetch:
    """Predicts for one session; its methods are called from within a step, in the order of
    layers.
    """

    def __init__(
        self, reader: LandmarkAdapter, attention: MemoryAttention, store: MemoryStore
    ) -> None:
        self._reader, self._attention, self._store = reader, attention, store
        self._memory_layers = frozenset(attention.shape.memory_layers)
        self._states: Tensor | None = None
        self._quiet = 0  # steps since the last miss, had or foreseen

    def enter(self, layer: int, states: Tensor) -> None:
        """A layer begins with the states [1, T, hidden_size]."""
        if layer == 0:
            self._quiet += 1
        self._states = states

    def attended(self, layer: int, local: LocalAttention) -> None:
        """The layer has attended to its chunk and will read memory next."""
        if self._quiet > _PATIENCE or layer + 1 not in self._memory_layers:
            return
        assert self._states is not None
        following = self._reader.next_projections(layer, self._states, local.output)
        if following is None:
            return
        # Where predicting fails (a document was forgotten), the lookup itself says so, if there is
        # to be one.
        with suppress(MemstoreError):
            if self._store.retrieval.expect(
                self._attention.predicted_blocks(layer + 1, *following)
            ):
                self._quiet = 0

    def missed(self) -> None:
        """The step had to wait for a unit: predicting goes on."""
        self._quiet = 0
