"""Training decoders with other memories than landmarks. A step draws the same texts as for
landmarks, puts them one after the other, and leaves the landmarks out.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines.config import MemoryConfig
from benchmarks.baselines.reading import save_baseline
from benchmarks.baselines.transformer import BaselineTransformer
from memstore.model.landmark.transformer import Transformer
from memstore.training.batches import MemoryBatch, QuestionBatch, RecallData
from memstore.training.curriculum import Stage
from memstore.training.objectives import Loss, Steps, next_token_loss
from memstore.training.train import Subject, TrainConfig, begin_model

_GATE_LR = 0.01  # Infini-attention's gates stay near one half at that of gains and embeddings


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
    """Each chunk after the last window that it may read: ids and weights [B, T], with landmarks.

    It takes as many chunks as make about the tokens that a step of landmarks reads, which is each
    window once and every chunk. The first token of a window or chunk is no target.
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


class BaselineSubject(Subject):
    """A BaselineTransformer whose layers start as those of a landmark model do."""

    steps = BaselineSteps
    model: BaselineTransformer

    def __init__(
        self,
        memory: MemoryConfig,
        config: TrainConfig,
        texts: Sequence[Path],
        device: torch.device,
        resume: bool,
    ) -> None:
        layers, self.tokenizer = begin_model(config, texts, resume)
        self.model = BaselineTransformer(layers.config, memory).to(device)
        self.model.load_state_dict(layers.state_dict(), strict=False)

    @property
    def identity(self) -> dict[str, Any]:
        return {"memory": asdict(self.model.memory_config)}

    def optimizers(self, stage: Stage) -> list[torch.optim.Optimizer]:
        adam, muon = super().optimizers(stage)
        if self.model.memory_config.kind == "infini":
            gate, (group,) = self.model.get_parameter("memory.gate"), adam.param_groups
            group["params"] = [p for p in group["params"] if p is not gate]
            adam.add_param_group({"params": [gate], "lr": _GATE_LR})
        return [adam, muon]

    def save(self, directory: Path) -> None:
        save_baseline(self.model, self.tokenizer, directory)
