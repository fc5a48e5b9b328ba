"""A reading adapter: LoRA weights (arXiv 2106.09685) with which a decoder reads passages that were
encoded independently. It is switched on and off for each forward pass and row, and stored in peft's
file format.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec
import torch
from msgspec import Meta
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear

from memstore.decode import Share, from_json
from memstore.errors import InvalidWeights
from memstore.hf.attention_seam import current
from memstore.hf.model_directory import new_directory
from memstore.model.passages.adaptation import SEPARATOR


@dataclass(frozen=True)
class LowRank:
    """The update scale * b @ a @ x of a linear layer; a is [rank, in_features], b is
    [out_features, rank], in any dtype.
    """

    a: Tensor
    b: Tensor
    scale: float

    def added(self, product: Tensor, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Add the update to product [.., out_features] of x [.., in_features]. rows: [.., 1], 1 for
        rows that get the update, else 0; None for all.
        """
        narrow = linear(x, self.a.to(x.dtype))
        if rows is not None:
            narrow = narrow * rows
        flat = narrow.reshape(-1, len(self.a))
        whole = product.reshape(-1, len(self.b))
        return torch.addmm(whole, flat, self.b.T.to(x.dtype), alpha=self.scale).view(product.shape)

    def merged(self, weight: Tensor) -> Tensor:
        """A copy of the layer's weight plus the update, rounded once to the weight's dtype."""
        whole = torch.addmm(weight.float(), self.b.float(), self.a.float(), alpha=self.scale)
        return whole.to(weight.dtype)

    @staticmethod
    def joined(parts: Sequence[LowRank]) -> LowRank:
        """The updates of layers with the same input, concatenated by output features."""
        a = torch.cat([one.a for one in parts])
        return LowRank(a, torch.block_diag(*(one.b for one in parts)), parts[0].scale)


def set_low_rank(layer: nn.Module, low_rank: LowRank) -> None:
    """Set or replace a linear layer's update; it is added in passes whose ForwardCache adapts."""
    if low_rank_of(layer) is None:
        layer.register_forward_hook(_add)
    layer.__dict__["low_rank"] = low_rank  # not a module: it must not enter the model's state dict


def low_rank_of(layer: nn.Module) -> LowRank | None:
    return cast(LowRank | None, layer.__dict__.get("low_rank"))


