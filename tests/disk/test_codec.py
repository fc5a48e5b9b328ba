"""Codecs and records: values read back, and no record is decoded in place of another. Tests that
take `codec` run over all of CODECS.
"""

import tracemalloc

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memstore.block import KV_DTYPES, RecordKey
from memstore.disk.format.codec import CODECS, GROUP, get_codec
from memstore.errors import CorruptBlock
from memstore.tiers.raw_bits import from_raw, raw_view, torch_dtype
from support.disk_records import KEY, WRITE, decode, encode, same_bits, table_of

every_codec = pytest.mark.parametrize("codec", CODECS)
every_dtype = pytest.mark.parametrize("dtype", KV_DTYPES)
SHAPE = (2, 4, 6)


def random_bits(shape: tuple[int, ...], dtype: str, seed: int) -> Tensor:
    """Every bit pattern of the dtype, NaNs and infinities included."""
    data = np.random.default_rng(seed).bytes(KV_DTYPES[dtype] * int(np.prod(shape)))
    return from_raw(np.frombuffer(data, f"i{KV_DTYPES[dtype]}").reshape(shape), dtype)


def normal(shape: tuple[int, ...], dtype: str, seed: int = 0, spread: float = 0.0) -> Tensor:
    """Normal values, each channel (last axis) with its own scale and mean."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    scale = 10 ** (spread * (torch.rand(shape[-1], generator=g, dtype=torch.float64) - 0.5))
    return ((x + torch.randn(shape[-1], generator=g)) * scale).to(torch_dtype(dtype))


def smallest(dtype: str) -> float:
    """The smallest number above 0."""
    info = torch.finfo(torch_dtype(dtype))
    return info.smallest_normal * info.eps


def check_bound(dtype: str, x: Tensor, got: Tensor, axis: int) -> None:
    """Within half a step of each int8 group, and the dtype's rounding of the value and of the
    group's step and zero.
    """
    eps, least = torch.finfo(torch_dtype(dtype)).eps, smallest(dtype)
    for part, back in zip(x.double().split(GROUP, axis), got.double().split(GROUP, axis)):
        low, high = part.amin(axis, keepdim=True), part.amax(axis, keepdim=True)
        largest = torch.maximum(low.abs(), high.abs())
        step = (high - low) / 255 * (1 + 2 * eps) + largest * eps / 8 + least
        assert bool(((back - part).abs() <= step / 2 + largest * eps + least).all())


# What is read back


@every_codec
@settings(max_examples=40)
@given(
    dtype=st.sampled_from(list(KV_DTYPES)),
    heads=st.integers(1, 4),
    rows=st.integers(1, 70),
    dim=st.integers(1, 70),
    spread=st.sampled_from([None, 0.0, 2.0, 8.0]),
    key=st.builds(
        RecordKey, st.integers(1, 2**63), st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1)
    ),
    write=st.binary(min_size=16, max_size=16),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_a_block_reads_back(codec, dtype, heads, rows, dim, spread, key, write, seed, data):
    """Bit for bit by a lossless codec, within the bound by int8; and by head as a whole."""
    length, shape = data.draw(st.integers(1, rows)), (heads, rows, dim)
    if spread is None:
        k, v = (random_bits(shape, dtype, seed + n) for n in range(2))
    else:
        k, v = (normal(shape, dtype, seed + n, spread) for n in range(2))
    record = encode(k, v, length, codec, dtype, key, write)
    assert record == encode(k, v, length, codec, dtype, key, write)
    got_k, got_v, got_length = decode(record, shape, dtype, key, write)
    assert got_length == length
    for x, got, axis in ((k, got_k, -2), (v, got_v, -1)):
        assert not raw_view(got)[:, length:].any()
        if CODECS[codec].lossless:
            assert same_bits(got[:, :length], x[:, :length])
        elif spread is not None:
            check_bound(dtype, x[:, :length], got[:, :length], axis)
    table = table_of(shape, dtype)
    assert table.check(record, key, write) == length
    header = table.header(memoryview(record), key, write)
    for head in (heads - 1, 0):
        out_k, out_v = torch.full_like(k[0], 9), torch.full_like(v[0], 9)
        bits = raw_view(out_k), raw_view(out_v)
        table.decode_head(memoryview(record), key, header, head, bits)
        assert same_bits(out_k, got_k[head]) and same_bits(out_v, got_v[head])
    frame = 32 if codec == "zstd" else 0  # around what does not compress
    assert max(header.sizes) <= 2 * length * dim * KV_DTYPES[dtype] + frame


# int8


def read_back(dtype: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """K and V [heads, rows, dim] as int8 stores them."""
    got_k, got_v, _ = decode(encode(k, v, k.shape[1], "int8", dtype), tuple(k.shape), dtype)
    return got_k, got_v


@every_dtype
@pytest.mark.parametrize("share", [1.0, 0.6, 0.5, 0.4])
def test_the_largest_values_stay_finite_and_close(dtype, share):
    most = torch.finfo(torch_dtype(dtype)).max
    signs = torch.sign(normal((2, 33, 34), dtype, 3))
    k, v = (normal((2, 33, 34), dtype, seed).clamp(-3, 3) / 3 * (most * share) for seed in (1, 2))
    k[:, ::5], v[:, :, ::5] = signs[:, ::5] * most * share, signs[:, :, ::5] * most * share
    got_k, got_v = read_back(dtype, k, v)
    assert bool(got_k.isfinite().all() and got_v.isfinite().all())
    if share > 0.5:  # the arithmetic could overflow
        assert torch.equal(got_k, k) and torch.equal(got_v, v)
    check_bound(dtype, k, got_k, -2)
    check_bound(dtype, v, got_v, -1)


@every_dtype
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_head_that_is_not_finite_is_stored_bit_for_bit(dtype, value):
    k, v = normal((3, 32, 32), dtype, 1), normal((3, 32, 32), dtype, 2)
    got = read_back(dtype, k, v)
    k[1, 4, 5] = v[2, 31, 0] = value
    with_value = read_back(dtype, k, v)
    for head in (1, 2):
        assert same_bits(with_value[0][head], k[head]) and same_bits(with_value[1][head], v[head])
    assert torch.equal(with_value[0][0], got[0][0]) and torch.equal(with_value[1][0], got[1][0])


# What is refused


@every_codec
@every_dtype
def test_a_payload_of_the_wrong_size_is_refused(codec, dtype):
    units = np.stack([raw_view(normal((1, 16, 16), dtype, seed)) for seed in (1, 2)], 1)
    payload = bytes(get_codec(codec).encode(units, dtype)[0])
    for wrong, rows in ((payload[:-1], 16), (payload[1:], 16), (payload, 15), (payload, 17)):
        out = np.zeros((rows, 16), dtype=units.dtype)
        with pytest.raises(ValueError):
            get_codec(codec).decode(wrong, out, out.copy(), dtype, rows)


def test_a_frame_that_declares_more_than_a_head_is_refused_before_it_is_allocated():
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 26))
    assert len(bomb) < 1 << 13
    k, v = np.zeros((2, 16, 8), np.int32)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=f"{1 << 26} bytes are declared, of {2 * k.nbytes}"):
            get_codec("zstd").decode(bomb, k, v, "float32", 16)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def a_record(codec: str, dtype: str, length: int = SHAPE[1]) -> bytes:
    k, v = random_bits(SHAPE, dtype, 1), random_bits(SHAPE, dtype, 2)
    return encode(k, v, length, codec, dtype)


@every_codec
@every_dtype
def test_a_flipped_bit_anywhere_is_refused(codec, dtype):
    record = a_record(codec, dtype, length=3)
    table = table_of(SHAPE, dtype)
    for place in range(len(record)):
        damaged = bytearray(record)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(CorruptBlock, match="document 7, block 8, layer 9"):
            table.decode(bytes(damaged), KEY, WRITE)
        with pytest.raises(CorruptBlock):
            table.check(bytes(damaged), KEY, WRITE)


@every_codec
@pytest.mark.parametrize("length", [3, 4])
def test_the_record_of_another_key_write_model_or_geometry_is_refused(codec, length):
    record = a_record(codec, "float16", length)
    for key in [(7, 7, 9), (7, 8, 8), (7, 9, 8)]:
        with pytest.raises(CorruptBlock, match="of block 8, layer 9"):
            decode(record, SHAPE, "float16", RecordKey(*key))
    with pytest.raises(CorruptBlock, match="of another write or model"):
        decode(record, SHAPE, "float16", KEY, b"\xff" * 16)
    with pytest.raises(CorruptBlock, match="of another write or model"):
        table_of(SHAPE, "float16", model="cc").decode(record, KEY, WRITE)
    for shape, dtype in [((2, 6, 4), "float16"), ((1, 4, 6), "float16"), (SHAPE, "bfloat16")]:
        with pytest.raises(CorruptBlock):
            decode(record, shape, dtype)
