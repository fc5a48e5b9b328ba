"""What a run trains whose memory is no landmarks: see memstore.training.subject."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.baselines.config import MemoryConfig
from benchmarks.baselines.reading import save_baseline
from benchmarks.baselines.steps import BaselineSteps
from benchmarks.baselines.transformer import BaselineTransformer
from memstore.training.curriculum import Stage
from memstore.training.subject import Subject, TrainConfig, begin_model

_GATE_LR = 0.01  # Infini-attention's gates stay near one half at that of gains and embeddings


class BaselineSubject(Subject):
    """A BaselineTransformer whose layers begin as those of a landmark model would."""

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
        return {"memory": self.model.memory_config.to_dict()}

    def optimizers(self, stage: Stage) -> list[torch.optim.Optimizer]:
        adam, muon = super().optimizers(stage)
        if self.model.memory_config.kind == "infini":
            gate, (group,) = self.model.get_parameter("memory.gate"), adam.param_groups
            group["params"] = [p for p in group["params"] if p is not gate]
            adam.add_param_group({"params": [gate], "lr": _GATE_LR})
        return [adam, muon]

    def save(self, directory: Path) -> None:
        save_baseline(self.model, self.tokenizer, directory)
