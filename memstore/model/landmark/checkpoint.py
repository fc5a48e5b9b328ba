"""A model on disk: config.json, model.safetensors and tokenizer.json in one directory; the weights
that ship are one too.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch.overrides import TorchFunctionMode

from memstore.decode import from_json
from memstore.disk.files import replacement
from memstore.disk.format.signature import Signature
from memstore.errors import InvalidConfig, InvalidWeights
from memstore.model.landmark.byte_tokenizer import Tokenizer
from memstore.model.landmark.config import ModelConfig
from memstore.model.landmark.transformer import Transformer
from memstore.model.model_files import read_file

SHIPPED = Path(__file__).parent / "weights"
"""The directory of the weights that ship with the package."""
SHIPPED_NAME = "books-1m"
CMT_VALUES = "cmt_values"  # as it is called in model.safetensors, which need not have it


def save_checkpoint(
    model: Transformer, tokenizer: Tokenizer, directory: Path, dtype: torch.dtype = torch.float32
) -> None:
    """Write config, weights (as `dtype`) and tokenizer; each file is replaced whole, so an
    interrupted save leaves the old one. Raises OSError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in model.state_dict().items()
    }
    with replacement(directory / "model.safetensors", mode=0o644) as file:
        file.write(save(weights))
    with replacement(directory / "config.json", mode=0o644) as file:
        file.write(json.dumps(model.config.to_dict(), indent=2).encode() + b"\n")
    tokenizer.save(directory / "tokenizer.json")


class _Uninitialised(TorchFunctionMode):
    """Modules are made with weights as they come: to draw them on "meta", torch would import its
    whole compiler.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def read_configuration(directory: Path) -> ModelConfig:
    """The configuration of a directory. Raises InvalidWeights, InvalidConfig."""
    path = directory / "config.json"
    if not path.exists():
        raise InvalidWeights(f"{directory} is not a model: config.json is missing")
    try:
        values = from_json(read_file(path), dict[str, Any])
    except ValueError as error:
        raise InvalidConfig(f"model configuration is no JSON object: {error}") from None
    return ModelConfig.from_dict(values)


def load_checkpoint(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    *,
    make: Callable[[ModelConfig], Transformer] = Transformer,
) -> tuple[Transformer, Tokenizer]:
    """The model that `make` makes of its configuration, with weights of a dtype and in evaluation
    mode, and the tokenizer of a directory; InvalidWeights names what is wrong.
    """
    config = read_configuration(directory)
    for name in ("model.safetensors", "tokenizer.json"):
        if not (directory / name).is_file():
            raise InvalidWeights(f"{directory} is not a model: {name} is missing")
    tokenizer = Tokenizer.load(directory / "tokenizer.json")
    if tokenizer.vocab_size != config.vocab_size:
        raise InvalidWeights(
            f"{directory}: tokenizer.json has {tokenizer.vocab_size} ids but config.json says "
            "vocab_size "
            f"{config.vocab_size}"
        )
    path = directory / "model.safetensors"
    try:
        weights = load_file(path)
        with torch.device("meta"), _Uninitialised():
            model = make(config)
            if CMT_VALUES in weights:
                model.cmt_values = torch.empty(config.num_layers, config.num_heads, config.head_dim)
        for name, tensor in weights.items():
            if not tensor.is_floating_point():
                raise InvalidWeights(f"{path}: {name} holds numbers of type {tensor.dtype}")
            weights[name] = tensor = tensor.to(dtype)
            if not all(bound.isfinite() for bound in tensor.aminmax()):
                raise InvalidWeights(
                    f"{path}: {name} holds numbers that are not finite, or not in {dtype}; get the "
                    "weights again, or load them in another type"
                )
        model.load_state_dict(weights, assign=True)
    except (SafetensorError, OSError) as error:
        raise InvalidWeights(f"{path} is truncated or not a safetensors file: {error}") from None
    except RuntimeError as error:  # torch names the weights that differ
        raise InvalidWeights(
            f"{path} is of another architecture than its config.json: "
            f"{' '.join(str(error).split())}"
        ) from None
    return model.requires_grad_(False).eval(), tokenizer


def signature_of(model: Transformer, tokenizer: Tokenizer) -> Signature:
    """What ties a memory to this model: hashes of weights and tokenizer, the architecture and the
    geometry of what is stored.

    LookupSettings do not change what is stored, so they are no part of it, nor are the context miss
    token's values. Weights count as the numbers they are: the same in half precision and in float32
    are the same model.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        if name == CMT_VALUES:
            continue
        digest.update(name.encode())
        wide = torch.promote_types(tensor.dtype, torch.float32)
        digest.update(tensor.detach().to("cpu", wide).contiguous().numpy().tobytes())
    config = model.config
    return Signature(
        weights=digest.hexdigest(),
        tokenizer=tokenizer.fingerprint,
        architecture=config.architecture(),
        kv_dtype=config.kv_dtype,
        num_layers=config.num_layers,
        memory_layers=tuple(config.memory_layers or ()),
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=config.block_size,
    )
