"""Attention to the KV blocks that rows chose, on a lease of the tiers."""

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from memstore.block import BlockKey
from memstore.errors import BlocksUnavailable, BudgetExceeded
from memstore.kernels import api
from memstore.kernels.api import LocalAttention
from memstore.model.landmark.attention.block_requests import (
    BlockRequest,
    lease_requested,
    requested_reads,
)
from memstore.model.landmark.attention.latency_gate import close_rows, without_units
from memstore.model.landmark.landmark_protocol import LandmarkHeads
from memstore.model.reads import OnRead
from memstore.store.memory_store import MemoryStore
from memstore.tiers.lease import Lease


class Observer(Protocol):
    """Told about every step while it runs (speculative_prefetch.py)."""

    def attended(self, layer: int, local: LocalAttention) -> None:
        """A layer has attended to its chunk, and will read memory next."""

    def missed(self) -> None:
        """A lease had to fetch some of its units."""


class LeasedAttention(ABC):
    """How a session attends to the blocks that its rows chose.

    on_read: told what the last row of every step reads, or all with read_all_rows; observer: told
    about every step; absent: documents of which blocks could not be had.
    """

    def __init__(self, heads: LandmarkHeads, store: MemoryStore, *, retrieve: bool) -> None:
        self.shape, self.store, self.retrieve = heads.shape, store, retrieve
        self.cmt_keys, self.cmt_values = heads.cmt_keys, heads.cmt_values
        self.on_read: OnRead | None = None
        self.read_all_rows = False
        self.observer: Observer | None = None
        self.absent: set[int] = set()

    @abstractmethod
    def locate(self, candidate: int) -> tuple[int, int]:
        """(document, block) of a candidate."""

    def _closed(
        self, layer_idx: int, local: LocalAttention, kept: Tensor, first_head: int = 0
    ) -> LocalAttention:
        """`close_rows` of heads from first_head on, with the layer's values."""
        values = None
        if self.cmt_values is not None and self.retrieve:
            heads = slice(first_head, first_head + kept.shape[0])
            values = self.cmt_values[layer_idx, heads]
        return close_rows(local, kept, values)

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
        except BlocksUnavailable as error:
            if not self.store.allow_partial:
                raise
            self.absent |= error.documents
            wanted = without_units(wanted, error.units, self.locate)
            kept = rows_reading(wanted.candidates, local)
            local = self._closed(wanted.layer, local, kept, wanted.first_head)
            return self._attend_requested(wanted, rotated, local, places, scores, is_last)
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
                self.store.tiers.lengths,
                slots[None],
                places[None],
                scores[None],
                local,
                gated=self.cmt_keys is not None,
                return_mass=recording,
            )
            if mass is not None:
                self._tell_reads(wanted, mass, slots, lease)
        return output

    def _tell_reads(self, wanted: BlockRequest, mass: Tensor, slots: Tensor, lease: Lease) -> None:
        """Tell on_read what the last row read, or every row."""
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


def rows_reading(candidates: Tensor, local: LocalAttention) -> Tensor:
    """Of candidates [H, T or 1, K], the rows [H, T] that read one."""
    return (candidates >= 0).any(-1).expand(local.gate.shape[1:])
