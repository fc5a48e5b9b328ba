"""The model's configuration and the named presets."""

from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta

from memstore.decode import Amount, Layer, Share, typed
from memstore.errors import InvalidConfig, InvalidInput
from memstore.model.adapter import Shape
from memstore.model.lookup_settings import LOOKUP_SETTINGS, Granularity, LookupSettings

Size = Annotated[int, Meta(ge=1, lt=1 << 24)]
Layers = Annotated[int, Meta(ge=1, le=4096)]
OldBlockPosition = Literal["fixed", "stingy"]


@dataclass(frozen=True)
class ModelConfig:
    """Shape and conventions of a landmark-attention decoder. Every field is part of a memory's
    signature.
    """

    # text tokens, then the landmark and the CMT as the last two ids
    vocab_size: Annotated[int, Meta(ge=3, lt=1 << 24)] = 2048
    num_layers: Layers = 4
    hidden_size: Size = 128
    num_heads: Size = 4
    num_kv_heads: Size = 4  # fewer than num_heads = grouped-query attention
    head_dim: Size = 32
    mlp_size: Size = 352  # SwiGLU's inner width
    # content tokens in a block; its landmark is one more position
    block_size: Annotated[int, Meta(ge=1, lt=1 << 16)] = 32
    rope_base: Annotated[float, Meta(gt=0, le=1e300)] = 10_000.0
    rope_interleaved: bool = False  # pairing of dimensions: (0,1),(2,3).. or (0,d/2),(1,d/2+1)..
    qk_norm: bool = True  # RMSNorm of every query and key head
    cmt: bool = True  # context miss token and its gate
    memory_layers: tuple[Layer, ...] | None = None  # layers with memory; None = all but layer 0
    # where old blocks are seen: one constant distance, or the paper's slots
    old_block_position: OldBlockPosition = "fixed"
    # the constant distance in positions; 0 = 5 * (block_size + 1)
    old_block_distance: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    # of stored keys and values
    kv_dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float16"
    norm_eps: Share = 1e-5
    # What lookups do unless told otherwise: see LookupSettings.
    top_k: Size = 4
    score_range: Amount | None = None
    recency: Amount = 0.0
    supersede: Amount = 0.0
    granularity: Granularity = "per_token_per_head"
    cmt_cutoff: Share = 0.1
    chunk_blocks: Size = 8

    def __post_init__(self) -> None:
        if self.old_block_distance == 0:
            object.__setattr__(self, "old_block_distance", 5 * (self.block_size + 1))
        layers = (
            range(1, self.num_layers)
            if self.memory_layers is None
            else sorted(set(self.memory_layers))
        )
        object.__setattr__(self, "memory_layers", tuple(layers))
        if problem := self._problem():
            raise InvalidConfig(f"model configuration: {problem}")

    def _problem(self) -> str | None:
        """What contradicts itself; `from_dict` checks each value alone."""
        if self.num_heads % self.num_kv_heads:
            heads = f"num_heads ({self.num_heads})"
            return f"{heads} must be a multiple of num_kv_heads ({self.num_kv_heads})"
        if self.head_dim % 2:
            return f"head_dim must be even for RoPE, not {self.head_dim}"
        layers = self.memory_layers or ()
        if layers and not 0 <= layers[0] <= layers[-1] < self.num_layers:
            return f"memory_layers {layers} must lie in 0..{self.num_layers - 1}"
        try:
            _ = self.lookup
        except InvalidInput as error:
            return str(error)
        return None

    @property
    def landmark_id(self) -> int:
        """The id before the last, which no text has."""
        return self.vocab_size - 2

    @property
    def cmt_id(self) -> int:
        """The last id, which no text has."""
        return self.vocab_size - 1

    @property
    def lookup(self) -> LookupSettings:
        """What lookups do unless told otherwise."""
        own = {name: getattr(self, name) for name in LOOKUP_SETTINGS if hasattr(self, name)}
        return LookupSettings(**own)

    @property
    def shape(self) -> Shape:
        """What sessions and stores have to know of it."""
        fixed = self.old_block_position == "fixed"
        return Shape(
            num_layers=self.num_layers,
            memory_layers=tuple(self.memory_layers or ()),
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            old_block_distance=self.old_block_distance if fixed else None,
            kv_dtype=getattr(torch, self.kv_dtype),
        )

    @property
    def stride(self) -> int:
        """Positions of a block with its landmark: block_size + 1."""
        return self.block_size + 1

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values of the fields a configuration file holds."""
        return asdict(self) | {"memory_layers": list(self.memory_layers or ())}

    def architecture(self) -> dict[str, Any]:
        """`to_dict` without the settings of a lookup, which change nothing that is trained or
        stored.
        """
        return {
            name: value for name, value in self.to_dict().items() if name not in LOOKUP_SETTINGS
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """The configuration of a file's values; InvalidConfig names an unknown field."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise InvalidConfig(
                f"model configuration: unknown field {unknown[0]!r}; written by a newer memstore?"
            )
        try:
            return typed(values, cls)
        except ValueError as error:
            raise InvalidConfig(f"model configuration: {error}") from None


PRESETS: dict[str, ModelConfig] = {
    "test": ModelConfig(),  # 1.07M parameters
    # 1.57M parameters: the one that ships
    "books": ModelConfig(num_layers=5, mlp_size=512, memory_layers=(2, 3, 4)),
    "small": ModelConfig(
        vocab_size=4096, num_layers=6, hidden_size=256, num_heads=8, num_kv_heads=8, mlp_size=704
    ),
    "medium": ModelConfig(
        vocab_size=8192, num_layers=8, hidden_size=512, num_heads=8, num_kv_heads=4, head_dim=64,
        mlp_size=1408, block_size=63
    ),
    "paper": ModelConfig(
        vocab_size=32_002, num_layers=12, hidden_size=1024, num_heads=8, num_kv_heads=8,
        head_dim=128, mlp_size=2816, block_size=50, top_k=4, chunk_blocks=5,
        old_block_position="stingy", qk_norm=False,
    ),
}  # fmt: skip
"""Named shapes: `test`, `books` (the model that ships), and larger ones up to
`paper` (12 layers of 8 heads x 128, block 50, as in arXiv 2305.16300).
"""
