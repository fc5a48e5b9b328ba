"""The model that ships: a landmark-attention transformer with its tokenizer, and its directory:
config.json, model.safetensors and tokenizer.json.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from torch.overrides import TorchFunctionMode

from memstore.decode import from_json
from memstore.devices import usable_device
from memstore.disk.files import replacement
from memstore.disk.format.signature import ModelName, Signature
from memstore.errors import InvalidConfig, InvalidWeights
from memstore.kernels.api import NEG
from memstore.kernels.products import accumulate
from memstore.model.adapter import Attend, Enter
from memstore.model.landmark import SHIPPED_NAME
from memstore.model.landmark.landmark_session import LandmarkAPI
from memstore.model.landmark.transformer import ModelConfig, Transformer
from memstore.model.tokenizer import Tokenizer
from memstore.openmp import warn_of_spinning
from memstore.paths import expanded, read_file

SHIPPED = Path(__file__).parent / "weights"
"""The directory of the weights that ship with the package."""
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
            f"vocab_size {config.vocab_size}"
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


class LandmarkModel(LandmarkAPI):
    """A transformer and its tokenizer, with the API."""

    def __init__(
        self, transformer: Transformer, tokenizer: Tokenizer, called: ModelName | None = None
    ) -> None:
        """called: what its memories say that they were made with."""
        config = transformer.config
        self.transformer, self._called = transformer, called
        self.config: ModelConfig = config
        self.shape, self.lookup, self.rope = config.shape, config.lookup, transformer.rope
        self.landmark_id = config.landmark_id
        self.tokenizer: Tokenizer = tokenizer
        with torch.no_grad():
            self.cmt_keys, self.cmt_values = transformer.cmt_keys(), transformer.cmt_values

    @cached_property
    def signature(self) -> Signature:
        """What ties a memory to this model."""
        return replace(signature_of(self.transformer, self.tokenizer), model=self._called)

    @property
    def device(self) -> torch.device:
        return self.transformer.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.transformer.dtype

    def hidden(
        self,
        ids: Tensor,
        attend: Attend,
        *,
        layers: int | None = None,
        enter: Enter | None = None,
        quantized: bool = False,
        adapt: bool = False,
    ) -> Tensor:
        return self.transformer.hidden(ids, attend, layers=layers, enter=enter)

    def next_projections(
        self, layer_idx: int, states: Tensor, attended: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.transformer.next_projections(layer_idx, states, attended)

    def logits(self, states: Tensor, *, quantized: bool = False) -> Tensor:
        logits = accumulate(self.transformer.logits(states))  # float16 has no NEG
        logits[..., self.landmark_id :] = NEG  # nor is the context miss token text
        return logits


def load_model(
    name_or_path: str | Path | None = None,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LandmarkModel:
    """The model that ships (None or its name, "books-1m"), or one from a directory written by
    `memstore train`.

    device: where it computes, such as "cuda", or "auto"; its memories have to be opened with the
    same. dtype: of its weights and of what it computes; landmark scores, softmaxes and logits are
    float32 in half precision, too. Weights that lose digits by it make another model, with its own
    memories.

    Raises InvalidWeights for a directory that is no model, or whose weights do not fit its
    configuration, and InvalidConfig for a device that this machine does not have.
    """
    directory = SHIPPED if name_or_path in (None, SHIPPED_NAME) else expanded(str(name_or_path))
    if not directory.is_dir():
        raise InvalidWeights(
            f"{directory} is not a directory; name one written by `memstore train`, or leave the "
            "model out"
        )
    place = usable_device(device)
    warn_of_spinning(place)
    transformer, tokenizer = load_checkpoint(directory, dtype)
    shipped = directory == SHIPPED
    called = ModelName(
        SHIPPED_NAME if shipped else directory.resolve().name,
        SHIPPED_NAME if shipped else str(directory.resolve()),
    )
    return LandmarkModel(transformer.to(place), tokenizer, called)
