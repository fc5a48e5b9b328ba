"""A model made larger without changing what it computes: what training begins with that was trained
smaller.

New layers come behind the first one, add nothing to the stream, and have no memory; new units of
the MLPs have no way out. Function-preserving growth: Chen, Goodfellow & Shlens, "Net2Net", arXiv
1511.05641.
"""

from dataclasses import replace

import torch
from torch import Tensor

from memstore.errors import InvalidConfig
from memstore.model.landmark.config import ModelConfig
from memstore.model.landmark.transformer import Transformer

_DEVIATION = 0.06  # of the weights of a new layer, about that of trained ones


def grow(model: Transformer, config: ModelConfig, generator: torch.Generator) -> Transformer:
    """A Transformer of `config`, with more layers or wider MLPs, whose output is that of `model`.

    Raises InvalidConfig where the two differ in anything else.
    """
    old = model.config
    more = config.num_layers - old.num_layers
    memory_layers = tuple(layer + more if layer else 0 for layer in old.memory_layers or ())
    expected = replace(
        old, num_layers=config.num_layers, mlp_size=config.mlp_size, memory_layers=memory_layers
    )
    if (
        expected.architecture() != config.architecture()
        or more < 0
        or config.mlp_size < old.mlp_size
    ):
        raise InvalidConfig(
            f"a model of {old.num_layers} layers cannot grow into this configuration: only layers "
            "behind the first one "
            "and the width of the MLPs may be added, and the memory layers move up with their "
            "layers"
        )
    grown = Transformer(config)
    weights = {name: _new(name, x, generator) for name, x in grown.state_dict().items()}
    for name, x in model.state_dict().items():
        block = name.split(".")
        if block[0] == "blocks" and int(block[1]):
            block[1] = str(int(block[1]) + more)
        place = ".".join(block)
        weights[place] = _widened(place, x, weights[place].shape, generator)
    for layer in range(1, 1 + more):
        for norm in ("attention_norm", "mlp_norm", "q_norm", "k_norm"):
            name = f"blocks.{layer}.{norm}.weight"
            if name in weights:
                weights[name] = weights[name.replace(f".{layer}.", ".0.", 1)].clone()
    grown.load_state_dict(weights)
    return grown


def _new(name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    """The weight of a new layer: random, but for what leads back into the stream."""
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return torch.zeros_like(like)
    return torch.empty_like(like).normal_(std=_DEVIATION, generator=generator)


def _widened(name: str, x: Tensor, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """A weight with random rows added, or for `down_proj` columns of zeros."""
    if x.shape == shape:
        return x.clone()
    wide = x.new_zeros(shape)
    if not name.endswith("down_proj.weight"):
        wide.normal_(std=float(x.std()), generator=generator)
    wide[: x.shape[0], : x.shape[1]] = x
    return wide
