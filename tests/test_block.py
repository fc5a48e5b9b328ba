"""Records: they give back every bit that was stored, and nothing but the bits of the block that was
asked for.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memstore.disk.codec import CODECS
from memstore.disk.record import (
    DTYPES,
    check_record,
    decode_heads,
    decode_record,
    dtype_name,
    encode_record,
    encode_records,
    from_raw,
    raw_view,
    rename_record,
)
from memstore.errors import CorruptBlock, InvalidConfig

every_codec = pytest.mark.parametrize("codec", CODECS)
lossless_codec = pytest.mark.parametrize(
    "codec", [name for name in CODECS if CODECS[name].lossless]
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def random_bits(shape: tuple[int, ...], dtype: str, seed: int) -> Tensor:
    """Every bit pattern of the dtype, NaNs and infinities included."""
    width = DTYPES[dtype].itemsize
    data = np.random.default_rng(seed).bytes(width * int(np.prod(shape)))
    return from_raw(data, shape, dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and np.array_equal(raw_view(a), raw_view(b))


def a_record(
    codec: str, dtype: str, *, shape: tuple[int, int, int] = (2, 4, 6), length: int | None = None
):
    k = random_bits(shape, dtype, 1)
    v = random_bits(shape, dtype, 2)
    length = shape[1] if length is None else length
    return k, v, encode_record(7, 8, 9, k, v, length, codec, dtype)


@lossless_codec
@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(list(DTYPES)),
    heads=st.integers(1, 5),
    rows=st.integers(1, 33),
    dim=st.integers(1, 40),
    key=st.tuples(st.integers(1, 2**63), st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1)),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_a_block_reads_back_bit_for_bit(codec, dtype, heads, rows, dim, key, seed, data):
    length = data.draw(st.integers(1, rows))
    k, v = (
        random_bits((heads, rows, dim), dtype, seed),
        random_bits((heads, rows, dim), dtype, seed + 1),
    )
    record = encode_record(*key, k, v, length, codec, dtype)
    got_k, got_v, got_length = decode_record(record, *key, shape=(heads, rows, dim), dtype=dtype)
    assert got_length == length
    assert same_bits(got_k[:, :length], k[:, :length]) and same_bits(
        got_v[:, :length], v[:, :length]
    )
    assert not raw_view(got_k)[:, length:].any() and not raw_view(got_v)[:, length:].any()
    assert check_record(record, *key, shape=(heads, rows, dim), dtype=dtype) == length


@every_codec
@every_dtype
def test_any_heads_are_read_alone_and_in_any_order(codec, dtype):
    _, _, record = a_record(codec, dtype, shape=(4, 8, 6))
    k, v, _ = decode_record(record, 7, 8, 9, shape=(4, 8, 6), dtype=dtype)
    out_k, out_v = (
        torch.zeros(3, 8, 6, dtype=DTYPES[dtype]),
        torch.zeros(3, 8, 6, dtype=DTYPES[dtype]),
    )
    heads, slots = [3, 0], [0, 2]
    decode_heads(
        record,
        7,
        8,
        9,
        heads,
        [raw_view(out_k)[slot] for slot in slots],
        [raw_view(out_v)[slot] for slot in slots],
        shape=(4, 8, 6),
        dtype=dtype,
    )
    for head, slot in zip(heads, slots, strict=True):
        assert same_bits(out_k[slot], k[head]) and same_bits(out_v[slot], v[head])
    assert not raw_view(out_k)[1].any() and not raw_view(out_v)[1].any()


@every_codec
def test_the_same_block_is_the_same_bytes(codec):
    _, _, once = a_record(codec, "float16")
    _, _, again = a_record(codec, "float16")
    assert once == again


@every_codec
@pytest.mark.parametrize("last_length", [3, 4])
def test_blocks_encoded_together_are_the_records_of_each_alone(codec, last_length):
    k, v = (random_bits((3, 2, 4, 6), "bfloat16", seed) for seed in (1, 2))
    together = encode_records(7, 8, 9, k, v, last_length, codec, "bfloat16")
    alone = [
        encode_record(7, 8 + at, 9, k[at], v[at], last_length if at == 2 else 4, codec, "bfloat16")
        for at in range(3)
    ]
    assert together == alone


@lossless_codec
def test_strided_tensors_are_encoded_by_their_values(codec):
    k = random_bits((4, 2, 6), "bfloat16", 3).transpose(0, 1)  # [2, 4, 6], not contiguous
    record = encode_record(1, 2, 3, k, k, 4, codec, "bfloat16")
    assert same_bits(decode_record(record, 1, 2, 3, shape=(2, 4, 6), dtype="bfloat16")[0], k)


@every_codec
@every_dtype
def test_a_flipped_bit_anywhere_is_refused(codec, dtype):
    _, _, record = a_record(codec, dtype, length=3)
    for place in range(len(record)):
        damaged = bytearray(record)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(CorruptBlock, match="document 7, block 8, layer 9"):
            decode_record(bytes(damaged), 7, 8, 9, shape=(2, 4, 6), dtype=dtype)
        with pytest.raises(CorruptBlock):
            check_record(bytes(damaged), 7, 8, 9, shape=(2, 4, 6), dtype=dtype)


@every_codec
def test_a_head_that_is_read_is_whole_though_another_is_damaged(codec):
    _, _, record = a_record(codec, "float16")
    k, v, _ = decode_record(record, 7, 8, 9, shape=(2, 4, 6), dtype="float16")
    out_k, out_v = torch.zeros(4, 6, dtype=torch.float16), torch.zeros(4, 6, dtype=torch.float16)
    damaged = bytearray(record)
    damaged[-1] ^= 0x10  # the last head's payload
    wanted = ([raw_view(out_k)], [raw_view(out_v)])
    decode_heads(damaged, 7, 8, 9, [0], *wanted, shape=(2, 4, 6), dtype="float16")
    assert same_bits(out_k, k[0]) and same_bits(out_v, v[0])
    with pytest.raises(CorruptBlock, match="head 1"):
        decode_heads(damaged, 7, 8, 9, [1], *wanted, shape=(2, 4, 6), dtype="float16")


@every_codec
def test_a_truncated_or_longer_record_is_refused(codec):
    _, _, record = a_record(codec, "float16")
    for wrong in [record[:size] for size in range(len(record))] + [record + b"\0"]:
        with pytest.raises(CorruptBlock):
            decode_record(wrong, 7, 8, 9, shape=(2, 4, 6), dtype="float16")


@every_codec
@pytest.mark.parametrize("key", [(6, 8, 9), (7, 7, 9), (7, 8, 8), (9, 8, 7)])
def test_a_record_under_a_foreign_key_is_refused(codec, key):
    _, _, record = a_record(codec, "float16")
    with pytest.raises(CorruptBlock, match="it is the record of document 7, block 8, layer 9"):
        decode_record(record, *key, shape=(2, 4, 6), dtype="float16")


@every_codec
def test_a_record_of_another_geometry_is_refused(codec):
    _, _, record = a_record(codec, "float16")
    for shape, dtype in [((2, 6, 4), "float16"), ((1, 4, 6), "float16"), ((2, 4, 6), "bfloat16")]:
        with pytest.raises(CorruptBlock, match="it holds float16"):
            decode_record(record, 7, 8, 9, shape=shape, dtype=dtype)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_other_bytes_are_refused(data):
    with pytest.raises(CorruptBlock):
        decode_record(data, 7, 8, 9, shape=(2, 4, 6), dtype="float16")


@every_codec
def test_a_renamed_record_belongs_to_the_new_document(codec):
    k, v, record = a_record(codec, "bfloat16", length=2)
    renamed = rename_record(record, 7, 8, 9, 11, shape=(2, 4, 6), dtype="bfloat16")
    assert renamed == encode_record(11, 8, 9, k, v, 2, codec, "bfloat16")
    with pytest.raises(CorruptBlock):
        rename_record(record[:-1], 7, 8, 9, 11, shape=(2, 4, 6), dtype="bfloat16")


def test_shuffled_zstd_is_smaller_than_raw_on_keys_of_like_size():
    k = torch.randn(4, 32, 32).to(torch.bfloat16)
    sizes = {
        codec: len(encode_record(1, 1, 1, k, k, 32, codec, "bfloat16")) for codec in ("raw", "zstd")
    }
    assert sizes["zstd"] < 0.85 * sizes["raw"]


def test_an_unknown_dtype_is_named():
    with pytest.raises(InvalidConfig, match="int8"):
        dtype_name(torch.int8)
    assert [dtype_name(dtype) for dtype in DTYPES.values()] == list(DTYPES)


def test_a_slab_is_filled_through_its_raw_view():
    slab = torch.zeros(3, 2, 2, dtype=torch.bfloat16)
    raw_view(slab)[1] = raw_view(torch.ones(2, 2, dtype=torch.bfloat16))
    assert slab.sum() == 4 and slab[1].sum() == 4
