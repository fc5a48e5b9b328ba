"""What a model's directory may say of how it is built: settings of its own code, within bounds that
its weights explain; nothing of which code runs, or what else is loaded.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from memstore.errors import InvalidWeights
from memstore.model.model_files import Stored, read_file

# keys that name code, kernels, other files, or what a forward returns: the caller's to name
_OURS = {
    "attn_implementation",
    "experts_implementation",
    "kernel_config",
    "use_kernels",
    "fusion_config",
    "distributed_config",
    "auto_map",
    "custom_generate",
    "custom_pipelines",
    "configuration_files",
    "transformers_weights",
    "gguf_file",
    "extra_files",
    "extra_config_files",
    "attribute_map",
    "sub_configs",
    "sub_configs_defaults",
    "keys_to_ignore_at_inference",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "use_return_dict",
    "torchscript",
    # of classifiers, for which lists are made
    "num_labels",
    "id2label",
    "label2id",
}
_PLANS = ("base_model_", "tp_plan", "pp_plan")
_COUNTED = ("layer", "expert", "block", "head", "depth", "stage")  # what is made one by one
_NOT_COUNTED = ("vocab", "token", "size", "dim")
_MOST_COUNTED = 1 << 16
_DTYPES = {None, "auto", "float16", "bfloat16", "float32", "float64"}
_NOT_FINITE = "__float__"  # as transformers writes infinity
_MOST_VALUES, _MOST_DEPTH, _MOST_TEXT = 100_000, 16, 1 << 16
_SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "head_dim")
# beyond what the weights explain: matrices that are tied, and tables of positions
_SLACK = 1 << 26


def read_settings(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises InvalidWeights."""
    try:
        values = json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise InvalidWeights(f"{path} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidWeights(f"{path} is no JSON object")
    return values


def checked_configuration(path: Path) -> dict[str, Any]:
    """What config.json says of the model's own code. Raises InvalidWeights."""
    values = read_settings(path)
    if not isinstance(values.get("model_type"), str):
        raise InvalidWeights(f"{path} names no model_type; it is of no Hugging Face model")
    left = _MOST_VALUES

    def checked(key: str, value: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0 or depth > _MOST_DEPTH:
            raise InvalidWeights(f"{path} is too large, or nested too deep")
        if isinstance(value, dict):
            return {
                name: checked(name, inner, depth + 1)
                for name, inner in value.items()
                if name == _NOT_FINITE or not (name in _OURS or name.startswith(("_", *_PLANS)))
            }
        if isinstance(value, list):
            return [checked(key, inner, depth + 1) for inner in value]
        _check_value(path, key, value)
        return value

    configuration: dict[str, Any] = checked("", values, 0)
    for part in _parts(configuration):
        if part.pop("quantization_config", None):
            raise InvalidWeights(
                f"{path} says that the weights are quantized, which needs kernels of others; take "
                "the model's own weights, or a GGUF file of them"
            )
    called = values.get("_name_or_path")  # by which some tokenizers are known
    if isinstance(called, str) and len(called) < 256:
        configuration["_name_or_path"] = called
    return configuration


def _parts(values: Any) -> Iterator[dict[str, Any]]:
    """A map and those inside it."""
    if isinstance(values, dict):
        yield values
    if isinstance(values, dict | list):
        for inner in list(values.values() if isinstance(values, dict) else values):
            yield from _parts(inner)


def _check_value(path: Path, key: str, value: Any) -> None:
    if isinstance(value, str) and len(value) > _MOST_TEXT:
        raise InvalidWeights(f"{path}: {key} is a text of {len(value):,} characters")
    if key in ("dtype", "torch_dtype") and value not in _DTYPES:
        raise InvalidWeights(
            f"{path}: {key} is {str(value)[:40]!r}; float32, bfloat16, float16 or float64 is read"
        )
    if not isinstance(value, int) or isinstance(value, bool):
        return
    counted = any(word in key for word in _COUNTED) and not any(w in key for w in _NOT_COUNTED)
    most = _MOST_COUNTED if counted else 1 << 62
    if key in _SIZES and value < 1:
        raise InvalidWeights(f"{path}: {key} is {value}; get the one that belongs to the weights")
    if abs(value) > most:
        raise InvalidWeights(f"{path}: {key} is {value}, beyond {most:,}; it is of no such model")


def check_sizes(name: str | Path, config: Any, weights: Stored) -> None:
    """Do a configuration's sizes go with the weights? Raises InvalidWeights."""
    config = config.get_text_config()
    layers, there = getattr(config, "num_hidden_layers", 0), _layers(weights)
    if not 0 < layers <= there:
        raise InvalidWeights(
            f"{name}: config.json says {layers:,} layers, of its weights there are {there:,}; get "
            "all of its files, or the config.json that belongs to them"
        )
    embedding = (getattr(config, "vocab_size", 0), getattr(config, "hidden_size", 0))
    if embedding not in weights.shapes.values():
        raise InvalidWeights(
            f"{name}: config.json says a vocabulary of {embedding[0]:,} and states of "
            f"{embedding[1]:,}, and no embedding of its weights is so; get the config.json that "
            "belongs to them"
        )


def _layers(weights: Stored) -> int:
    """How many layers the names of weights count."""
    numbers = {part for name in weights.shapes for part in name.split(".") if part.isdecimal()}
    return len(numbers)


@contextmanager
def building_within(name: str | Path, numbers: int, tensors: int) -> Iterator[None]:
    """While a model is built, before any of its weights has memory: no more of it than weights of
    so many numbers and tensors explain. Raises InvalidWeights.
    """
    left = {"parameters": 2 * numbers + _SLACK, "buffers": 2 * numbers + _SLACK}
    left |= {"modules": 64 * tensors + 4096}
    builder = threading.get_ident()

    def take(what: str, amount: int) -> None:
        if threading.get_ident() != builder:
            return
        left[what] -= amount
        if left[what] < 0:
            raise InvalidWeights(
                f"{name}: config.json describes a much larger model than its weights are; get all "
                "of its files, or the config.json that belongs to them"
            )

    def module(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        take("modules", 1)

    def parameter(parent: nn.Module, name: str, given: Tensor | None) -> None:
        if given is not None and given.is_meta:  # not what is loaded into it later
            take("parameters", given.numel())

    def buffer(parent: nn.Module, name: str, given: Tensor | None) -> None:
        if given is not None and given.is_meta:
            take("buffers", given.numel())

    with ExitStack() as hooks:
        for handle in (
            register_module_module_registration_hook(module),
            register_module_parameter_registration_hook(parameter),
            register_module_buffer_registration_hook(buffer),
        ):
            hooks.callback(handle.remove)
        yield
