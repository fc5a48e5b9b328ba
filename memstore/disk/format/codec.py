"""The codecs of a memory's records by name: lossless (`raw`, `zstd`) or quantised (`int8`).

Raw bits travel unchanged, or compressed by byte plane. A quantised head is, in little-endian order,

    steps, then zeros of K [ceil(length / 32), head_dim], then those of V [ceil(head_dim / 32),
    length], in the KV dtype; then codes, signed: those of K [length, head_dim], then of V
    [head_dim, length]

and a value is zero + code * step, computed in float32 (float64 for float64) and rounded to the KV
dtype. K has a step a channel over a group of 32 tokens and V a step a token over a group of 32
channels, because a few channels of K are large for every token (KIVI, arXiv 2402.02750, section 3).
A last group may be smaller.
"""

import threading
from typing import Any

import numpy as np
import zstandard

from memstore.errors import InvalidConfig

Payload = bytes | memoryview


class Raw:
    """The raw bits, unchanged.

    A codec gets a head's K and V, without padding, and the name of the KV dtype. Encoding and
    decoding are deterministic.
    """

    name = "raw"
    lossless = True

    def encode(self, units: np.ndarray, dtype: str) -> list[memoryview]:
        """Encode each of the units [n, 2, length, head_dim] of raw bits (K is [:, 0], V [:, 1])."""
        return rows_of(np.ascontiguousarray(units).view(np.uint8).reshape(len(units), -1))

    def decode(
        self, payload: Payload, k: np.ndarray, v: np.ndarray, dtype: str, length: int
    ) -> None:
        """Decode one head's payload of `length` rows into k and v, contiguous [block_size,
        head_dim] of raw bits; later rows become zero. Raises ValueError for a payload that does
        not decode to exactly that many values.
        """
        k, v = content_of(k, v, length)
        check_size(payload, 2 * k.nbytes)
        both = np.frombuffer(payload, dtype=k.dtype).reshape(2, *k.shape)
        k[...] = both[0]
        v[...] = both[1]


class Zstd:
    """The raw bits, compressed by byte plane: bytes of equal significance compress better."""

    name = "zstd"
    lossless = True
    _LEVEL = 1

    def encode(self, units: np.ndarray, dtype: str) -> list[bytes]:
        compressor = zstandard.ZstdCompressor(level=self._LEVEL)
        count = len(units)
        values = np.ascontiguousarray(units).view(np.uint8).reshape(count, -1, units.itemsize)
        planes = np.empty((count, units.itemsize, values.shape[1]), np.uint8)
        for place in range(units.itemsize):  # one plane at a time: four times faster
            planes[:, place] = values[:, :, place]
        return [compressor.compress(payload) for payload in rows_of(planes.reshape(count, -1))]

    def decode(
        self, payload: Payload, k: np.ndarray, v: np.ndarray, dtype: str, length: int
    ) -> None:
        k, v = content_of(k, v, length)
        data = decompressed(payload, 2 * k.nbytes)
        check_size(data, 2 * k.nbytes)
        # [itemsize, K and V, length * head_dim]
        planes = np.frombuffer(data, dtype=np.uint8).reshape(k.itemsize, 2, k.size)
        for half, out in enumerate((k, v)):
            values = out.view(np.uint8).reshape(k.size, k.itemsize)
            for place, plane in enumerate(planes[:, half]):
                values[:, place] = plane


_local = threading.local()  # a decompressor is not thread-safe


def decompressed(frame: Payload, most: int) -> bytes:
    """The content of one zstd frame. Raises ValueError, also above `most` bytes."""
    decompressor = getattr(_local, "decompressor", None)
    if decompressor is None:
        decompressor = _local.decompressor = zstandard.ZstdDecompressor()
    try:
        # zstandard allocates the declared size, whatever the limit
        declared = zstandard.frame_content_size(frame)
        if not 0 <= declared <= most:
            raise ValueError(f"{declared} bytes are declared, of {most} at most")
        data: bytes = decompressor.decompress(frame, max_output_size=most)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    return data


def rows_of(data: np.ndarray) -> list[memoryview]:
    """The bytes of each row of a contiguous uint8 array."""
    return [memoryview(row) for row in data]


