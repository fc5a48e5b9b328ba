"""The decoder that a run trains: with random weights, or with those of a checkpoint."""

from pathlib import Path

import torch

from memstore.errors import InvalidConfig
from memstore.model.landmark.checkpoint import load_checkpoint
from memstore.model.landmark.config import ModelConfig
from memstore.model.landmark.transformer import Transformer


def new_model(config: ModelConfig, init: Path | None, seed: int) -> Transformer:
    """The decoder of a configuration.

    init: a checkpoint of this architecture. Raises InvalidConfig for another, InvalidWeights.
    """
    model = Transformer(config)
    if init is None:
        model.initialise(torch.Generator().manual_seed(seed))
        return model
    first, _ = load_checkpoint(init)
    first.cmt_values = None  # measured of these weights, not of those that come of them
    if first.config.architecture() != config.architecture():
        raise InvalidConfig(
            f"{init} is a model of another architecture; leave --preset out, or train from nothing"
        )
    model.load_state_dict(first.state_dict())
    return model
