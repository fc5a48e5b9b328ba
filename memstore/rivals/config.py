"""Which memory a decoder has instead of landmarks, and its settings; those that are compared."""

from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta

from memstore.decode import Amount, Layer, typed
from memstore.errors import InvalidConfig
from memstore.model.config import ModelConfig

Kind = Literal["none", "full", "transformer-xl", "memorizing", "infini"]
KINDS = get_args(Kind)
Tokens = Annotated[int, Meta(ge=0, lt=1 << 31)]


@dataclass(frozen=True)
class MemoryConfig:
    """One memory. What belongs to one kind alone is ignored by the others."""

    kind: Kind
    # tokens that are read at once and see each other; None = the model's chunk of blocks
    segment: Annotated[int, Meta(ge=1, lt=1 << 24)] | None = None
    # transformer-xl, memorizing: tokens before the segment that every layer sees; None = a segment
    cache: Tokens | None = None
    # transformer-xl: rotary, by true distance, or the relative positions of its paper
    positions: Literal["rope", "relative"] = "rope"
    # memorizing: the layer with a memory of tokens; None = three quarters up
    layer: Layer | None = None
    top_k: Annotated[int, Meta(ge=1, le=1024)] = 32  # memorizing: tokens that a row retrieves
    tokens: Tokens | None = None  # memorizing: the latest that are remembered; None = all
    update: Literal["delta", "linear"] = "delta"  # infini: the rule that writes
    # memorizing, infini: learning rate of the gates; None = that of gains and embeddings
    gate_lr: Amount | None = None

    def of(self, config: ModelConfig) -> "MemoryConfig":
        """The same with the numbers that a decoder of this configuration gives to those left open.

        Raises InvalidConfig.
        """
        segment = self.segment or config.chunk_blocks * config.block_size
        layer = max(0, 3 * config.num_layers // 4 - 1) if self.layer is None else self.layer
        if layer >= config.num_layers:
            raise InvalidConfig(
                f"the memory's layer {layer} must lie in 0..{config.num_layers - 1}"
            )
        cache = segment if self.cache is None else self.cache
        return replace(self, segment=segment, cache=cache, layer=layer)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> "MemoryConfig":
        """What `to_dict` gave. Raises InvalidConfig."""
        try:
            for name in typed(values, dict[str, Any]):
                if name not in cls.__dataclass_fields__:
                    raise ValueError(f"unknown field {name!r}")
            return typed(values, cls)
        except ValueError as error:
            raise InvalidConfig(f"memory of the model's configuration: {error}") from None


MEMORIES: dict[str, MemoryConfig] = {
    "none": MemoryConfig("none"),
    "full": MemoryConfig("full"),
    "transformer-xl": MemoryConfig("transformer-xl"),
    "transformer-xl-relative": MemoryConfig("transformer-xl", positions="relative"),
    "memorizing": MemoryConfig("memorizing"),
    "infini": MemoryConfig("infini", gate_lr=0.01),
    "infini-linear": MemoryConfig("infini", update="linear", gate_lr=0.01),
    "infini-slow-gate": MemoryConfig("infini"),
}
"""What `memstore train --memory` takes beside landmark. none: the segment alone; full: all that was
read (the ceiling). The gates of Infini-attention stay near one half unless they learn fast; the
slow ones are the published recipe.
"""
