"""Quantized copies, in 8 or 4 bits, of a decoder's linear layers, for generated tokens: each token
reads every weight once, so its time is proportional to their bytes.

Ingested text and questions use the weights as loaded: there many tokens share the reading of a
weight, and stored data must not depend on quantization. The products are torch's for CPUs.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeGuard, cast, get_args

import torch
from torch import Tensor, nn

from memstore.errors import InvalidConfig
from memstore.hf.attention_seam import current
from memstore.hf.reading_adapter import LowRank, low_rank_of

Weights = Literal["auto", "full", "int8", "int4"]
"""auto: 4 bits for a layer whose weights were stored in 4, else 8, on a CPU that is faster so; on
another device, and as full: as they were loaded.
"""
Multiply = Callable[[Tensor], Tensor]
"""x [n, in_features] in bfloat16 -> [n, out_features]: the product with quantized weights."""

_GROUP = 32  # weights of a row that share a scale and a zero point, as in GGUF's Q4_0, Q4_1, Q4_K
_AT_ONCE = 128  # rows that are rounded at once, so that they stay in the cache
_SAMPLE = 8  # rows by which a layer shows whether it was stored in 4 bits
_EXACT = 2.0**-7  # of the largest of a group: what rounding to bfloat16 may change


def multiply(few: Multiply, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x by a layer's weights and add its bias.

    few: the product with the weights, quantized or with an adapter. x: [.., in_features], in any
    dtype. Returns [.., out_features].
    """
    if isinstance(few, Beside):
        product = few(x)
        return product if bias is None else product + bias
    rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16).contiguous()
    product = few(rows).to(x.dtype)
    if bias is not None:
        product = product + bias
    return product.view(*x.shape[:-1], -1)


class Taken(NamedTuple):
    """The weights of its layers that a forward pass uses."""

    quantized: bool  # quantized ones, where there are any
    adapt: bool  # with low-rank updates,
    merged: bool  # which are in copies of the loaded weights


@dataclass(frozen=True)
class Beside:
    """Product with a loaded or quantized weight, plus a low-rank update; None: it is merged."""

    of: Multiply | Tensor
    low_rank: LowRank | None

    @classmethod
    def merged(cls, linear: Sequence[nn.Module]) -> "Beside":
        """Merge the updates of several layers into copies of their weights, concatenated."""
        updates = [cast(LowRank, low_rank_of(one)) for one in linear]
        of = [update.merged(cast(Tensor, one.weight)) for one, update in zip(linear, updates)]
        return cls(torch.cat(of), None)

    def __call__(self, x: Tensor) -> Tensor:
        """x [.., in_features] -> [.., out_features]."""
        if isinstance(self.of, Tensor):
            product = nn.functional.linear(x, self.of)
        else:
            product = multiply(self.of, x)
        return product if self.low_rank is None else self.low_rank.added(product, x)


@torch.no_grad()
def quantized(weight: Tensor, weights: Weights) -> Multiply | None:
    """The product with a weight [out_features, in_features], quantized; None if torch has none for
    its shape.
    """
    out, columns = weight.shape
    if columns % _GROUP:  # torch 2.13 reads beyond the end of such rows
        return None
    fits = out % 16 == 0
    if weights == "auto":
        if not has_fast_products():
            return None
        weights = "int4" if stored_in_4_bits(weight) else "int8"
    return _Int4.of(weight) if weights == "int4" and fits else _Int8.of(weight)


def has_fast_products() -> bool:
    """Whether torch's products with quantized weights are the faster ones on this CPU."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def stored_in_4_bits(weight: Tensor) -> bool:
    """Whether groups of 32 weights lie on grids of 16 levels, up to rounding to bfloat16."""
    groups = weight[:: max(1, len(weight) // _SAMPLE)].float().unflatten(1, (-1, _GROUP))
    return bool(_fits(groups, *_on_grid(groups)).all())


def _fits(groups: Tensor, codes: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    """Whether each of the groups [.., 32] lies on its grid: bool [.., 1]."""
    error = (codes * scale).add_(low).sub_(groups).abs_().amax(-1, keepdim=True)
    return error <= _EXACT * groups.abs().amax(-1, keepdim=True)


def _on_grid(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0 .. 15 of groups [.., 32], and scale and smallest value [.., 1]: code * scale +
    smallest.

    Weights that were stored in 4 bits get their stored codes: if the largest value of a group is
    not at the last of the 16 levels, other levels are tried for it.
    """
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    smallest = torch.finfo(torch.float32).tiny  # of a group that is all alike

    def codes(top: int) -> tuple[Tensor, Tensor]:
        scale = ((high - low) / top).clamp_min_(smallest)
        return (groups - low).div_(scale).round_(), scale

    found, scale = codes(15)
    fits = _fits(groups, found, scale, low)
    for top in range(14, 7, -1):
        if bool(fits.all()):
            break
        others, wider = codes(top)
        better = _fits(groups, others, wider, low) & ~fits
        found, scale = torch.where(better, others, found), torch.where(better, wider, scale)
        fits |= better
    return found, scale, low


