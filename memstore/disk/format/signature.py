"""What must be equal for one model's memory to be another's."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Self

from memstore.block import KV_DTYPES, Geometry
from memstore.decode import Layer, Line, Positive, check_plain, typed
from memstore.errors import InvalidConfig


@dataclass(frozen=True)
class Signature:
    """What must be equal for one model's memory to be another's: weights, tokenizer, architecture,
    KV geometry.
    """

    weights: Line  # hex digest of the weights
    tokenizer: Line  # hex digest of the tokenizer
    # what shapes keys and values: layers, RoPE, norms, block size; plain JSON values
    architecture: dict[str, Any]
    kv_dtype: str  # "float32" | "float16" | "bfloat16"
    num_layers: Layer
    memory_layers: tuple[Layer, ...]  # layers whose landmarks are indexed
    num_kv_heads: Layer
    head_dim: Positive
    block_size: Positive  # content tokens of a block

    def __post_init__(self) -> None:
        if self.kv_dtype not in KV_DTYPES:
            raise InvalidConfig(
                f"KV dtype {self.kv_dtype!r} is not stored; choose one of {', '.join(KV_DTYPES)}"
            )
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not set(self.memory_layers) <= set(range(self.num_layers)):
            raise InvalidConfig(f"memory layers {self.memory_layers} of {self.num_layers} layers")

    @property
    def geometry(self) -> Geometry:
        """Of the memory's blocks."""
        return Geometry(self.num_kv_heads, self.block_size, self.head_dim, self.kv_dtype)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes by which a record says whose it is: equal for signatures without a
        difference.
        """
        text = json.dumps(_plain(self.to_dict()), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def to_dict(self) -> dict[str, Any]:
        """The signature as plain values."""
        return {**asdict(self), "memory_layers": list(self.memory_layers)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The signature that `to_dict` was taken of. Raises InvalidConfig."""
        try:
            check_plain(typed(values, dict[str, Any]).get("architecture"), "architecture")
            unknown = values.keys() - {f.name for f in fields(cls)}
            if unknown:
                raise ValueError(f"a signature has no {min(unknown)!r}")
            return typed(values, cls)
        except (ValueError, InvalidConfig) as error:
            raise InvalidConfig(f"no signature of a model: {error}") from error

    def difference(self, other: "Signature") -> list[str]:
        """What differs, in words, one entry a field; empty when a memory of the one serves the
        other.
        """
        words = []
        for name in (f.name for f in fields(self) if f.name != "architecture"):
            mine, others = getattr(self, name), getattr(other, name)
            if mine != others:
                if name in ("weights", "tokenizer"):
                    mine, others = mine[:12], others[:12]
                words.append(f"{name} {mine} instead of {others}")
        for name in sorted(self.architecture.keys() | other.architecture.keys()):
            mine, others = self.architecture.get(name), other.architecture.get(name)
            if mine != others:
                words.append(f"{name} {mine} instead of {others}")
        return words


def _plain(value: Any) -> Any:
    """What is equal, written in one way: a whole number as such, and nothing for None."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, bool | float) and value == int(value):
        return int(value)
    return value
