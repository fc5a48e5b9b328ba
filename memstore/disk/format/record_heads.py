"""The heads of a record: encoded, checked and decoded, each by itself."""

from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_64_digest

from memstore.block import RecordKey
from memstore.disk.format.codec import CODECS
from memstore.disk.format.record import Header, RecordForm, WriteId, damaged_head


def encode_records(
    known_as: Sequence[tuple[RecordKey, WriteId]],
    k: np.ndarray,
    v: np.ndarray,
    codec: str,
    form: RecordForm,
) -> list[bytes]:
    """Encode blocks of one length with all their KV heads; one record a block.

    known_as: the key of each record, and by what it is known; k, v: raw bits [n, num_kv_heads,
    length, head_dim]; K is rotated by the offset inside the block only. length: valid content
    tokens, 1 to block_size.
    """
    geometry = form.geometry
    n, heads, length, dim = k.shape
    assert (
        k.shape == v.shape == (len(known_as), geometry.num_kv_heads, length, geometry.head_dim)
        and k.itemsize == geometry.itemsize
        and 1 <= length <= geometry.block_size
    ), (k.shape, v.shape, k.dtype, geometry)
    units = np.empty((n, heads, 2, length, dim), dtype=k.dtype)
    units[:, :, 0] = k
    units[:, :, 1] = v
    payloads = CODECS[codec].encode(units.reshape(n * heads, 2, length, dim), geometry.dtype)
    records = []
    for at in range(n):
        parts = payloads[at * heads : (at + 1) * heads]
        header = form.pack_header(
            *known_as[at], codec, length, list(map(len, parts)), list(map(xxh3_64_digest, parts))
        )
        records.append(b"".join((header, *parts)))
    return records


def decode_head(
    record: memoryview,
    key: RecordKey,
    header: Header,
    head: int,
    kv: tuple[np.ndarray, np.ndarray],
    dtype: str,
) -> None:
    """Check and decode one head of a record into kv, contiguous [block_size, head_dim] of raw bits.

    What they hold is its bits or, with an error raised, nothing of use. Raises CorruptBlock.
    """
    try:
        start = header.start + header.offsets[head]
        payload = record[start : start + header.sizes[head]]
        if xxh3_64_digest(payload) != header.digests[head]:
            raise ValueError("its checksum does not match")
        CODECS[header.codec].decode(payload, *kv, dtype, header.length)
    except (ValueError, IndexError) as error:
        raise damaged_head(key, head, error) from error


def check_heads(record: memoryview, key: RecordKey, header: Header) -> None:
    """Check every byte of a record's payload without decoding it. Raises CorruptBlock."""
    start, _, _, *heads = header
    for head, (offset, size, digest) in enumerate(zip(*heads)):
        if xxh3_64_digest(record[start + offset : start + offset + size]) != digest:
            raise damaged_head(key, head, "its checksum does not match")
