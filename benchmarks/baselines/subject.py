"""What a run trains whose memory is no landmarks: see memstore.training.subject."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.baselines.config import MemoryConfig
from benchmarks.baselines.reading import save_baseline
from benchmarks.baselines.steps import BaselineSteps
from benchmarks.baselines.transformer import BaselineTransformer
from memstore.training.curriculum import Stage
from memstore.training.optimizer import make_optimizers
from memstore.training.subject import Subject, TrainConfig, begin_model

_GATE_LR = 0.01  # Infini-attention's gates stay near one half at that of gains and embeddings


def baseline_subject(
    memory: MemoryConfig,
    config: TrainConfig,
    texts: Sequence[Path],
    device: torch.device,
    resume: bool,
) -> Subject:
    """A BaselineTransformer whose layers begin as those of a landmark model would;
    `partial(baseline_subject, memory)` is a MakeSubject.
    """
    layers, tokenizer = begin_model(config, texts, resume)
    model = BaselineTransformer(layers.config, memory).to(device)
    model.load_state_dict(layers.state_dict(), strict=False)

    def optimizers(stage: Stage) -> list[torch.optim.Optimizer]:
        adam, muon = make_optimizers(model, stage.lr, stage.muon_lr)
        if model.memory_config.kind == "infini":
            gate, (group,) = model.get_parameter("memory.gate"), adam.param_groups
            group["params"] = [p for p in group["params"] if p is not gate]
            adam.add_param_group({"params": [gate], "lr": _GATE_LR})
        return [adam, muon]

    save = partial(save_baseline, model, tokenizer)
    identity = {"memory": model.memory_config.to_dict()}
    return Subject(model, tokenizer, optimizers, save, identity, BaselineSteps)
