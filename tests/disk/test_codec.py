"""Quantised codecs: how far a value may be from what it was, what is exact, and what a payload must
be.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from xxhash import xxh3_64_digest, xxh3_64_hexdigest

from memstore.block import KV_DTYPES
from memstore.disk.format.codec import CODECS, NEW_CODECS, codec_for_new, get_codec
from memstore.disk.format.quantised import GROUP
from memstore.disk.format.record_heads import decode_head
from memstore.errors import CorruptBlock, InvalidConfig
from memstore.tiers.raw_bits import raw_view, torch_dtype
from support.paths import DATA
from support.records import KEY, WRITE, decode, encode, table_of

QUANTISED = [name for name in CODECS if not CODECS[name].lossless]
every_codec = pytest.mark.parametrize("codec", CODECS)
quantised = pytest.mark.parametrize("codec", QUANTISED)
every_dtype = pytest.mark.parametrize("dtype", KV_DTYPES)


def read_back(
    codec: str, dtype: str, k: Tensor, v: Tensor, length: int | None = None
) -> tuple[Tensor, Tensor]:
    """K and V [heads, rows, dim] as they are once stored."""
    length = k.shape[1] if length is None else length
    record = encode(k, v, length, codec, dtype)
    got_k, got_v, got_length = decode(record, tuple(k.shape), dtype)
    assert got_length == length
    return got_k, got_v


def normal(shape: tuple[int, ...], dtype: str, seed: int = 0, spread: float = 0.0) -> Tensor:
    """Normal values, each channel (last axis) on a scale and with a mean of its own."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    scale = 10 ** (spread * (torch.rand(shape[-1], generator=g, dtype=torch.float64) - 0.5))
    return ((x + torch.randn(shape[-1], generator=g)) * scale).to(torch_dtype(dtype))


def smallest(dtype: str) -> float:
    """The smallest number above 0."""
    info = torch.finfo(torch_dtype(dtype))
    return info.smallest_normal * info.eps


def check_bound(codec: str, dtype: str, x: Tensor, got: Tensor, axis: int) -> None:
    """Within half a step of each group, and the dtype's rounding: of the value, and of the group's
    step and zero.
    """
    levels = 255 if codec.startswith("int8") else 15
    eps, least = torch.finfo(torch_dtype(dtype)).eps, smallest(dtype)
    for part, back in zip(x.double().split(GROUP, axis), got.double().split(GROUP, axis)):
        low, high = part.amin(axis, keepdim=True), part.amax(axis, keepdim=True)
        largest = torch.maximum(low.abs(), high.abs())
        step = (high - low) / levels * (1 + 2 * eps) + largest * eps / 8 + least
        assert bool(((back - part).abs() <= step / 2 + largest * eps + least).all())


