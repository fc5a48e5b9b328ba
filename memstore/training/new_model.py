"""The decoder that a run trains: drawn anew, or from weights."""

from pathlib import Path

import torch

from memstore.model.landmark.checkpoint import load_checkpoint
from memstore.model.landmark.config import ModelConfig
from memstore.model.landmark.transformer import Transformer
from memstore.training.grow import grow


def new_model(config: ModelConfig, init: Path | None, seed: int) -> Transformer:
    """The decoder of a configuration.

    init: a checkpoint of this configuration, or of one that grows into it. Raises InvalidConfig,
    InvalidWeights.
    """
    model, drawn = Transformer(config), torch.Generator().manual_seed(seed)
    if init is None:
        model.initialise(drawn)
        return model
    first, _ = load_checkpoint(init)
    first.cmt_values = None  # measured of these weights, not of those that come of them
    if first.config.architecture() != config.architecture():
        return grow(first, config, drawn)
    model.load_state_dict(first.state_dict())
    return model
