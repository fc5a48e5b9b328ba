"""The decoder that a run trains, with whichever memory: drawn anew, or from weights."""

from pathlib import Path

import torch
from torch import Tensor

from memstore.model.checkpoint import CMT_VALUES, load_checkpoint
from memstore.model.config import ModelConfig
from memstore.model.transformer import Transformer
from memstore.rivals.config import MemoryConfig
from memstore.rivals.transformer import RivalTransformer, make
from memstore.training.grow import grow


def new_model(
    config: ModelConfig, memory: MemoryConfig | None, init: Path | None, seed: int
) -> Transformer:
    """The decoder of a configuration with a memory (None: landmarks).

    init: a checkpoint of this configuration, or of one that grows into it. Its layers are taken
    whatever its memory is, and what the memory itself has learned if that is the same. Raises
    InvalidConfig, InvalidWeights.
    """
    model = Transformer(config) if memory is None else RivalTransformer(config, memory)
    model.initialise(torch.Generator().manual_seed(seed))
    if init is None:
        return model
    first, _ = load_checkpoint(init, other=make)
    weights, learned = _parted(first)
    if first.config.architecture() != config.architecture():
        layers = Transformer(first.config)
        layers.load_state_dict(weights)
        weights = grow(layers, config, torch.Generator().manual_seed(seed)).state_dict()
    if isinstance(model, RivalTransformer):
        same = isinstance(first, RivalTransformer) and first.memory_config == model.memory_config
        weights = weights | (learned if same else _parted(model)[1])
    model.load_state_dict(weights)
    return model


def _parted(model: Transformer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights of the layers, and what a memory has learned beside them."""
    weights = model.state_dict()
    weights.pop(CMT_VALUES, None)  # measured of these weights, not of those that come of them
    learned = {name: x for name, x in weights.items() if name.startswith("memory.")}
    return {name: x for name, x in weights.items() if name not in learned}, learned