@dataclass(frozen=True)
class _Part:
    """Some rows of joined weights."""

    whole: Multiply
    start: int
    stop: int

    def __call__(self, x: Tensor) -> Tensor:
        return self.whole(x)[:, self.start : self.stop]


@dataclass(frozen=True)
class _Int4:
    """4 bits, with a scale and a zero point for every 32 weights of a row."""

    codes: Tensor  # as torch packs them for this CPU
    grids: Tensor  # bfloat16 [in_features / 32, out_features, 2]

    @classmethod
    def of(cls, weight: Tensor) -> "_Int4":
        codes = torch.empty(weight.shape, dtype=torch.int32)
        grids = torch.empty(weight.shape[1] // _GROUP, len(weight), 2, dtype=torch.bfloat16)
        for first in range(0, len(weight), _AT_ONCE):
            at = slice(first, first + _AT_ONCE)
            found, scale, low = _on_grid(weight[at].float().unflatten(1, (-1, _GROUP)))
            codes[at] = found.flatten(1)
            # torch's product takes (code - 8) * scale + zero
            grids[:, at] = torch.cat((scale, low + 8 * scale), -1).transpose(0, 1)
        return cls(torch._convert_weight_to_int4pack_for_cpu(codes, 1), grids)

    @property
    def joins(self) -> bool:
        """Whether the rows can follow others: they are packed in blocks of 64 or 32."""
        return len(self.codes) % 64 == 0

    @classmethod
    def joined(cls, parts: Sequence["_Int4"]) -> "_Int4":
        codes, grids = [one.codes for one in parts], [one.grids for one in parts]
        return cls(torch.cat(codes), torch.cat(grids, 1))

    def __call__(self, x: Tensor) -> Tensor:
        return torch._weight_int4pack_mm_for_cpu(x, self.codes, _GROUP, self.grids)


@dataclass(frozen=True)
class _Int8:
    """8 bits, with a scale for every row."""

    codes: Tensor  # int8 [out_features, in_features]
    scales: Tensor  # bfloat16 [out_features]

    @classmethod
    def of(cls, weight: Tensor) -> "_Int8":
        # codes of the rounded scale: the row as a whole is not scaled by what it was rounded by
        largest = torch.maximum(weight.amax(1), -weight.amin(1))
        scales = (largest.float() / 126.5).clamp_min_(1e-30).to(torch.bfloat16)
        codes = torch.empty(weight.shape, dtype=torch.int8)
        for first in range(0, len(weight), _AT_ONCE):
            at = slice(first, first + _AT_ONCE)
            codes[at] = (weight[at].float() / scales[at, None]).round_()
        return cls(codes, scales)

    @classmethod
    def joined(cls, parts: Sequence["_Int8"]) -> "_Int8":
        return cls(
            torch.cat([one.codes for one in parts]), torch.cat([one.scales for one in parts])
        )

    def __call__(self, x: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x, self.codes, self.scales)


MOST_ROWS = 8  # tokens of a step; more of them are multiplied faster by the weights as loaded


def weights_named(name: str, device: torch.device) -> Weights:
    """The weights with which a model on a device generates. Raises InvalidConfig for a name that is
    not in Weights, and for int8 and int4 except on a CPU.
    """
    if name not in get_args(Weights):
        raise InvalidConfig(f"weights {name!r} are unknown; choose {', '.join(get_args(Weights))}")
    if name in ("int8", "int4") and device.type != "cpu":
        raise InvalidConfig(f"{name} weights are for a CPU; choose auto or full")
    return cast(Weights, name)


class QuantizedWeights:
    """Quantized weights for a decoder's linear layers, in passes whose ForwardCache says so, and
    for its head, for at most MOST_ROWS tokens at once. They are made at first use: the head's for
    the first token, the layers' for the second. Products are in bfloat16.
    """

    def __init__(self, layers: nn.Module, head: nn.Module, weights: Weights) -> None:
        self._linear = [part for part in layers.modules() if _is_plain(part)]
        self._head, self._weights = head, weights
        self._few_head: Multiply | None = None
        self._making, self._made = threading.Lock(), {"layers": False, "head": False}

    def ready(self) -> bool:
        """Whether the layers have quantized weights; makes them if they should have some."""
        return self._make("layers")

    def head(self, states: Tensor) -> Tensor:
        """States [.., hidden_size] -> [.., vocabulary], by quantized weights if they are few."""
        few = states.shape[:-1].numel() <= MOST_ROWS and self._make("head")
        if not few or self._few_head is None:
            return cast(Tensor, self._head(states))
        return multiply(self._few_head, states, cast(nn.Linear, self._head).bias)

    def _make(self, part: Literal["layers", "head"]) -> bool:
        """Make the weights of a part, once; return False if the model should have none."""
        here = all(linear.weight.device.type == "cpu" for linear in self._linear[-1:])
        if self._weights == "full" or not self._linear or not here:
            return False
        with self._making:
            if not self._made[part]:
                if part == "layers":
                    for linear in self._linear:
                        _attach(linear, quantized(linear.weight.detach(), self._weights))
                elif _is_plain(self._head):  # what it rounds shows in every token: never 4 of 8
                    self._few_head = quantized(self._head.weight.detach(), "auto")
                self._made[part] = True
        return True


class _Linear(nn.Linear):
    """A linear layer with a second, quantized copy of its weights for few rows."""

    few: Multiply

    def forward(self, x: Tensor) -> Tensor:
        """x [.., in_features] -> [.., out_features]."""
        cache = current()
        few = cache is not None and cache.quantized
        return multiply(self.few, x, self.bias) if few else super().forward(x)


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer, not a wrapper of one such as an adapter."""
    return type(module) in (nn.Linear, _Linear)


def _attach(linear: nn.Linear, multiply: Multiply | None) -> None:
    linear.__class__ = nn.Linear if multiply is None else _Linear
    linear.__dict__.pop("few", None)
    if multiply is not None:
        cast(_Linear, linear).few = multiply


def products(layer: nn.Module, taken: Taken) -> dict[str, Multiply]:
    """By name of a module's weight, the product that replaces it: quantized or with an adapter."""
    found: dict[str, Multiply] = {}
    for name, part in layer.named_modules():
        few: Multiply | None = getattr(part, "few", None) if taken.quantized else None
        low_rank = low_rank_of(part) if taken.adapt else None
        if low_rank is not None:
            weight = cast(Tensor, part.weight).detach()
            found[f"{name}.weight"] = Beside(few or weight, low_rank)
        elif few is not None:
            found[f"{name}.weight"] = few
    return found


def join(linear: Sequence[nn.Module], taken: Taken) -> Multiply | None:
    """One product with the quantized or merged weights of several layers, concatenated; None if
    they cannot be joined. From then on the layers have their quantized weights only there.
    """
    if taken.merged:
        return Beside.merged(linear)
    layers = [cast(_Linear, one) for one in linear]
    if not all(hasattr(one, "few") for one in layers):
        return None
    few = [one.few for one in layers]
    whole: Multiply
    if isinstance(few[0], _Part):
        whole = few[0].whole
    elif all(isinstance(one, _Int8) for one in few):
        whole = _Int8.joined(cast(list[_Int8], few))
    elif all(isinstance(one, _Int4) and one.joins for one in few):
        whole = _Int4.joined(cast(list[_Int4], few))
    else:
        return None
    end = 0
    for layer in layers:
        start, end = end, end + layer.out_features
        layer.few = _Part(whole, start, end)
    if not taken.adapt:
        return whole
    updates = [update for one in layers if (update := low_rank_of(one)) is not None]
    return Beside(whole, LowRank.joined(updates)) if len(updates) == len(layers) else None
