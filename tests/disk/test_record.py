"""Records: they give back every bit that was stored, and nothing but the bits of the block that was
asked for.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from xxhash import xxh3_64_digest

from memstore.block import KV_DTYPES, RecordKey
from memstore.disk.format.codec import CODECS
from memstore.disk.format.record_heads import decode_head
from memstore.errors import CorruptBlock
from memstore.tiers.raw_bits import from_raw, raw_view, torch_dtype
from support.records import KEY, WRITE, decode, encode, same_bits, table_of

every_codec = pytest.mark.parametrize("codec", CODECS)
lossless_codec = pytest.mark.parametrize(
    "codec", [name for name in CODECS if CODECS[name].lossless]
)
every_dtype = pytest.mark.parametrize("dtype", KV_DTYPES)
SHAPE = (2, 4, 6)


def random_bits(shape: tuple[int, ...], dtype: str, seed: int) -> Tensor:
    """Every bit pattern of the dtype, NaNs and infinities included."""
    data = np.random.default_rng(seed).bytes(KV_DTYPES[dtype] * int(np.prod(shape)))
    return from_raw(np.frombuffer(data, f"i{KV_DTYPES[dtype]}").reshape(shape), dtype)


def a_record(
    codec: str, dtype: str, *, shape: tuple[int, ...] = SHAPE, length: int | None = None
) -> tuple[Tensor, Tensor, bytes]:
    k, v = random_bits(shape, dtype, 1), random_bits(shape, dtype, 2)
    return k, v, encode(k, v, shape[1] if length is None else length, codec, dtype)


@lossless_codec
@settings(max_examples=60)
@given(
    dtype=st.sampled_from(list(KV_DTYPES)),
    heads=st.integers(1, 5),
    rows=st.integers(1, 33),
    dim=st.integers(1, 40),
    key=st.builds(
        RecordKey, st.integers(1, 2**63), st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1)
    ),
    write=st.binary(min_size=16, max_size=16),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_a_block_reads_back_bit_for_bit(codec, dtype, heads, rows, dim, key, write, seed, data):
    length, shape = data.draw(st.integers(1, rows)), (heads, rows, dim)
    k, v = random_bits(shape, dtype, seed), random_bits(shape, dtype, seed + 1)
    record = encode(k, v, length, codec, dtype, key, write)
    got_k, got_v, got_length = decode(record, shape, dtype, key, write)
    assert got_length == length
    assert same_bits(got_k[:, :length], k[:, :length])
    assert same_bits(got_v[:, :length], v[:, :length])
    assert not raw_view(got_k)[:, length:].any() and not raw_view(got_v)[:, length:].any()
    assert table_of(shape, dtype).check(record, key, write) == length


@every_codec
@every_dtype
def test_any_heads_are_read_alone_and_in_any_order(codec, dtype):
    _, _, record = a_record(codec, dtype, shape=(4, 8, 6))
    k, v, _ = decode(record, (4, 8, 6), dtype)
    header = table_of((4, 8, 6), dtype).header(memoryview(record), KEY, WRITE)
    for head in (3, 0):
        out_k, out_v = torch.zeros(2, 8, 6, dtype=torch_dtype(dtype))
        bits = raw_view(out_k), raw_view(out_v)
        decode_head(memoryview(record), KEY, header, head, bits, dtype)
        assert same_bits(out_k, k[head]) and same_bits(out_v, v[head])


@every_codec
def test_the_same_block_is_the_same_bytes(codec):
    assert a_record(codec, "float16")[2] == a_record(codec, "float16")[2]


@every_codec
@pytest.mark.parametrize("lengths", [[4, 4, 3], [4, 4, 4], [1, 4, 2], [2, 2, 2]])
def test_blocks_encoded_together_are_the_records_of_each_alone(codec, lengths):
    k, v = (random_bits((3, *SHAPE), "bfloat16", seed) for seed in (1, 2))
    together = table_of(SHAPE, "bfloat16", codec).encode(
        KEY, raw_view(k), raw_view(v), lengths, WRITE
    )
    alone = [
        encode(k[at], v[at], lengths[at], codec, "bfloat16", KEY._replace(block=KEY.block + at))
        for at in range(3)
    ]
    assert together == alone


@lossless_codec
def test_strided_tensors_are_encoded_by_their_values(codec):
    k = random_bits((4, 2, 6), "bfloat16", 3).transpose(0, 1)  # [2, 4, 6], not contiguous
    assert same_bits(decode(encode(k, k, 4, codec, "bfloat16"), SHAPE, "bfloat16")[0], k)


@every_codec
@every_dtype
def test_a_flipped_bit_anywhere_is_refused(codec, dtype):
    _, _, record = a_record(codec, dtype, length=3)
    table = table_of(SHAPE, dtype)
    for place in range(len(record)):
        damaged = bytearray(record)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(CorruptBlock, match="document 7, block 8, layer 9"):
            table.decode(bytes(damaged), KEY, WRITE)
        with pytest.raises(CorruptBlock):
            table.check(bytes(damaged), KEY, WRITE)


@every_codec
def test_a_head_that_is_read_is_whole_though_another_is_damaged(codec):
    _, _, record = a_record(codec, "float16")
    k, v, _ = decode(record, SHAPE, "float16")
    damaged = bytearray(record)
    damaged[-1] ^= 0x10  # the last head's payload
    header = table_of(SHAPE, "float16").header(memoryview(damaged), KEY, WRITE)
    out = torch.zeros(2, 4, 6, dtype=torch.float16)
    bits = raw_view(out)
    decode_head(memoryview(damaged), KEY, header, 0, (bits[0], bits[1]), "float16")
    assert same_bits(out[0], k[0]) and same_bits(out[1], v[0])
    with pytest.raises(CorruptBlock, match="head 1"):
        decode_head(memoryview(damaged), KEY, header, 1, (bits[0], bits[1]), "float16")


@every_codec
def test_a_truncated_or_longer_record_is_refused(codec):
    _, _, record = a_record(codec, "float16")
    for wrong in [record[:size] for size in range(len(record))] + [record + b"\0"]:
        with pytest.raises(CorruptBlock):
            decode(wrong, SHAPE, "float16")


@every_codec
@pytest.mark.parametrize("length", [3, 4])
@pytest.mark.parametrize("key", [(7, 7, 9), (7, 8, 8), (7, 9, 8)])
def test_a_record_under_a_foreign_key_is_refused(codec, length, key):
    _, _, record = a_record(codec, "float16", length=length)
    with pytest.raises(CorruptBlock, match="it is the record of block 8, layer 9"):
        decode(record, SHAPE, "float16", RecordKey(*key))


@every_codec
@pytest.mark.parametrize("length", [3, 4])
def test_a_record_that_another_write_made_is_refused(codec, length):
    _, _, record = a_record(codec, "float16", length=length)
    with pytest.raises(CorruptBlock, match=f"the write {WRITE.hex()}, not of {'ff' * 16}"):
        decode(record, SHAPE, "float16", KEY, b"\xff" * 16)


@every_codec
@pytest.mark.parametrize("length", [3, 4])
def test_a_record_of_another_model_is_refused(codec, length):
    _, _, record = a_record(codec, "float16", length=length)
    with pytest.raises(CorruptBlock, match="another model"):
        table_of(SHAPE, "float16", model="cc").decode(record, KEY, WRITE)


@every_codec
@pytest.mark.parametrize("length", [3, 4])
def test_a_record_of_another_geometry_is_refused(codec, length):
    _, _, record = a_record(codec, "float16", length=length)
    for shape, dtype in [((2, 6, 4), "float16"), ((1, 4, 6), "float16"), (SHAPE, "bfloat16")]:
        with pytest.raises(CorruptBlock, match="it holds float16"):
            decode(record, shape, dtype)


@settings(max_examples=200)
@given(st.binary(max_size=300), st.sampled_from([WRITE, bytes(16)]))
def test_any_other_bytes_are_refused(data, write):
    with pytest.raises(CorruptBlock):
        decode(data, SHAPE, "float16", KEY, write)


def test_a_header_that_differs_in_anything_tells_no_checksums():
    form = table_of(SHAPE, "float16").form
    key = RecordKey(7, 70_000, 9)
    k, v = random_bits(SHAPE, "float16", 1), random_bits(SHAPE, "float16", 2)
    record = encode(k, v, 4, "raw", "float16", key)
    found = form.raw_digests(record, key, WRITE)
    assert found == xxh3_64_digest(record[-192:-96]) + xxh3_64_digest(record[-96:])
    assert form.raw_header(key, WRITE, found) == record[: form.header_bytes]
    assert form.raw_digests(record, RecordKey(7, 8, 9), WRITE) is None
    assert form.raw_digests(record, RecordKey(7, 70_000, 8), WRITE) is None
    assert form.raw_digests(record, key, bytes(16)) is None
    for place in range(form.header_bytes):
        damaged = bytearray(record)
        damaged[place] ^= 1
        assert form.raw_digests(damaged, key, WRITE) is None
    assert all(form.raw_digests(record[:end], key, WRITE) is None for end in (0, 60, 89))


def test_shuffled_zstd_is_smaller_than_raw_on_keys_of_like_size():
    k = torch.randn(4, 32, 32).to(torch.bfloat16)
    sizes = {codec: len(encode(k, k, 32, codec, "bfloat16")) for codec in ("raw", "zstd")}
    assert sizes["zstd"] < 0.85 * sizes["raw"]


def test_a_slab_is_filled_through_its_raw_view():
    slab = torch.zeros(3, 2, 2, dtype=torch.bfloat16)
    raw_view(slab)[1] = raw_view(torch.ones(2, 2, dtype=torch.bfloat16))
    assert slab.sum() == 4 and slab[1].sum() == 4