def content_of(k: np.ndarray, v: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Zero the rows after the first `length`, in place; return views of the first, the content."""
    if length < len(k):
        k[length:] = 0
        v[length:] = 0
    return k[:length], v[:length]


def check_size(payload: Payload, size: int) -> None:
    """Raises ValueError unless the payload has `size` bytes."""
    if len(payload) != size:
        raise ValueError(f"{len(payload)} bytes instead of {size}")


GROUP = 32  # values that share a step
_BELOW, _ABOVE = 128, 127  # codes on either side of 0
# The largest number of each dtype.
_MOST = {name: float(np.finfo(name).max) for name in ("float16", "float32", "float64")}
_MOST["bfloat16"] = float(np.uint32(0x7F7F0000).view(np.float32))


class Int8:
    """Codes of 8 bits with a step and a zero for each group of values.

    The error of a value is at most half a step plus the rounding to the KV dtype; a group of equal
    values is exact. A head is stored as raw bits (its content rows, K then V) if it has a value
    that is not finite or exceeds half the dtype's largest number, where the arithmetic could
    overflow, or if codes would not be smaller. The payload's size says which form it has.
    """

    name = "int8"
    lossless = False

    def encode(self, units: np.ndarray, dtype: str) -> list[memoryview]:
        whole = Raw().encode(units, dtype)
        x = floats_of(units, dtype)
        with np.errstate(all="ignore"):  # errors are of heads that are stored as raw bits
            keys = _quantise(x[:, 0], dtype)
            values = _quantise(x[:, 1].swapaxes(1, 2), dtype)
        parts = [*keys[:2], *values[:2], keys[2], values[2]]
        coded = rows_of(
            np.concatenate([part.reshape(len(units), -1).view(np.uint8) for part in parts], 1)
        )
        small = np.abs(x).max((1, 2, 3)) <= _MOST[dtype] / 2  # false for NaN
        # raw bits of one or two tokens may take no more bytes than codes
        small &= len(coded[0]) < len(whole[0])
        return [coded[unit] if small[unit] else whole[unit] for unit in range(len(units))]

    def decode(
        self, payload: Payload, k: np.ndarray, v: np.ndarray, dtype: str, length: int
    ) -> None:
        k, v = content_of(k, v, length)
        if len(payload) == 2 * k.nbytes:
            return Raw().decode(payload, k, v, dtype, length)
        halves = (k, v.T)
        counts = [2 * -(-len(half) // GROUP) * half.shape[1] for half in halves]
        check_size(payload, sum(counts) * k.itemsize + 2 * k.size)
        steps = floats_of(np.frombuffer(payload, k.dtype, sum(counts)), dtype)
        codes = np.frombuffer(payload, np.int8, -1, sum(counts) * k.itemsize)
        decoded = codes.astype(steps.dtype).reshape(2, -1)
        of_halves = steps[: counts[0]], steps[counts[0] :]
        for half, coded, numbers in zip(halves, decoded, of_halves):
            values = coded.reshape(half.shape)
            _scale(values, *numbers.reshape(2, -1, half.shape[1]))
            half[...] = _bits(values, dtype)


def _quantise(x: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantise heads [n, size, m] in groups along the second axis: steps and zeros, raw bits
    [n, groups, m], and codes int8 [n, size, m].
    """
    n, size, m = x.shape
    filled = np.pad(x, ((0, 0), (0, -size % GROUP), (0, 0)), "edge")
    grouped = filled.reshape(n, -1, GROUP, m)
    low, high = grouped.min(2), grouped.max(2)
    # for equal values: that value
    zeros = _bits(low + (high - low) * (_BELOW / (_BELOW + _ABOVE)), dtype)
    zero = floats_of(zeros, dtype)
    above, below = high - zero, zero - low
    steps = _bits(np.maximum(above / _ABOVE, below / _BELOW), dtype)
    step = floats_of(steps, dtype)
    # a step that was rounded down is too small for all codes to fit
    short = (step * _ABOVE < above) | (step * _BELOW < below)
    steps += short  # the next bit pattern is the next larger number
    step = floats_of(steps, dtype)
    codes = grouped - zero[:, :, None]
    codes /= np.where(step > 0, step, 1)[:, :, None]
    codes = np.rint(codes, out=codes).astype(np.int8)
    return steps, zeros, codes.reshape(n, -1, m)[:, :size]


def _scale(codes: np.ndarray, steps: np.ndarray, zeros: np.ndarray) -> None:
    """zero + code * step, in place, for codes [n, m] and steps and zeros [groups, m], one for each
    GROUP of n.
    """
    whole = len(codes) // GROUP
    groups = codes[: whole * GROUP].reshape(whole, GROUP, codes.shape[1])  # a view
    groups *= steps[:whole, None]
    groups += zeros[:whole, None]
    rest = codes[whole * GROUP :]
    if len(rest):
        rest *= steps[-1]
        rest += zeros[-1]


# Raw bits and numbers


def floats_of(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Raw bits as float32 numbers, or float64 for float64; may share the memory of `bits`."""
    if dtype == "bfloat16":  # unknown to NumPy; it is the upper half of float32
        return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    floats: np.ndarray[Any, np.dtype[Any]] = bits.view(dtype)
    return floats.astype(np.float32) if dtype == "float16" else floats


def _bits(x: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers rounded to the KV dtype (to the nearest, ties to even), as new raw bits.

    NaN may become another number; heads with NaN are stored as raw bits.
    """
    if dtype == "bfloat16":
        bits = x.view(np.uint32)
        return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16).view(np.int16)
    rounded = x.astype(dtype)
    return rounded.view(f"i{rounded.itemsize}")


Codec = Raw | Zstd | Int8
_ALL: tuple[Codec, ...] = (Raw(), Zstd(), Int8())
CODECS: dict[str, Codec] = {codec.name: codec for codec in _ALL}


def get_codec(name: str) -> Codec:
    """The codec of a name. Raises InvalidConfig, which lists the names."""
    if name not in CODECS:
        raise InvalidConfig(f"codec {name!r} is unknown; choose one of {', '.join(CODECS)}")
    return CODECS[name]
