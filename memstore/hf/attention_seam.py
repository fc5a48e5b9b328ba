"""Replace the attention of a transformers model: the caller gets queries, keys and values without
rotary positions, applies the model's rotary positions (ModelRotary), and returns the attention
output.

An attached model computes the same as before unless a forward pass gets a `ForwardCache`: in that
pass, RoPE is off and `ForwardCache.attend` computes the attention.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from memstore.errors import InvalidWeights
from memstore.model.adapter import Attend, AttentionSpec, Enter
from memstore.model.rotary import Positions

# tolerances relative to the largest expected value: for float32 and float64, for half precision
_EXACT_TOLERANCE, _HALF_TOLERANCE = 1e-4, 0.05
_TABLE = 4096  # rotary positions to begin with
_UNSTEADY = {
    "dynamic": "its frequencies change with the length of the text (dynamic RoPE)",
    "longrope": "its frequencies change with the length of the text (LongRoPE)",
}
_PREFIX = "memstore_"  # registered name: this and the name of the attention it replaces
_active = threading.local()  # .cache: the ForwardCache of this thread's forward pass
# arguments of an attention function, besides q, k, v and the mask, that we support or ignore
_SUPPORTED = {"scaling", "dropout", "sliding_window", "softcap"}
_IGNORED = {
    "position_ids",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "is_causal",
    "cache_position",
    "past_key_values",
    "cache",
    "num_items_in_batch",
    "logits_to_keep",
    "position_embeddings",
}


class ForwardCache(Cache):
    """The cache argument of a forward pass, which carries the caller's attention and says how to
    compute the pass. It stores no keys and values: a cache without layers.
    """

    def __init__(
        self,
        attend: Attend,
        *,
        layers: int | None = None,
        enter: Enter | None = None,
        adapt: bool | Tensor = False,
        quantized: bool = False,
    ) -> None:
        """attend, layers, enter: see ModelAdapter.hidden. adapt: whether linear layers add the
        updates of the reading adapter; a tensor [.., T, 1] decides for each row. quantized: whether
        they multiply by quantized weights, if they have some.
        """
        super().__init__(layers=[])
        self.attend, self.stop, self.enter = attend, layers, enter
        self.adapt, self.quantized = adapt, quantized
        self.forms: dict[int, AttentionSpec] = {}  # by layer; filled as layers attend
        self.zero_rotation = False  # RoPE returns zeros, which shows the tensors it rotates

    def begin_layer(self, layer: int, states: Tensor) -> None:
        """Called before a layer with the states that enter it. Raises Stopped."""
        if layer == self.stop:
            raise Stopped(states)
        if self.enter is not None:
            self.enter(layer, states)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


class Stopped(Exception):
    """Ends a forward pass before layer ForwardCache.stop; `states` are those that enter it."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states


def current() -> ForwardCache | None:
    """The ForwardCache of this thread's forward pass, or None."""
    return getattr(_active, "cache", None)


@contextmanager
def active(cache: ForwardCache) -> Iterator[None]:
    """Context in which a layer, called without its decoder, computes with this cache."""
    _active.cache = cache
    try:
        yield
    finally:
        _active.cache = None


def _decoder_of(model: nn.Module) -> nn.Module:
    """Find the module that holds a model's layers. Raises InvalidWeights."""
    found = [
        module
        for module in model.modules()
        if isinstance(getattr(module, "layers", None), nn.ModuleList)
        and isinstance(getattr(module, "rotary_emb", None), nn.Module)
    ]
    if len(found) != 1:
        raise InvalidWeights(
            f"{type(model).__name__} has no rotary positions (RoPE) over one stack of layers; a "
            "memory needs them"
        )
    return found[0]


