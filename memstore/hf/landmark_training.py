"""What landmark training adds to a decoder: low-rank adapters (LoRA, arXiv 2106.09685) from peft,
and directories of the trained model with the adapters merged in.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memstore.errors import InvalidConfig, install_extra
from memstore.hf.checks import quiet
from memstore.hf.landmark_decoder import LandmarkDecoder, save_landmarks
from memstore.hf.model_directory import new_directory

_BASE, _ADAPTER = "base_layer.", "lora_"  # in the names of an adapted model's weights
_SAVING = ".saving-"


def add_adapters(model: nn.Module, rank: int, seed: int) -> None:
    """Add adapters of a rank to every linear layer but the head, and freeze all other weights. What
    the model computes stays the same until they are trained. Raises InvalidConfig without peft.
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
        # under autocast, peft would cast inputs up and autocast would cast them down again
        module.cast_input_dtype_enabled = False


@torch.no_grad()
def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's weights with adapters merged in, named as without adapters."""
    adapted, weights = _adapted(model), {}
    for name, tensor in model.state_dict().items():
        if _ADAPTER in name:
            continue
        layer, _, kind = name.rpartition(_BASE)
        if layer and kind == "weight":
            module = adapted[layer.removesuffix(".")]
            for adapter in module.active_adapters:
                tensor = tensor + module.get_delta_weight(adapter).to(tensor.dtype)
        weights[name.replace(_BASE, "")] = tensor
    return weights


def _adapted(model: nn.Module) -> dict[str, Any]:
    """The layers of a model that have adapters, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


class Saver:
    """Writes directories of a model that is trained in another dtype than it is stored in."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        """model: as it was loaded."""
        self._dtype: torch.dtype = model.dtype
        self._tokenizer = tokenizer

    def save(self, decoder: LandmarkDecoder, directory: Path) -> None:
        """Write a directory; each file is replaced as a whole. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        with new_directory(directory, _SAVING) as temporary:
            with quiet():
                decoder.model.save_pretrained(temporary, state_dict=self._weights(decoder))
            self._tokenizer.save_pretrained(temporary)
            path = temporary / "config.json"
            config = json.loads(path.read_text(encoding="utf-8"))
            config["dtype"] = str(self._dtype).removeprefix("torch.")
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            save_landmarks(decoder.spec, dict(decoder.rows.items()), temporary)
            for file in sorted(temporary.iterdir(), key=lambda file: file.suffix != ".safetensors"):
                file.chmod(0o644)
                file.replace(directory / file.name)

    def _weights(self, decoder: LandmarkDecoder) -> dict[str, Tensor]:
        """The weights on the CPU in the stored dtype; tied weights stay one tensor."""
        converted: dict[int, Tensor] = {}
        return {
            name: converted.setdefault(
                tensor.data_ptr(), tensor.detach().to("cpu", self._dtype).contiguous()
            )
            for name, tensor in merged_weights(decoder.model).items()
        }
