"""A landmark model's attention over a chunk and a memory: the seam between a model and a store, in
q, k, v without positions.

One `MemoryAttention` serves one session. A layer computes local scores and the gate; searches for
the rows whose gate is open; leases the distinct KV blocks found; and attends once to chunk and
slots.

Speculative prefetch: the state of layer n without its memory, taken through the rest of layer n and
the projections of layer n + 1, approximates the queries of layer n + 1; the tiers fetch the blocks
that these find. A prediction never changes a result.
"""

from contextlib import suppress

import torch
from torch import Tensor

from memstore.block import BlockKey
from memstore.errors import BudgetExceeded, MemstoreError
from memstore.kernels import api
from memstore.kernels.api import NEG, LocalAttention
from memstore.model.landmark.block_lookup import (
    Selection,
    lease_requested,
    merge,
    requested_reads,
    select,
    superseding,
)
from memstore.model.landmark.open_chunk import Candidates, OpenChunk, SessionBlocks
from memstore.model.landmark.transformer import LandmarkReader
from memstore.model.lookup_settings import LookupSettings
from memstore.model.session import Lookups, OnRead
from memstore.store.memory_store import MemoryStore
from memstore.tiers.slots import Lease

GIVEN_BACK = 0.1  # of attention mass, by a row that skips its lookup
# steps in which nothing was missed or predicted to be, after which predicting pauses until a miss
_PATIENCE = 2


