"""Settings of the memories that landmarks are compared with."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from msgspec import Meta

from memstore.decode import Layer
from memstore.errors import InvalidConfig
from memstore.model.landmark.transformer import ModelConfig

Kind = Literal["none", "full", "transformer-xl", "memorizing", "infini"]
Tokens = Annotated[int, Meta(ge=0, lt=1 << 31)]


@dataclass(frozen=True)
class MemoryConfig:
    """One memory. What belongs to one kind alone is ignored by the others."""

    kind: Kind
    # tokens that are read at once and see each other; None = the model's chunk of blocks
    segment: Annotated[int, Meta(ge=1, lt=1 << 24)] | None = None
    # transformer-xl, memorizing: tokens before the segment that every layer sees; None = a segment
    cache: Tokens | None = None
    # memorizing: the layer with a memory of tokens; None = three quarters up
    layer: Layer | None = None
    top_k: Annotated[int, Meta(ge=1, le=1024)] = 32  # memorizing: tokens that a row retrieves
    tokens: Tokens | None = None  # memorizing: the latest that are remembered; None = all

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


MEMORIES: dict[str, MemoryConfig] = {
    kind: MemoryConfig(kind) for kind in ("none", "full", "transformer-xl", "memorizing", "infini")
}
"""What landmarks are compared with. none: the segment alone; full: all that was read (the
ceiling).
"""
