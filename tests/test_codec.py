"""Quantised codecs: how far a value may be from what it was, what is exact, and what a payload must
be.
"""

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memstore.disk import record as block
from memstore.disk.codec import CODECS, GROUP, get_codec
from memstore.disk.record import DTYPES, decode_heads, decode_record, encode_record, raw_view
from memstore.errors import CorruptBlock, InvalidConfig

QUANTISED = [name for name in CODECS if not CODECS[name].lossless]
every_codec = pytest.mark.parametrize("codec", CODECS)
quantised = pytest.mark.parametrize("codec", QUANTISED)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def read_back(
    codec: str, dtype: str, k: Tensor, v: Tensor, length: int | None = None
) -> tuple[Tensor, Tensor]:
    """K and V [heads, rows, dim] as they are once stored."""
    length = k.shape[1] if length is None else length
    record = encode_record(1, 2, 3, k, v, length, codec, dtype)
    got_k, got_v, got_length = decode_record(record, 1, 2, 3, shape=tuple(k.shape), dtype=dtype)
    assert got_length == length
    return got_k, got_v


def normal(shape: tuple[int, ...], dtype: str, seed: int = 0, spread: float = 0.0) -> Tensor:
    """Normal values, each channel (last axis) on a scale and with a mean of its own."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    scale = 10 ** (spread * (torch.rand(shape[-1], generator=g, dtype=torch.float64) - 0.5))
    return ((x + torch.randn(shape[-1], generator=g)) * scale).to(DTYPES[dtype])


def smallest(dtype: str) -> float:
    """The smallest number above 0."""
    info = torch.finfo(DTYPES[dtype])
    return info.smallest_normal * info.eps


def check_bound(codec: str, dtype: str, x: Tensor, got: Tensor, axis: int) -> None:
    """Within half a step of each group, and the dtype's rounding: of the value, and of the group's
    step and zero.
    """
    levels = 255 if codec.startswith("int8") else 15
    eps, least = torch.finfo(DTYPES[dtype]).eps, smallest(dtype)
    for part, back in zip(x.double().split(GROUP, axis), got.double().split(GROUP, axis)):
        low, high = part.amin(axis, keepdim=True), part.amax(axis, keepdim=True)
        largest = torch.maximum(low.abs(), high.abs())
        step = (high - low) / levels * (1 + 2 * eps) + largest * eps / 8 + least
        assert bool(((back - part).abs() <= step / 2 + largest * eps + least).all())


@quantised
@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(list(DTYPES)),
    heads=st.integers(1, 4),
    rows=st.integers(1, 70),
    dim=st.integers(1, 70),
    spread=st.sampled_from([0.0, 2.0, 8.0]),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_values_are_within_half_a_step_of_their_group(
    codec, dtype, heads, rows, dim, spread, seed, data
):
    length = data.draw(st.integers(1, rows))
    k, v = (normal((heads, rows, dim), dtype, seed + n, spread) for n in range(2))
    got_k, got_v = read_back(codec, dtype, k, v, length)
    check_bound(codec, dtype, k[:, :length], got_k[:, :length], -2)
    check_bound(codec, dtype, v[:, :length], got_v[:, :length], -1)
    assert not raw_view(got_k)[:, length:].any() and not raw_view(got_v)[:, length:].any()


@quantised
@every_dtype
def test_a_large_channel_of_k_and_a_large_token_of_v_cost_the_others_nothing(codec, dtype):
    k, v = normal((1, 32, 32), dtype, 1), normal((1, 32, 32), dtype, 2)
    got_k, got_v = read_back(codec, dtype, k, v)
    large_k, large_v = k.clone(), v.clone()
    large_k[:, :, 5] *= 100
    large_v[:, 7] *= 100
    with_k, with_v = read_back(codec, dtype, large_k, large_v)
    others = [n for n in range(32) if n != 5]
    assert torch.equal(with_k[..., others], got_k[..., others])
    others = [n for n in range(32) if n != 7]
    assert torch.equal(with_v[:, others], got_v[:, others])


@quantised
@every_dtype
def test_what_stands_behind_the_content_changes_nothing(codec, dtype):
    k, v = normal((2, 40, 16), dtype, 1), normal((2, 40, 16), dtype, 2)
    records = []
    for padding in (0.0, 1e4, float("nan")):
        k[:, 35:] = v[:, 35:] = padding
        records.append(encode_record(1, 2, 3, k, v, 35, codec, dtype))
    assert records[0] == records[1] == records[2]


@quantised
@every_dtype
@pytest.mark.parametrize("value", [0.0, 1.0, -0.3, 1e-7, 12345.0])
def test_a_group_of_equal_values_is_exact(codec, dtype, value):
    k, v = normal((2, 32, 32), dtype, 1), normal((2, 32, 32), dtype, 2)
    k[:, :, 3] = v[:, 9] = value
    got_k, got_v = read_back(codec, dtype, k, v)
    assert torch.equal(got_k[:, :, 3], k[:, :, 3]) and torch.equal(got_v[:, 9], v[:, 9])
    everything = torch.full_like(k, value)
    assert all(
        torch.equal(got, everything) for got in read_back(codec, dtype, everything, everything)
    )


@quantised
@every_dtype
@pytest.mark.parametrize("share", [1.0, 0.6, 0.5, 0.4])
def test_the_largest_values_stay_finite_and_near(codec, dtype, share):
    most = torch.finfo(DTYPES[dtype]).max
    signs = torch.sign(normal((2, 33, 34), dtype, 3))
    k, v = (normal((2, 33, 34), dtype, seed).clamp(-3, 3) / 3 * (most * share) for seed in (1, 2))
    k[:, ::5], v[:, :, ::5] = signs[:, ::5] * most * share, signs[:, :, ::5] * most * share
    got_k, got_v = read_back(codec, dtype, k, v)
    assert bool(got_k.isfinite().all() and got_v.isfinite().all())
    if share > 0.5:  # the arithmetic could overflow
        assert torch.equal(got_k, k) and torch.equal(got_v, v)
    check_bound(codec, dtype, k, got_k, -2)
    check_bound(codec, dtype, v, got_v, -1)


@quantised
@every_dtype
def test_the_smallest_values_stay_near(codec, dtype):
    for scale in (1, 3, 100, 190, 1000):
        k, v = (
            torch.randint(-scale, scale + 1, (2, 32, 32)).double() * smallest(dtype)
            for _ in range(2)
        )
        k, v = k.to(DTYPES[dtype]), v.to(DTYPES[dtype])
        got_k, got_v = read_back(codec, dtype, k, v)
        check_bound(codec, dtype, k, got_k, -2)
        check_bound(codec, dtype, v, got_v, -1)


@quantised
@every_dtype
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_head_that_is_not_finite_is_stored_as_it_is(codec, dtype, value):
    k, v = normal((3, 32, 32), dtype, 1), normal((3, 32, 32), dtype, 2)
    got = read_back(codec, dtype, k, v)
    k[1, 4, 5] = v[2, 31, 0] = value
    with_value = read_back(codec, dtype, k, v)
    for head in (1, 2):
        assert np.array_equal(raw_view(with_value[0])[head], raw_view(k)[head])
        assert np.array_equal(raw_view(with_value[1])[head], raw_view(v)[head])
    assert torch.equal(with_value[0][0], got[0][0]) and torch.equal(with_value[1][0], got[1][0])


@quantised
@every_dtype
def test_reading_is_repeatable_whichever_heads_are_read(codec, dtype):
    k, v = normal((4, 20, 24), dtype, 1), normal((4, 20, 24), dtype, 2)
    record = encode_record(1, 2, 3, k, v, 17, codec, dtype)
    assert record == encode_record(1, 2, 3, k, v, 17, codec, dtype)
    want_k, want_v, _ = decode_record(record, 1, 2, 3, shape=(4, 20, 24), dtype=dtype)
    for head in (3, 0):
        out_k, out_v = torch.full_like(k[0], 9), torch.full_like(v[0], 9)
        decode_heads(
            record,
            1,
            2,
            3,
            [head],
            [raw_view(out_k)],
            [raw_view(out_v)],
            shape=(4, 20, 24),
            dtype=dtype,
        )
        assert np.array_equal(raw_view(out_k), raw_view(want_k)[head])
        assert np.array_equal(raw_view(out_v), raw_view(want_v)[head])


@every_codec
@every_dtype
@pytest.mark.parametrize("size", [(32, 32), (7, 5), (33, 40), (1, 1)])
def test_a_head_takes_no_more_than_is_said(codec, dtype, size):
    width = DTYPES[dtype].itemsize
    units = np.stack([raw_view(normal((2, *size), dtype, seed)) for seed in (1, 2)], 1)
    most = get_codec(codec).head_bytes(*size, width)
    frame = 32 if "zstd" in codec else 0  # around what does not compress
    assert all(
        len(payload) <= most + frame for payload in get_codec(codec).encode(units, dtype, size[0])
    )
    assert most <= 2 * size[0] * size[1] * width


def test_quantised_heads_are_as_small_as_they_should_be():
    units = np.stack([raw_view(normal((4, 32, 32), "float16", seed)) for seed in (1, 2)], 1)
    sizes = {
        codec: len(get_codec(codec).encode(units, "float16", 32)[0])
        for codec in ("raw", "int8", "int4")
    }
    assert sizes == {"raw": 4096, "int8": 2048 + 256, "int4": 1024 + 256}


@every_codec
@every_dtype
def test_a_payload_of_another_size_does_not_decode(codec, dtype):
    units = np.stack([raw_view(normal((1, 16, 16), dtype, seed)) for seed in (1, 2)], 1)
    payload = bytes(get_codec(codec).encode(units, dtype, 16)[0])
    out = np.zeros((16, 16), dtype=units.dtype)
    get_codec(codec).decode(payload, out, out.copy(), dtype, 16)
    for wrong in (
        payload[:-1],
        payload[1:],
        payload + b"\0" * 7,
        b"",
        payload[: len(payload) // 2],
    ):
        if "zstd" in codec and wrong.startswith(payload):
            continue  # what follows a frame is not read, and never stored: records have checksums
        with pytest.raises(ValueError):
            get_codec(codec).decode(wrong, out, out.copy(), dtype, 16)
    for rows in (15, 17):
        other = np.zeros((rows, 16), dtype=units.dtype)
        with pytest.raises(ValueError):
            get_codec(codec).decode(payload, other, other.copy(), dtype, rows)


@every_codec
def test_a_record_whose_payload_has_another_size_is_corrupt(codec):
    """Under checksums that match, as only a faulty program could write it."""
    k, v = normal((2, 16, 16), "float16", 1), normal((2, 16, 16), "float16", 2)
    record = encode_record(1, 2, 3, k, v, 16, codec, "float16")
    size = block._PREFIX.unpack_from(record)[1]
    header = msgpack.unpackb(record[block._PREFIX.size : block._PREFIX.size + size])
    del header["heads"]
    wrong = block._record(header, [b"\1" * 100, b"\1" * 100])
    with pytest.raises(CorruptBlock, match="head 0"):
        decode_record(wrong, 1, 2, 3, shape=(2, 16, 16), dtype="float16")


def test_an_unknown_codec_is_named():
    with pytest.raises(InvalidConfig, match=r"'lz9'.*int4"):
        get_codec("lz9")