def _add(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
    cache, low_rank = current(), low_rank_of(layer)
    if cache is None or cache.adapt is False or low_rank is None:
        return None
    return low_rank.added(output, args[0], None if cache.adapt is True else cache.adapt)


# What is trained, and its files

Kind = Literal["writer", "both"]
"""writer: the adapter encodes passages only; both: questions and answers use it as well."""
UNKNOWN = "I don't know."
"""The answer that training teaches for questions that no passage answers."""
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_KEY = "memstore.reading_adapter"
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"  # peft's names


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fields of ReadingAdapter, as its file has them."""

    version: Literal[1]
    kind: Kind
    weights: tuple[str, ...]
    scores: dict[str, Share]
    separator: Annotated[str, Meta(max_length=64)]
    tokens: int = 0
    refuse_above: Share | None = None


_SAME = tuple(name for name in _Header.__struct_fields__ if name != "version")


@dataclass
class ReadingAdapter:
    """LoRA weights by layer name: pairs of A [rank, in_features] and B [out_features, rank]. An
    adapted layer computes W x + scale * B A x.
    """

    kind: Kind
    rank: int
    scale: float
    pairs: dict[str, tuple[Tensor, Tensor]]
    weights: tuple[str, ...] = ()  # digests of the base weights it was trained for
    separator: str = SEPARATOR  # between passages and a question
    scores: Mapping[str, float] = field(
        default_factory=dict
    )  # shares of held-out questions, 0 to 1
    tokens: int = 0  # seen in training
    refuse_above: float | None = None  # Refusal.above; None if it never learned to refuse

    @property
    def digest(self) -> str:
        """Hex digest of kind, scale and float16 weights."""
        digest = hashlib.blake2b(f"{self.kind} {self.scale}".encode(), digest_size=16)
        for name, pair in sorted(self.pairs.items()):
            digest.update(name.encode())
            for half in pair:
                stored = half.detach().to("cpu", torch.float16).contiguous()
                digest.update(stored.numpy().tobytes())
        return digest.hexdigest()

    @classmethod
    def untrained(
        cls, model: nn.Module, rank: int, seed: int = 0, kind: Kind = "both"
    ) -> ReadingAdapter:
        """A new adapter for all linear layers but the head; B is zero, so it changes nothing."""
        generator = torch.Generator().manual_seed(seed)
        pairs = {}
        for name, layer in _linear(model).items():
            rows, columns = layer.weight.shape
            a = torch.randn(rank, columns, generator=generator) / columns**0.5
            pairs[name] = a, torch.zeros(rows, rank)
        return cls(kind, rank, 2.0, pairs)

    def save(self, directory: Path) -> None:
        """Write peft's two files with float16 weights, each atomically. Raises OSError."""
        header = {"version": 1, **{name: getattr(self, name) for name in _SAME}}
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": self.scale * self.rank,
            "target_modules": sorted({name.rpartition(".")[2] for name in self.pairs}),
            "bias": "none",
            "inference_mode": True,
        }
        tensors = {
            f"{_PREFIX}{name}{suffix}": half.detach().to("cpu", torch.float16).contiguous()
            for name, pair in self.pairs.items()
            for suffix, half in zip((_A, _B), pair)
        }
        directory.mkdir(parents=True, exist_ok=True)
        with new_directory(directory) as temporary:
            save_file(tensors, temporary / TENSORS, {"format": "pt", _KEY: json.dumps(header)})
            (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            for name in (TENSORS, CONFIG):
                (temporary / name).chmod(0o644)  # a wheel keeps the mode
                (temporary / name).replace(directory / name)

    @staticmethod
    def made_for(directory: Path) -> tuple[str, ...]:
        """Digests of the base weights of a stored adapter. Raises InvalidWeights."""
        return _read(directory)[1].weights

    @classmethod
    def load(cls, directory: Path, model: nn.Module) -> ReadingAdapter:
        """Load an adapter for this model.

        Raises InvalidWeights if it is missing, damaged or made for another model.
        """
        (rank, alpha), header = _read(directory)
        with safe_open(directory / TENSORS, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        layers = _linear(model)
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for key in tensors:
            name = key.removeprefix(_PREFIX).removesuffix(_A).removesuffix(_B)
            a, b = tensors.get(f"{_PREFIX}{name}{_A}"), tensors.get(f"{_PREFIX}{name}{_B}")
            layer = layers.get(name)
            if a is None or b is None or layer is None or not _fits(layer, rank, a, b):
                raise InvalidWeights(
                    f"the reading adapter {directory} does not fit this model ({key}); make one "
                    "for it with `memstore adapt`"
                )
            pairs[name] = a.float(), b.float()
        same = {name: getattr(header, name) for name in _SAME}
        return cls(rank=rank, scale=alpha / rank, pairs=pairs, **same)


def _read(directory: Path) -> tuple[tuple[int, float], _Header]:
    """Rank and alpha of peft's config, and our header."""
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        with safe_open(directory / TENSORS, "pt") as file:
            header = from_json((file.metadata() or {})[_KEY], _Header)
        return (int(config["r"]), float(config["lora_alpha"])), header
    except OSError as error:
        raise InvalidWeights(f"cannot read the reading adapter {directory}: {error}") from None
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InvalidWeights(
            f"{directory} holds no reading adapter of this version ({error}); make it again with "
            "`memstore adapt`"
        ) from None


def _fits(layer: nn.Linear, rank: int, a: Tensor, b: Tensor) -> bool:
    sizes = (rank, layer.in_features), (layer.out_features, rank)
    return (tuple(a.shape), tuple(b.shape)) == sizes and all(
        bool(half.isfinite().all()) for half in (a, b)
    )


def _linear(model: Any) -> dict[str, nn.Linear]:
    """The linear layers of a model except its head, by name."""
    head = model.get_output_embeddings()
    return {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and part is not head
    }


def attach_adapter(
    model: nn.Module, adapter: ReadingAdapter, dtype: torch.dtype | None = None
) -> list[nn.Parameter]:
    """Attach an adapter to a model; the ForwardCache of a pass decides whether it is used.

    dtype: makes the adapter's `pairs` trainable parameters of this dtype, and returns them, ordered
    by layer name; None: the adapter is not trained, and has the dtype of the weights.
    """
    layers = _linear(model)
    parameters: list[nn.Parameter] = []
    for name, pair in sorted(adapter.pairs.items()):
        layer = layers[name]
        form = layer.weight.dtype if dtype is None else dtype
        a, b = (half.to(layer.weight.device, form) for half in pair)
        if dtype is not None:
            a, b = nn.Parameter(a), nn.Parameter(b)
            adapter.pairs[name] = a, b
            parameters += [a, b]
        set_low_rank(layer, LowRank(a, b, adapter.scale))
    return parameters