class _Rotary(nn.Module):
    """A model's rotary embedding, disabled in a pass with a ForwardCache."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cos, sin = self.original(*args, **kwargs)
        cache = current()
        if cache is None:
            return cos, sin
        constant = torch.zeros_like if cache.zero_rotation else torch.ones_like
        return constant(cos), torch.zeros_like(sin)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("original"), name)


def attach(model: nn.Module) -> nn.Module:
    """Make a model accept a ForwardCache; idempotent. Returns the module that holds its layers.

    Weights and passes without a ForwardCache do not change. Raises InvalidWeights for a model whose
    attention cannot be replaced.
    """
    decoder = _decoder_of(model)
    if isinstance(decoder.rotary_emb, _Rotary):
        return decoder
    module = sys.modules[type(decoder).__module__]
    if not callable(getattr(module, "apply_rotary_pos_emb", None)):
        raise InvalidWeights(
            f"{type(model).__name__} applies rotary positions in its own way, which "
            "memstore does not support; use another model"
        )
    config = cast(Any, model).config
    former = config._attn_implementation or "eager"
    name = f"{_PREFIX}{former}"
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register(name, _attention(former))
        AttentionMaskInterface.register(name, _mask(former))
    cast(Any, model).set_attn_implementation(name)
    decoder.rotary_emb = _Rotary(cast(nn.Module, decoder.rotary_emb))
    decoder.register_forward_pre_hook(_begin, with_kwargs=True)
    decoder.register_forward_hook(_end, with_kwargs=True, always_call=True)
    for layer, block in enumerate(cast(nn.ModuleList, decoder.layers)):
        block.register_forward_pre_hook(_layer_hook(layer), with_kwargs=True)
    return decoder


def _begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    caches = (value for value in (*args, *kwargs.values()) if isinstance(value, ForwardCache))
    _active.cache = next(caches, None)


def _end(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    _active.cache = None


def _layer_hook(layer: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = current()
        if cache is not None:
            cache.begin_layer(layer, args[0] if args else kwargs["hidden_states"])

    return hook


def _attention(former: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Make the function that a model calls instead of its attention `former`."""

    def attention(  # named as transformers names them: some models pass the mask by name
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        cache = current()
        if cache is None:
            eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
            function = ALL_ATTENTION_FUNCTIONS.get_interface(former, cast(Any, eager))
            return cast(Any, function(module, query, key, value, attention_mask, **options))
        unsupported = sorted(
            name
            for name, value in {**options, "attention_mask": attention_mask}.items()
            if name not in _SUPPORTED | _IGNORED and value is not None
        )
        if unsupported:
            raise InvalidWeights(
                f"{type(module).__name__} attends with {', '.join(unsupported)}, which memory "
                "attention does not support; use another model"
            )
        layer = cast(int, module.layer_idx)
        scale = options.get("scaling")
        cache.forms[layer] = AttentionSpec(
            query.shape[-1] ** -0.5 if scale is None else float(scale),
            options.get("sliding_window"),
            options.get("softcap"),
        )
        return cache.attend(layer, query, key, value).transpose(1, 2).contiguous(), None

    return attention


def _mask(former: str) -> Callable[..., Any]:
    """Make the mask function of the attention `former`; no mask in a pass with a ForwardCache."""

    def mask(*args: Any, **kwargs: Any) -> Any:
        if current() is not None:
            return None
        return ALL_MASK_ATTENTION_FUNCTIONS[former](*args, **kwargs)

    return mask


def run_layers(decoder: nn.Module, ids: Tensor, cache: ForwardCache) -> Tensor:
    """Run ids [B, T] through a decoder's layers before cache.stop (None: all layers and the final
    norm) -> states [B, T, hidden_size].
    """
    try:
        output = decoder(input_ids=ids, **cache_argument(decoder, cache), use_cache=True)
    except Stopped as stopped:
        return stopped.states
    return cast(Tensor, output.last_hidden_state)


def cache_argument(model: nn.Module, cache: Cache) -> dict[str, Cache]:
    """A cache as the keyword argument of a model's forward; transformers 5.24 renamed it."""
    return {_cache_name(type(model).forward): cache}


@functools.cache  # reading a signature is slow, and every token needs it
def _cache_name(forward: Callable[..., Any]) -> str:
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def difference_beyond_rounding(found: Tensor, expected: Tensor, dtype: torch.dtype) -> float | None:
    """The largest absolute difference of two tensors; None if rounding in dtype explains it."""
    exact = dtype in (torch.float32, torch.float64)
    tolerance = float(expected.abs().max()) * (_EXACT_TOLERANCE if exact else _HALF_TOLERANCE)
    difference = float((found - expected).abs().max())
    return None if difference <= tolerance else difference


# Rotary positions


class ModelRotary:
    """Rotates queries and keys [.., T, D] of a layer exactly as the model's own code, attention
    scaling included, with tables of its cosines and sines.
    """

    def __init__(self, decoder: nn.Module, config: Any, turned: Sequence[bool]) -> None:
        """decoder: attached; turned: for each layer, whether it has positions.

        Raises InvalidWeights for frequencies that change with the length.
        """
        rotary = cast(Any, decoder.rotary_emb).original
        kinds = getattr(rotary, "rope_type", "default")
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind in _UNSTEADY:
                raise InvalidWeights(
                    f"{config.model_type}: {_UNSTEADY[kind]}, so that "
                    "keys stored at one length are wrong at another; use another model"
                )
        self._rotary = rotary
        self._apply: Callable[..., tuple[Tensor, Tensor]] = sys.modules[
            type(decoder).__module__
        ].apply_rotary_pos_emb
        typed = "layer_type" in inspect.signature(rotary.forward).parameters
        self._types: list[str | None] = list(config.layer_types) if typed else [None] * len(turned)
        self._turned = turned
        self.kinds = list(zip(self._types, turned))  # of each layer; equal where they turn alike
        self._half_split = _is_half_split(self._apply)
        self._tables: dict[tuple[str | None, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}
        self._outgrown: list[tuple[Tensor, Tensor]] = []  # which a CUDA graph may still read
        self._growing = threading.Lock()

    def rotate(self, layer: int, x: Tensor, positions: Tensor | range | Positions) -> Tensor:
        """Rotate x [.., T, D] to positions [T] (0 and above)."""
        if not self._turned[layer] or not x.numel():
            return x
        shape = x.shape
        x = x.reshape(1, -1, *shape[-2:])
        cos, sin = self._angles(self._types[layer], positions, x)
        turned = cos.shape[-1]
        part = x[..., :turned]
        if self._half_split:
            rotated = _half_split(part.to(cos.dtype), cos, sin)  # OLMo rotates in float32
        else:
            rotated = self._apply(part, part[:, :0], cos, sin)[0]
        rotated = rotated.to(x.dtype)
        if turned < shape[-1]:
            rotated = torch.cat((rotated, x[..., turned:]), -1)
        return rotated.view(shape)

    def _angles(
        self, kind: str | None, positions: Tensor | range | Positions, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The model's cosines and sines [1, T, d] of positions [T]."""
        if isinstance(positions, range):
            cos, sin = self._table(kind, positions.stop, x)
            at = slice(positions.start, positions.stop)
            return cos[:, at], sin[:, at]
        if not isinstance(positions, Positions):
            positions = Positions(positions, int(positions.max()) + 1)
        found = positions.angles.get((kind, x.dtype))
        if found is None:
            cos, sin = self._table(kind, positions.reach, x)
            found = cos[:, positions.at], sin[:, positions.at]
            positions.angles[kind, x.dtype] = found
        return found

    def _table(self, kind: str | None, reach: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """The model's cosines and sines [1, n, d] of positions 0 .. n - 1, n >= reach; sines are
        `_signed` if `_half_split` uses them.
        """
        key = (kind, x.dtype, x.device)
        with self._growing:
            table = self._tables.get(key)
            if table is None or table[0].shape[1] < reach:
                self._outgrown += [] if table is None else [table]
                size = max(_TABLE, 1 << (reach - 1).bit_length())
                places = torch.arange(size, device=x.device)[None]
                of_kind = () if kind is None else (kind,)
                with torch.no_grad():
                    cos, sin = self._rotary(x.new_zeros(1), places, *of_kind)
                table = self._tables[key] = cos, _signed(sin) if self._half_split else sin
        return table


def _half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation of most models in half as many operations: x [1, H, T, D] by cosines and
    `_signed` sines [1, T, D]; dimensions i and i + D/2 are a pair.
    """
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(sin))


def _signed(sin: Tensor) -> Tensor:
    """Sines [.., D], negative in the first half of the dimensions."""
    first, second = sin.chunk(2, -1)
    return torch.cat((-first, second), -1)


def _is_half_split(apply: Callable[..., tuple[Tensor, Tensor]]) -> bool:
    """Whether a model's code computes the same as `_half_split`."""
    draw = torch.Generator().manual_seed(0)
    x, cos, sin = (torch.randn(1, 3, 5, 8, generator=draw) for _ in range(3))
    cos, sin = cos[:, 0], sin[:, 0]
    try:
        theirs = apply(x, x[:, :0], cos, sin)[0]
    except (RuntimeError, TypeError, IndexError, ValueError):
        return False
    return theirs.shape == x.shape and torch.equal(theirs, _half_split(x, cos, _signed(sin)))
