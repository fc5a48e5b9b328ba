"""Low-rank adapters (LoRA, arXiv 2106.09685) beside the matrices of a model, by peft; and a model's
weights with them merged in.
"""

from typing import Any

import torch
from torch import Tensor, nn

from memstore.errors import InvalidConfig, install_extra

_BASE, _ADAPTER = "base_layer.", "lora_"


def add_adapters(model: nn.Module, rank: int, seed: int) -> None:
    """Put adapters of a rank beside every linear layer but the head, and freeze the rest; what the
    model computes stays the same until they are trained. Raises InvalidConfig without peft.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise InvalidConfig(
            f"adapters need peft: {install_extra('hf')}, or train all weights (--full)"
        ) from error
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)
    for module in _adapted(model).values():
        # under autocast they would be cast up to be cast down again
        module.cast_input_dtype_enabled = False


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's weights under the names they have without adapters, with these merged in."""
    deltas = _deltas(model)
    weights = {}
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if _ADAPTER in name:
                continue
            layer, _, kind = name.rpartition(_BASE)
            if layer and kind == "weight":
                tensor = tensor + deltas[layer.removesuffix(".")].to(tensor.dtype)
            weights[name.replace(_BASE, "")] = tensor
    return weights


def _deltas(model: nn.Module) -> dict[str, Tensor]:
    """What the adapters add to the weight of each layer that has some."""
    return {
        name: module.get_delta_weight(adapter)
        for name, module in _adapted(model).items()
        for adapter in module.active_adapters
    }


def _adapted(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
