"""Products with a layer's weights in 8 or 4 bits, by what torch has for a CPU."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Literal, cast

import torch
from torch import Tensor, nn

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
    """x [.., in_features] in any dtype -> [.., out_features], with the bias of a layer."""
    rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16).contiguous()
    product = few(rows).to(x.dtype)
    if bias is not None:
        product = product + bias
    return product.view(*x.shape[:-1], -1)


@torch.no_grad()
def quantized(weight: Tensor, weights: Weights) -> Multiply | None:
    """The product with a weight [out_features, in_features] in so few bits; None where torch has
    none for its shape.
    """
    out, columns = weight.shape
    if columns % _GROUP:  # torch 2.13 reads beyond the end of such rows
        return None
    fits = out % 16 == 0
    if weights == "auto":
        if fits and stored_in_4_bits(weight) and gain("int4", weight.dtype) > 1:
            return _Int4.of(weight)
        return _Int8.of(weight) if gain("int8", weight.dtype) > 1 else None
    return _Int4.of(weight) if weights == "int4" and fits else _Int8.of(weight)


@cache
def gain(weights: Literal["int4", "int8"], dtype: torch.dtype) -> float:
    """How many times as fast as by weights of a dtype this CPU multiplies a row by quantized ones.

    The best of several tries in turn, in the CPU time of this thread; some milliseconds, once a
    process. Weights that are in the cache gain less than a model's. torch has fast products for
    AVX2 and AVX-512, and elsewhere slow ones.
    """
    weight, row = torch.ones(1024, 1024, dtype=dtype), torch.ones(1, 1024, dtype=dtype)
    few = _Int4.of(weight) if weights == "int4" else _Int8.of(weight)
    ways: tuple[Callable[[], Tensor], ...] = (
        lambda: nn.functional.linear(row, weight),
        lambda: few(row.to(torch.bfloat16)).to(dtype),
    )
    best = [float("inf")] * len(ways)
    for turn in range(6):
        for at, way in enumerate(ways):
            began = time.thread_time()
            way()
            if turn:  # the first prepares kernels
                best[at] = min(best[at], time.thread_time() - began)
    return best[0] / best[1]


def stored_in_4_bits(weight: Tensor) -> bool:
    """Do groups of 32 weights lie on grids of 16 levels, but for rounding to bfloat16?"""
    groups = weight[:: max(1, len(weight) // _SAMPLE)].float().unflatten(1, (-1, _GROUP))
    return bool(_fits(groups, *_on_grid(groups)).all())


def _fits(groups: Tensor, codes: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    """Which groups [.., 32] are on these grids: bool [.., 1]."""
    error = (codes * scale).add_(low).sub_(groups).abs_().amax(-1, keepdim=True)
    return error <= _EXACT * groups.abs().amax(-1, keepdim=True)


def _on_grid(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0 .. 15 of groups [.., 32], and scale and smallest value [.., 1]: code * scale +
    smallest.

    Weights that were stored in 4 bits are found as they were: where the largest of a group is not
    at the last of its 16 levels, at one of the others.
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


def join(parts: Sequence[Multiply], rows: Sequence[int]) -> tuple[Multiply, list[Multiply]] | None:
    """The product with several layers' weights at once, one behind the other, and what each of them
    is then: its rows of that one. None where they cannot be joined. rows: out_features of each.
    """
    first = parts[0]
    if isinstance(first, _Part):
        return first.whole, list(parts)
    whole: Multiply
    if all(isinstance(one, _Int8) for one in parts):
        whole = _Int8.joined(cast(list[_Int8], parts))
    elif all(isinstance(one, _Int4) and one.joins for one in parts):
        whole = _Int4.joined(cast(list[_Int4], parts))
    else:
        return None
    ends = list(accumulate(rows))
    return whole, [_Part(whole, end - count, end) for end, count in zip(ends, rows)]


@dataclass(frozen=True)
class _Part:
    """Some of the rows of joined weights."""

    whole: Multiply
    start: int
    stop: int

    def __call__(self, x: Tensor) -> Tensor:
        return self.whole(x)[:, self.start : self.stop]


@dataclass(frozen=True)
class _Int4:
    """In 4 bits, with a scale and a zero point of every 32 weights of a row."""

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
        """Is every row where it would be behind others? They are packed in blocks of 64 or 32."""
        return len(self.codes) % 64 == 0

    @classmethod
    def joined(cls, parts: Sequence["_Int4"]) -> "_Int4":
        codes, grids = [one.codes for one in parts], [one.grids for one in parts]
        return cls(torch.cat(codes), torch.cat(grids, 1))

    def __call__(self, x: Tensor) -> Tensor:
        return torch._weight_int4pack_mm_for_cpu(x, self.codes, _GROUP, self.grids)


@dataclass(frozen=True)
class _Int8:
    """In 8 bits, with a scale of every row."""

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