@quantised
@settings(max_examples=60)
@given(
    dtype=st.sampled_from(list(KV_DTYPES)),
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
        records.append(encode(k, v, 35, codec, dtype))
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
    most = torch.finfo(torch_dtype(dtype)).max
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
        k, v = k.to(torch_dtype(dtype)), v.to(torch_dtype(dtype))
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
    record = encode(k, v, 17, codec, dtype)
    assert record == encode(k, v, 17, codec, dtype)
    want_k, want_v, _ = decode(record, (4, 20, 24), dtype)
    for head in (3, 0):
        out_k, out_v = torch.full_like(k[0], 9), torch.full_like(v[0], 9)
        header = table_of((4, 20, 24), dtype).header(memoryview(record), KEY, WRITE)
        decode_head(
            memoryview(record), KEY, header, head, (raw_view(out_k), raw_view(out_v)), dtype
        )
        assert np.array_equal(raw_view(out_k), raw_view(want_k)[head])
        assert np.array_equal(raw_view(out_v), raw_view(want_v)[head])


@every_codec
@every_dtype
@pytest.mark.parametrize("size", [(32, 32), (7, 5), (33, 40), (1, 1)])
def test_a_head_takes_no_more_than_is_said(codec, dtype, size):
    width = KV_DTYPES[dtype]
    units = np.stack([raw_view(normal((2, *size), dtype, seed)) for seed in (1, 2)], 1)
    most = get_codec(codec).head_bytes(*size, width)
    frame = 32 if "zstd" in codec else 0  # around what does not compress
    assert all(len(payload) <= most + frame for payload in get_codec(codec).encode(units, dtype))
    assert most <= 2 * size[0] * size[1] * width


def test_quantised_heads_are_as_small_as_they_should_be():
    units = np.stack([raw_view(normal((4, 32, 32), "float16", seed)) for seed in (1, 2)], 1)
    sizes = {
        codec: len(get_codec(codec).encode(units, "float16")[0])
        for codec in ("raw", "int8", "int4")
    }
    assert sizes == {"raw": 4096, "int8": 2048 + 256, "int4": 1024 + 256}


@every_codec
@every_dtype
def test_a_payload_of_another_size_does_not_decode(codec, dtype):
    units = np.stack([raw_view(normal((1, 16, 16), dtype, seed)) for seed in (1, 2)], 1)
    payload = bytes(get_codec(codec).encode(units, dtype)[0])
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
    payload = b"\1" * 100
    header = table_of((2, 16, 16), "float16").form.pack_header(
        KEY, WRITE, codec, 16, [len(payload)] * 2, [xxh3_64_digest(payload)] * 2
    )
    with pytest.raises(CorruptBlock, match="head 0"):
        decode(header + 2 * payload, (2, 16, 16), "float16")


def test_an_unknown_codec_is_named():
    with pytest.raises(InvalidConfig, match=r"'lz9'.*int4"):
        get_codec("lz9")
    with pytest.raises(InvalidConfig, match=r"'lz9'.*raw, zstd, int8, int4$"):
        codec_for_new("lz9")


@pytest.mark.parametrize("codec", [name for name in CODECS if name not in NEW_CODECS])
def test_a_codec_of_old_memories_makes_no_new_one(codec):
    with pytest.raises(InvalidConfig, match=rf"'{codec[:4]}\+zstd'.*choose {codec[:4]},"):
        codec_for_new(codec)


# What is stored stays what it was


def arbitrary_units(dtype: str, kind: str, length: int) -> np.ndarray:
    """Raw bits [3, 2, 40, 48] whose content is `length` rows; made without what processors round
    differently (powers and logarithms in vectors).
    """
    rng, shape = np.random.default_rng(length), (3, 2, 40, 48)
    width = KV_DTYPES[dtype]
    if kind == "bits":  # of any pattern: NaNs and infinities, too
        units = np.frombuffer(rng.bytes(width * int(np.prod(shape))), f"<i{width}").reshape(shape)
        units = units.copy()
    else:
        x = np.ldexp(_bells(rng, shape), rng.integers(-6, 7, shape[-1]))
        x += _bells(rng, shape[-1:])
        if kind == "equal":
            x[:, :, :, ::3] = 0.1
            x[:, :, 5] = -0.0
        if dtype == "bfloat16":
            units = (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.int16)
        else:
            units = x.astype(dtype).view(f"i{width}")
    units[:, :, length:] = 0
    return units


def _bells(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Nearly normal numbers: sums of twelve whole ones, divided by a power of two."""
    return rng.integers(-(1 << 49), 1 << 49, (12, *shape)).sum(0) / (1 << 49)


GOLDEN = [line.split() for line in (DATA / "codecs.txt").read_text().splitlines()]


@pytest.mark.parametrize("codec, dtype, kind, length, stored, read", GOLDEN)
def test_bytes_and_values_are_those_of_the_first_version(codec, dtype, kind, length, stored, read):
    """XXH3-64 of all payloads, where no compressor's version matters, and of what they decode
    to.
    """
    units = arbitrary_units(dtype, kind, int(length))
    payloads = CODECS[codec].encode(units[:, :, : int(length)], dtype)
    if "zstd" not in codec:
        assert xxh3_64_hexdigest(b"".join(map(bytes, payloads))) == stored
    decoded = []
    for payload in payloads:
        k, v = np.zeros((2, 40, 48), units.dtype)
        CODECS[codec].decode(bytes(payload), k, v, dtype, int(length))
        decoded += [k.tobytes(), v.tobytes()]
    assert xxh3_64_hexdigest(b"".join(decoded)) == read
