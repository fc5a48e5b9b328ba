"""The signature of a model: models with equal signatures can use each other's memories."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from memstore.block import KV_DTYPES, Geometry
from memstore.decode import Layer, Line, Positive, check_plain, typed
from memstore.errors import InvalidConfig, WrongModel


@dataclass(frozen=True)
class ModelName:
    """The name of a model, and its source; ignored by comparisons."""

    title: Line  # "SmolLM2-135M-Instruct"
    # to load it again: a packaged model's name, a local directory or file, or a name on the
    # Hugging Face hub; None if unknown
    source: Line | None = None

    @property
    def public(self) -> "ModelName":
        """A copy without a local path, for other users."""
        local = self.source is not None and Path(self.source).is_absolute()
        return replace(self, source=None) if local else self


@dataclass(frozen=True)
class Signature:
    """The identity of a model for its memories: weights, tokenizer, architecture and KV geometry;
    and the model's name, which comparisons ignore.
    """

    weights: Line  # hex digest of the weights
    tokenizer: Line  # hex digest of the tokenizer
    # all that determines keys and values: layers, RoPE, norms, block size; plain JSON values
    architecture: dict[str, Any]
    kv_dtype: str  # "float32" | "float16" | "bfloat16"
    num_layers: Layer
    memory_layers: tuple[Layer, ...]  # layers whose landmarks are indexed
    num_kv_heads: Layer
    head_dim: Positive
    block_size: Positive  # content tokens of a block
    model: ModelName | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.kv_dtype not in KV_DTYPES:
            raise InvalidConfig(
                f"KV dtype {self.kv_dtype!r} is not stored; choose one of {', '.join(KV_DTYPES)}"
            )
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not set(self.memory_layers) <= set(range(self.num_layers)):
            raise InvalidConfig(
                f"memory layers {self.memory_layers} are not in 0..{self.num_layers - 1}"
            )

    @property
    def geometry(self) -> Geometry:
        """The geometry of the memory's blocks."""
        return Geometry(self.num_kv_heads, self.block_size, self.head_dim, self.kv_dtype)

    @cached_property
    def digest(self) -> bytes:
        """A digest of 16 bytes, stored in records; it ignores the model's name."""
        values = {name: value for name, value in self.to_dict().items() if name != "model"}
        text = json.dumps(_plain(values), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def to_dict(self) -> dict[str, Any]:
        """The signature as plain values."""
        values = {**asdict(self), "memory_layers": list(self.memory_layers)}
        if self.model is None:
            del values["model"]
        return values

    @property
    def public(self) -> "Signature":
        """A copy without a local path."""
        return self if self.model is None else replace(self, model=self.model.public)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The signature of plain values that `to_dict` returned. Raises InvalidConfig."""
        try:
            check_plain(typed(values, dict[str, Any]).get("architecture"), "architecture")
            unknown = values.keys() - {f.name for f in fields(cls)}
            if unknown:
                raise ValueError(f"unknown field {min(unknown)!r}")
            return typed(values, cls)
        except (ValueError, InvalidConfig) as error:
            raise InvalidConfig(f"invalid signature of a model: {error}") from error

    def difference(self, other: "Signature") -> list[str]:
        """The fields that differ, those of the architecture last; empty if each model can use the
        other's memories.
        """
        compared = [f.name for f in fields(self) if f.compare and f.name != "architecture"]
        mine, others = self.architecture, other.architecture
        return [
            *(name for name in compared if getattr(self, name) != getattr(other, name)),
            *(name for name in sorted(mine | others) if mine.get(name) != others.get(name)),
        ]

    def check_same(self, stored: "Signature", what: str, advice: str) -> None:
        """Raises WrongModel, which names both models, if `what` was made with another model."""
        differences = self.difference(stored)
        if not differences:
            return
        mine, others = (_title(signature) for signature in (self, stored))
        said = f"{what} was made with {others}; this is {mine}"
        if mine == others:
            said += f", with other {', '.join(differences)}"
        raise WrongModel(f"{said}; {advice}", differences)


def _title(signature: Signature) -> str:
    return "a model without a name" if signature.model is None else signature.model.title


def _plain(value: Any) -> Any:
    """A canonical form of equal values: whole floats as integers, and no entries with None."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, bool | float) and value == int(value):
        return int(value)
    return value
