"""What one step of a stage computes for a memory that is no landmarks: the texts that those read,
drawn alike, one behind the other and without landmarks.
"""

import torch
from torch import Tensor

from benchmarks.baselines.transformer import BaselineTransformer
from memstore.model.landmark.transformer import Transformer
from memstore.training.batches import MemoryBatch, QuestionBatch, RecallData
from memstore.training.curriculum import Stage
from memstore.training.objectives import Loss, next_token_loss
from memstore.training.steps import Steps


class BaselineSteps(Steps):
    """Every text is read segment by segment from an empty past. Gradients reach back through all
    segments of it where the memory lets them (Infini-attention, full attention).
    """

    def __init__(
        self, model: Transformer, data: RecallData, device: torch.device, seed: int
    ) -> None:
        super().__init__(model, data, device, seed)
        assert isinstance(model, BaselineTransformer)
        self._baseline = model

    def _windows(self, stage: Stage, share: float) -> tuple[Loss, None]:
        batch = self._drawn_windows(stage, share)
        self._count(batch.ids)
        ids, weights = self._content(batch.ids), self._content(batch.weights)
        return next_token_loss(self._baseline, self._states(ids), ids, weights), None

    def _memory(self, stage: Stage, share: float) -> tuple[Loss, Loss]:
        memory, questions = self._drawn_memory(stage)
        # What Steps draws beside: the next step's texts shall be the same.
        self._rng.randrange(self._baseline.config.block_size)
        self._rng.random()
        ids, weights = in_a_row(memory, questions)
        self._count(ids)
        ids, weights = self._content(ids), self._content(weights)
        chunk = self._content(questions.ids).shape[1]
        states = self._states(ids)
        parts = (slice(0, -chunk), slice(-chunk, None))
        of_windows, of_chunks = (
            next_token_loss(self._baseline, states[:, p], ids[:, p], weights[:, p]) for p in parts
        )
        return of_windows, of_chunks

    def _states(self, ids: Tensor) -> Tensor:
        return self._baseline.read(ids, self._baseline.begin())

    def _content(self, x: Tensor) -> Tensor:
        """[B, blocks * (block_size + 1)] without the landmarks."""
        size = self._baseline.config.block_size
        return x.unflatten(1, (-1, size + 1))[:, :, :size].flatten(1)


def in_a_row(memory: MemoryBatch, questions: QuestionBatch) -> tuple[Tensor, Tensor]:
    """Chunks behind the windows that each may read: ids and weights [B, T], landmarks included.

    The window that a chunk follows is the last one before it. As many chunks are taken as make
    about the tokens that landmarks read in the same step: each window once, and every chunk. The
    first token of a window or chunk is no target.
    """
    follows = questions.continues[:, None]
    views = torch.where(follows, questions.visible.roll(-1, 1), questions.visible)
    length = views.shape[1] * memory.ids.shape[1] + questions.ids.shape[1]
    texts = max(1, (memory.ids.numel() + questions.ids.numel()) // length)
    views, asked = views[:texts], questions.weights[:texts].clone()
    remembered = memory.weights.clone()
    remembered[:, 0] = asked[:, 0] = 0
    ids = torch.cat([memory.ids[views].flatten(1), questions.ids[:texts]], 1)
    return ids, torch.cat([remembered[views].flatten(1), asked], 1)