class MemoryAttention:
    """Attention of one session to its open chunk and its memory.

    on_read: called with what the last row of every step read; with read_all_rows, every row.
    """

    def __init__(
        self,
        model: LandmarkReader,
        settings: LookupSettings,
        store: MemoryStore,
        blocks: SessionBlocks,
        *,
        retrieve: bool = True,
    ) -> None:
        """retrieve=False: read only recent blocks, without search and cmt_values (the default of
        ingest). The store's leases must be on the model's device. Finished blocks are on the CPU,
        in the shape's kv_dtype.
        """
        self.shape, self.store, self.retrieve = model.shape, store, retrieve
        self.cmt_keys, self.cmt_values = model.cmt_keys, model.cmt_values
        self.on_read: OnRead | None = None
        self.read_all_rows = False
        self._predicting = retrieve and store.tiers.predictor != "off"
        self._quiet = 0  # steps since the last unit that had to be fetched, or was predicted to be
        self._states: Tensor | None = None  # that a layer began with, where `enter` is told
        self.blocks, self._model = blocks, model
        self.lookups = Lookups()
        # the dtype of landmark scores, which choose and weigh blocks
        self._exact = torch.promote_types(model.dtype, torch.float32)
        self.chunk, self.settings = OpenChunk(model, settings), settings
        self.start_chunk()

    def start_chunk(self) -> None:
        """Place the open chunk after the current blocks of the memory."""
        fixed = self.shape.old_block_distance is not None
        self.candidates = Candidates(
            self.blocks, self.settings, fixed=fixed, dtype=self._exact, device=self._model.device
        )
        self.chunk.place(self.candidates.prefix)

    # One layer step

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append k, v [1, Hkv, T, D] to the layer's chunk and attend with q -> [1, H, T, D]; all
        without positions.

        The caller advances the chunk by T after all layers have attended (`ChunkSession` does).
        """
        prefix = self.candidates.prefix
        searched = self.retrieve and layer_idx in self.shape.memory_layers
        candidates = prefix.blocks if searched else prefix.recent
        rotated, local = self._local(layer_idx, q, k, v, memory=candidates > 0)
        if self._predicting and self._quiet <= _PATIENCE:
            self._predict(layer_idx + 1, local)
        if candidates == 0:
            return local.output
        opened = self._opened(local)
        rows, count = opened.numel(), int(opened.sum())
        self.lookups.done += count
        self.lookups.skipped += rows - count
        if count < rows:
            local = self._close_rows(layer_idx, local, opened)
        if count == 0:
            return local.output
        if count == rows or opened.shape[1] == 1:
            return self._read(layer_idx, rotated, local, opened, searched)
        tokens = opened.any(0).nonzero().flatten()  # the others keep their local output
        local.output[:, :, tokens] = self._read(
            layer_idx,
            rotated[:, :, :, tokens],
            _rows(local, tokens),
            opened[:, tokens],
            searched,
            is_last=bool(tokens[-1] == opened.shape[1] - 1),
        )
        return local.output

    # Speculative prefetch

    def enter(self, layer: int, states: Tensor) -> None:
        """Note the states [1, T, hidden_size] that enter a layer; called in the order of layers."""
        self._quiet += layer == 0
        self._states = states

    def _predict(self, layer_idx: int, local: LocalAttention) -> None:
        """Prefetch what a layer will probably read; local: what the layer before it attended to."""
        states, old = self._states, self.candidates.old
        if states is None or not old or layer_idx not in self.shape.memory_layers:
            return
        transformer = self._model.transformer
        following = transformer.next_projections(layer_idx - 1, states, local.output)
        # Where predicting fails (a document was forgotten), the lookup itself says so, if there is
        # to be one.
        with suppress(MemstoreError):
            if self.store.retrieval.expect(self._predicted_blocks(layer_idx, *following)):
                self._quiet = 0

    def _predicted_blocks(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> list[BlockKey]:
        """The old units that `attend` would read with these q, k, v, block by block; nothing is
        stored or counted. Raises DocumentNotFound.
        """
        candidates, group = self.candidates, self.shape.group
        rotated, local = self._local(layer_idx, q, k, v, memory=True)
        opened = self._opened(local)
        if not opened.any():
            return []
        near = self._recent_scores(layer_idx, rotated)
        chosen = self._search(layer_idx, rotated, near, opened).candidates
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
        """Write k, v into the layer's chunk, and attend to the chunk; return the queries under
        every rotation for memory [R, 1, H, T, D] (R = 0 without `memory`), and the result.
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

    def _opened(self, local: LocalAttention) -> Tensor:
        """[H, T] bool: rows whose gate is not below the cutoff; all rows without a gate."""
        if self.cmt_keys is None:
            return torch.ones_like(local.gate[0], dtype=torch.bool)
        return local.gate[0] >= self.settings.cmt_cutoff

    def _read(
        self,
        layer_idx: int,
        rotated: Tensor,
        local: LocalAttention,
        opened: Tensor,
        search: bool,
        is_last: bool = True,
    ) -> Tensor:
        """Choose, place and attend for rows [R, 1, H, T, D]; only the `opened` [H, T] rows read."""
        near = self._recent_scores(layer_idx, rotated)
        if search:
            chosen = self._search(layer_idx, rotated, near, opened)
        else:
            prefix = self.candidates.prefix
            recent = torch.arange(prefix.old, prefix.blocks, device=rotated.device)
            chosen = Selection(recent.expand(rotated.shape[2], 1, -1), None)
        places, scores = self._place(layer_idx, chosen, rotated, near)
        weight, documents = self.settings.supersede, self.candidates.documents
        if weight and documents:
            scores = scores + superseding(scores, chosen.candidates, documents, weight)
        return self._attend_requested(
            layer_idx, chosen.candidates, rotated, local, places, scores, is_last
        )

    def _recent_scores(self, layer_idx: int, rotated: Tensor) -> Tensor | None:
        """Landmark scores [P, H, T, R] of all recent blocks in every slot; None without any."""
        if not self.candidates.prefix.recent:
            return None
        keys = self.chunk.recent_landmarks(layer_idx).to(self._exact)  # (R, Hkv, D)
        keys = keys.permute(1, 2, 0).repeat_interleave(self.shape.group, 0)  # (H, D, R)
        return rotated[: self.candidates.prefix.size, 0].to(self._exact) @ keys

    def _search(
        self, layer_idx: int, rotated: Tensor, near: Tensor | None, opened: Tensor
    ) -> Selection:
        """Choose among old and recent blocks. near: scores of the recent ones; opened: [H, T] bool,
        rows whose gate is open. Raises DocumentNotFound.
        """
        shape, settings, prefix = self.shape, self.settings, self.candidates.prefix
        fixed = shape.old_block_distance is not None
        shared = settings.granularity != "per_token_per_head"
        # every old block is scored in one place
        query = rotated[prefix.size if fixed else 0, 0]
        hits = self.store.retrieval.landmarks(self.candidates.old).search(
            layer_idx,
            query,
            self.candidates.old,
            settings.top_k,
            return_lse=shared,
            open_rows=opened,
            bias=self.candidates.fading,
        )
        scores, candidates, lse = hits.scores.to(self._exact), hits.candidates, hits.lse
        if near is not None:
            own_slots = torch.arange(prefix.size - prefix.recent, prefix.size, device=near.device)
            recent = near[own_slots].diagonal(dim1=0, dim2=3)  # (H, T, R): each at its own slot
            scores, candidates = merge(scores, candidates, recent, prefix.old, settings.top_k)
            if lse is not None:
                lse = torch.logaddexp(lse.to(self._exact), recent.logsumexp(-1))
        # where no slot depends on it, the order among units is free
        if fixed and near is None and not shared:
            return Selection(candidates.masked_fill(~opened[..., None], -1), scores)
        return select(settings.granularity, scores, candidates, lse, opened, shape.num_kv_heads)

    def _place(
        self, layer_idx: int, chosen: Selection, rotated: Tensor, near: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The rotation of every chosen unit [H, T or 1, K], and its landmark score there for every
        row [H, T, K], without the bonus of later documents.
        """
        prefix, rows = self.candidates.prefix, rotated.shape[3]
        fixed, candidates = self.shape.old_block_distance is not None, chosen.candidates
        if fixed and near is None and chosen.scores is not None:
            return torch.full_like(candidates, prefix.size), chosen.scores
        present = candidates >= 0
        is_recent = candidates >= prefix.old
        rank = torch.arange(candidates.shape[-1], device=candidates.device)
        # recent ones from here on, this one included
        later = is_recent.flip(-1).cumsum(-1).flip(-1)
        slots = torch.where(is_recent, prefix.size - later, prefix.size if fixed else rank)
        slots = slots.clamp(0, rotated.shape[0] - 1)
        wide = candidates.expand(-1, rows, -1)
        h = torch.arange(wide.shape[0], device=wide.device)[:, None, None]
        t = torch.arange(rows, device=wide.device)[None, :, None]
        if fixed and chosen.scores is not None:
            scores = chosen.scores
        elif prefix.old and (present & ~is_recent).any():
            old = self.candidates.old
            keys = self.store.retrieval.landmarks(old).gather(
                layer_idx, old, wide.where(wide < prefix.old, -1)
            )
            queries = rotated[slots.expand(-1, rows, -1), 0, h, t]  # (H, T, K, D)
            scores = (queries * keys.to(self._exact)).sum(-1)
            if self.candidates.fading is not None:
                scores = scores + self.candidates.fading[wide.clamp(0, prefix.old - 1)]
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

    def _close_rows(self, layer_idx: int, local: LocalAttention, kept: Tensor) -> LocalAttention:
        """Attention in which rows other than `kept` [H, T] read no memory. They get the layer's
        cmt_values instead, if it has some and memory is searched; else memory's share of their
        attention, up to GIVEN_BACK, goes to what they saw.
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
        layer_idx: int,
        candidates: Tensor,
        rotated: Tensor,
        local: LocalAttention,
        places: Tensor,
        scores: Tensor,
        is_last: bool,
    ) -> Tensor:
        """Lease the distinct KV blocks and attend; if they exceed the budget, in halves of the
        rows, which is slower and gives the same result.

        candidates, places: [H, T or 1, K]; rotated: [R, 1, H, T, D]; scores: [H, T, K].
        """
        try:
            locate = self.candidates.locate
            lease, slots = lease_requested(
                self._lease, layer_idx, candidates, self.shape.group, locate
            )
        except BudgetExceeded:
            rows = candidates.shape[1]
            if rows == 1:
                raise
            halves = [
                self._attend_requested(
                    layer_idx,
                    candidates[:, part],
                    rotated[:, :, :, part],
                    _rows(local, part),
                    places[:, part],
                    scores[:, part],
                    is_last and part.stop == rows,
                )
                for part in (slice(0, rows // 2), slice(rows // 2, rows))
            ]
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
            if mass is not None and self.on_read is not None:
                rows = mass.shape[2]
                for row in range(0 if self.read_all_rows else rows - 1, rows):
                    reads = requested_reads(
                        layer_idx, candidates, row, mass[0], slots, lease, locate
                    )
                    if reads.units:
                        self.on_read(reads)
        return output

    def _lease(self, units: list[BlockKey]) -> Lease:
        lease = self.store.lease(units)
        if lease.fetched:  # the step has to wait for a unit: predicting goes on
            self._quiet = 0
        return lease


def _rows(local: LocalAttention, rows: Tensor | slice) -> LocalAttention:
    """The attention of some rows."""
    return LocalAttention(local.output[:, :, rows], local.gate[:, :, rows], local.lse[:, :, rows])
