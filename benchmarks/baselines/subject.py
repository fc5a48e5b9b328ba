"""What a run trains whose memory is no landmarks: see memstore.training.subject."""

from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.baselines.config import MemoryConfig
from benchmarks.baselines.reading import save_baseline
from benchmarks.baselines.steps import BaselineSteps
from benchmarks.baselines.transformer import BaselineTransformer
from memstore.training.batches import RecallData
from memstore.training.curriculum import Stage
from memstore.training.steps import Steps
from memstore.training.subject import OwnModel, TrainConfig

_GATE_LR = 0.01  # Infini-attention's gates stay near one half at that of gains and embeddings


class BaselineSubject(OwnModel):
    """A BaselineTransformer whose layers begin as those of a landmark model would."""

    model: BaselineTransformer

    def __init__(
        self,
        memory: MemoryConfig,
        config: TrainConfig,
        texts: Sequence[Path],
        device: torch.device,
        resume: bool,
    ) -> None:
        """As OwnModel; `partial(BaselineSubject, memory)` is a MakeSubject."""
        super().__init__(config, texts, device, resume)
        layers = self.model
        self.model = BaselineTransformer(layers.config, memory).to(device)
        self.model.load_state_dict(layers.state_dict(), strict=False)
        self.identity = {"memory": self.model.memory_config.to_dict()}

    def optimizers(self, stage: Stage) -> list[torch.optim.Optimizer]:
        """As of landmarks; the gates of Infini-attention have a learning rate of their own."""
        adam, muon = super().optimizers(stage)
        if self.model.memory_config.kind == "infini":
            gate, (group,) = self.model.get_parameter("memory.gate"), adam.param_groups
            group["params"] = [p for p in group["params"] if p is not gate]
            adam.add_param_group({"params": [gate], "lr": _GATE_LR})
        return [adam, muon]

    def steps(self, data: RecallData, device: torch.device, seed: int) -> Steps:
        """The texts of landmarks, one behind the other."""
        return BaselineSteps(self.model, data, device, seed)

    def save(self, directory: Path) -> None:
        """What benchmarks.baselines.reading.load_baseline takes."""
        save_baseline(self.model, self.tokenizer, directory)
