"""Batches of recall training: windows, memories of windows, chunks that read one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from memstore.training.recipes.fact_pools import Pools
from memstore.training.recipes.recall_pages import StatedFact

Batch = TypeVar("Batch", "WindowBatch", "MemoryBatch", "QuestionBatch")


@dataclass(frozen=True)
class WindowBatch:
    """Windows with landmarks inserted: T = blocks * (block_size + 1), a landmark at every
    (block_size + 1)-th place.
    """

    ids: torch.Tensor  # int64 [B, T]
    weights: torch.Tensor  # float32 [B, T]: loss weight of each id as a target; 0 for landmarks

    def to(self, device: torch.device) -> WindowBatch:
        """The same, its tensors there."""
        return _on(device, self)


@dataclass(frozen=True)
class MemoryBatch:
    """Windows to remember, and what they state."""

    ids: torch.Tensor  # int64 [W, T], as in WindowBatch
    weights: torch.Tensor  # float32 [W, T]
    facts: list[list[StatedFact]]  # of each window, whole statements only
    text_windows: dict[int, int]  # plain windows, each with the corpus offset of the text after it
    # of a memory of plain text only: its windows, those of one place together; else empty
    runs: list[list[int]]
    pass_key_window: int | None
    contents: list[list[int]] = field(repr=False)  # content ids of each window, without landmarks
    pools: Pools = field(repr=False)

    def to(self, device: torch.device) -> MemoryBatch:
        """The same, its tensors there."""
        return _on(device, self)


@dataclass(frozen=True)
class QuestionBatch:
    """Chunks that read a memory."""

    ids: torch.Tensor  # int64 [B, T], as in WindowBatch
    weights: torch.Tensor  # float32 [B, T]
    # int64 [B, V]: windows whose content the chunk may read; oldest first, but see `continues`
    visible: torch.Tensor
    continues: torch.Tensor  # bool [B]: the chunk directly follows the end of window visible[:, 0]

    def to(self, device: torch.device) -> QuestionBatch:
        """The same, its tensors there."""
        return _on(device, self)


def _on(device: torch.device, batch: Batch) -> Batch:
    tensors: dict[str, Any] = {
        n: x.to(device) for n, x in vars(batch).items() if isinstance(x, torch.Tensor)
    }
    return replace(batch, **tensors)
