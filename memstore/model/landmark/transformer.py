"""The decoder of a landmark model (RMSNorm, RoPE, SwiGLU, tied embeddings), its configuration, and
both with a tokenizer as a model adapter. The caller computes attention.

`Transformer.hidden(ids, attend)` calls `attend(layer_idx, q, k, v)` once a layer with queries, keys
and values [B, H, T, D] without positions, and continues with its result; training and sessions pass
different functions and share all weights.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Literal, cast

import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor, nn

from memstore.decode import Amount, Layer, Share, typed
from memstore.disk.format.signature import Signature
from memstore.errors import InvalidConfig, InvalidInput
from memstore.kernels.api import NEG
from memstore.kernels.reference import accumulate
from memstore.model.adapter import Attend, Enter, ModelAdapter, Shape
from memstore.model.lookup_settings import LOOKUP_SETTINGS, Granularity, LookupSettings
from memstore.model.rotary import Rope
from memstore.model.tokenizer import Tokenizer

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
        """The contradiction between fields, if any; `from_dict` checks each value alone."""
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
        """The landmark's token id, the last but one; the last is the CMT's. No text has either."""
        return self.vocab_size - 2

    @property
    def lookup(self) -> LookupSettings:
        """Default settings of lookups."""
        own = {name: getattr(self, name) for name in LOOKUP_SETTINGS if hasattr(self, name)}
        return LookupSettings(**own)

    @property
    def shape(self) -> Shape:
        """The shape that sessions and stores need."""
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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values of the fields a configuration file holds."""
        return asdict(self) | {"memory_layers": list(self.memory_layers or ())}

    def architecture(self) -> dict[str, Any]:
        """`to_dict` without settings of lookups, which change neither training nor storage."""
        return {
            name: value for name, value in self.to_dict().items() if name not in LOOKUP_SETTINGS
        }

    def signature(self, weights: str, tokenizer: str) -> Signature:
        """The signature of a model of this shape. weights, tokenizer: their digests."""
        return Signature(
            weights=weights,
            tokenizer=tokenizer,
            architecture=self.architecture(),
            kv_dtype=self.kv_dtype,
            num_layers=self.num_layers,
            memory_layers=tuple(self.memory_layers or ()),
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
        )

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
    "paper": ModelConfig(
        vocab_size=32_002, num_layers=12, hidden_size=1024, num_heads=8, num_kv_heads=8,
        head_dim=128, mlp_size=2816, block_size=50, top_k=4, chunk_blocks=5,
        old_block_position="stingy", qk_norm=False,
    ),
}  # fmt: skip
"""Named shapes: `test`, `books` (the model that ships), and `paper` (12 layers of 8 heads x 128,
block 50, as in arXiv 2305.16300).
"""


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class DecoderLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        hidden, mlp = config.hidden_size, config.mlp_size
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.attention_norm = RMSNorm(hidden, config.norm_eps)
        self.mlp_norm = RMSNorm(hidden, config.norm_eps)
        self.q_proj = nn.Linear(hidden, heads, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, hidden, bias=False)
        self.gate_proj = nn.Linear(hidden, mlp, bias=False)
        self.up_proj = nn.Linear(hidden, mlp, bias=False)
        self.down_proj = nn.Linear(mlp, hidden, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """States [B, T, hidden] -> q [B, H, T, D] and k, v [B, Hkv, T, D], without positions."""
        x = self.attention_norm(x)
        q, k = self._heads(self.q_norm, self.q_proj(x)), self._heads(self.k_norm, self.k_proj(x))
        return q, k, self._heads(None, self.v_proj(x))

    def _heads(self, norm: nn.Module | None, x: Tensor) -> Tensor:
        """[B, T, H * D] -> normalised [B, H, T, D]."""
        x = x.view(*x.shape[:-1], -1, self.head_dim)
        return (x if norm is None else norm(x)).transpose(1, 2)

    def mlp(self, x: Tensor) -> Tensor:
        """x + SwiGLU(x), with its norm, for x [B, T, hidden]."""
        normed = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))

    def forward(self, x: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        attended = attend(*self.project(x)).transpose(1, 2).flatten(2)
        return self.mlp(x + self.o_proj(attended))


class Transformer(nn.Module):
    """The decoder of a ModelConfig, with RoPE as `self.rope`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.shape, self.lookup = config.shape, config.lookup
        self.landmark_id = config.landmark_id
        self.rope = Rope(config.head_dim, config.rope_base, config.rope_interleaved)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        # by layer and head [L, H, D], what rows that skip their lookup get; None = not measured
        self.cmt_values: Tensor | None
        self.register_buffer("cmt_values", None)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw normal weights of deviation 0.02; those of projections back into the residual stream
        are smaller by sqrt(2 * layers).
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / math.sqrt(2 * self.config.num_layers) if into_stream else 0.02
                nn.init.normal_(parameter, std=std, generator=generator)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights."""
        return self.norm.weight.dtype

    def hidden(
        self, ids: Tensor, attend: Attend, *, layers: int | None = None, enter: Enter | None = None
    ) -> Tensor:
        """ids [B, T] -> normalised last hidden states [B, T, hidden]; `attend` as in the module's
        docstring.

        layers: run only the first ones; then the states are not normalised. enter(layer_idx, x):
        called before each layer with the states [B, T, hidden] that enter it.
        """
        x = self.embedding(ids)
        for layer, block in enumerate(self.blocks[:layers]):
            if enter is not None:
                enter(layer, x)
            x = block(x, lambda q, k, v, layer=layer: attend(layer, q, k, v))
        return self.norm(x) if layers in (None, len(self.blocks)) else x

    def next_projections(
        self, layer_idx: int, x: Tensor, attended: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of the layer after layer_idx, for states x [B, T, hidden] that enter layer_idx
        and its attention output `attended` [B, H, T, D].
        """
        blocks = cast(list[DecoderLayer], self.blocks)
        block, following = blocks[layer_idx], blocks[layer_idx + 1]
        x = block.mlp(x + block.o_proj(attended.transpose(1, 2).flatten(2)))
        return following.project(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., hidden] -> next-token logits [..., vocab_size] through the tied
        embedding.
        """
        return F.linear(hidden, self.embedding.weight)

    def cmt_keys(self) -> list[Tensor] | None:
        """The context miss token's key of every layer, [Hkv, D], rotated to position -1; None for a
        model without one.

        The CMT passes through the layers with zero attention output, so the keys depend on weights
        alone (docs/appendix/method.md section 3).
        """
        if not self.config.cmt:
            return None
        x = self.embedding.weight[-1:][None]
        cos, sin = self.rope.angles(-1, 0, x)
        keys = []
        for block in cast(list[DecoderLayer], self.blocks):
            _, k, _ = block.project(x)
            keys.append(self.rope.rotate(k, cos, sin)[0, :, 0])
            x = block.mlp(x)
        return keys


class LandmarkReader(ModelAdapter):
    """A transformer whose tokens and heads look up blocks by landmark keys, with its tokenizer.

    cmt_keys: for each layer [Hkv, D], the context miss token's key at position -1; its share of
    attention is the gate. None for a model without a gate. cmt_values: [L, H, D], for rows that
    skip their lookup; None: the chunk gets memory's share of their attention.
    """

    def __init__(self, transformer: Transformer, tokenizer: Tokenizer) -> None:
        config = transformer.config
        self.transformer, self.config = transformer, config
        self.shape, self.lookup, self.rope = config.shape, config.lookup, transformer.rope
        self.landmark_id = config.landmark_id
        self.tokenizer: Tokenizer = tokenizer
        with torch.no_grad():
            self.cmt_keys, self.cmt_values = transformer.cmt_keys(), transformer.cmt_values

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

    def logits(self, states: Tensor, *, quantized: bool = False) -> Tensor:
        logits = accumulate(self.transformer.logits(states))  # float16 has no NEG
        logits[..., self.landmark_id :] = NEG  # nor is the context miss token text
        return logits

    def question_ids(self, question: str) -> list[int]:
        """The ids of a question, as typed."""
        return self.tokenizer.encode(question.rstrip())
