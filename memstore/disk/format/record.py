"""The stored form of a block: the record that holds all KV heads of one layer.

A record is, in little-endian order,

    magic "mR", format (u8), codec (u8), dtype (u8), a zero byte, KV heads (u16), block size, head
        dim, valid content tokens (u32 each), digest of the memory's signature (16 bytes)
    id of the write that made it, or digest of the passage (16 bytes), block (u32; of a passage 0),
        layer (u16)
    of each head: bytes of its payload (u32), then of each head: XXH3-64 of it
    XXH3-64 of all that stands before
    payload: one encoded unit a head (see memstore.disk.format.codec), in order of heads

so that one head is checked and decoded without touching the others, nothing outside the record is
needed to decode it, and it is known for what it is wherever it is found: what another write made,
another block or another model's is refused. The document's number is not in it, since an import
gives a document another one.
"""

import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_digest

from memstore.block import Geometry, RecordKey
from memstore.disk.format.codec import CODECS
from memstore.errors import CorruptBlock

RECORD_FORMAT = 3
WRITE_BYTES = 16
WriteId = bytes
"""16 bytes by which a record is known: of a passage the digest of its content, else random."""

_MAGIC = b"mR"
_FIXED = struct.Struct("<2sBBBxHIII16s")  # the same for full blocks of a codec
_OWN = struct.Struct("<16sIH")
_DIGEST = 8
# Numbers in headers; none is ever given another meaning.
_CODECS = {"raw": 0, "zstd": 1, "int8": 2}
_DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "float64": 3}
_CODEC_NAMES = {number: name for name, number in _CODECS.items()}
_DTYPE_NAMES = {number: name for name, number in _DTYPES.items()}
_RAW_CODEC = "raw"


class Header(NamedTuple):
    """What a record says of itself, checked. Of head h: offsets[h] in the payload, sizes[h] in
    bytes, digests[h].
    """

    start: int  # where the payload begins in the record
    codec: str
    length: int  # valid content tokens
    offsets: Sequence[int]
    sizes: Sequence[int]
    digests: Sequence[bytes]


class RecordForm:
    """What the records of one memory have in common: writes and reads their headers. May be used by
    several threads.
    """

    def __init__(self, geometry: Geometry, signature: bytes) -> None:
        """signature: its digest (Signature.digest)."""
        self.geometry, self.signature = geometry, signature
        heads, size = geometry.num_kv_heads, geometry.unit_bytes
        self.header_bytes = header_bytes(heads)
        # A full block in codec raw has all of this in common with every other one.
        self._fixed = self._pack_fixed(_RAW_CODEC, geometry.block_size)
        self._packed_sizes = struct.pack(f"<{heads}I", *[size] * heads)
        self.raw_record_bytes = self.header_bytes + geometry.record_bytes

    def pack_header(
        self,
        key: RecordKey,
        write: WriteId,
        codec: str,
        length: int,
        sizes: Sequence[int],
        digests: Sequence[bytes],
    ) -> bytes:
        """The header of a record whose heads have these sizes and digests."""
        header = b"".join(
            (
                self._pack_fixed(codec, length),
                _OWN.pack(write, key.block, key.layer),
                struct.pack(f"<{len(sizes)}I", *sizes),
                *digests,
            )
        )
        return header + xxh3_64_digest(header)

    def read(self, record: memoryview, key: RecordKey, write: WriteId) -> Header:
        """The header of the record that `write` made under this key. Raises CorruptBlock for
        another's, and for what is not a record.
        """
        if len(record) < _FIXED.size:
            raise damaged(key, f"truncated to {len(record)} bytes")
        magic, number, codec, dtype, heads, rows, dim, length, signature = _FIXED.unpack_from(
            record
        )
        start = header_bytes(heads)
        if (
            magic != _MAGIC
            or len(record) < start
            or record[start - _DIGEST : start] != xxh3_64_digest(record[: start - _DIGEST])
        ):
            raise damaged(key, "its header does not match its checksum")
        if number != RECORD_FORMAT or codec not in _CODEC_NAMES or dtype not in _DTYPE_NAMES:
            raise damaged(key, f"format {number}, codec {codec}, dtype {dtype} are not known here")
        held = Geometry(heads, rows, dim, _DTYPE_NAMES[dtype])
        if held != self.geometry:
            raise damaged(
                key,
                f"it holds {held.dtype} {held.shape}, not {self.geometry.dtype} "
                f"{self.geometry.shape}",
            )
        if not 1 <= length <= rows:
            raise damaged(key, f"{length} tokens in a block of {rows}")
        if signature != self.signature:
            raise damaged(key, "it is a record of another model's memory")
        made_by, block, layer = _OWN.unpack_from(record, _FIXED.size)
        if (made_by, block, layer) != (write, key.block, key.layer):
            raise damaged(
                key,
                f"it is the record of block {block}, layer {layer} of the write {made_by.hex()}, "
                f"not of {write.hex()}",
            )
        at = _FIXED.size + _OWN.size
        sizes = struct.unpack_from(f"<{heads}I", record, at)
        digests = struct.unpack_from("<" + heads * "8s", record, at + 4 * heads)
        *offsets, size = accumulate(sizes, initial=0)
        if len(record) != start + size:
            raise damaged(key, f"{len(record)} bytes instead of {start + size}")
        return Header(start, _CODEC_NAMES[codec], length, offsets, sizes, digests)

    def raw_header(self, key: RecordKey, write: WriteId, digests: bytes) -> bytes:
        """The header of a full block in codec raw, whose heads have these checksums, concatenated.
        Key, write and checksums determine it, so comparing bytes identifies the record.
        """
        own = _OWN.pack(write, key[1], key[2])
        header = self._fixed + own + self._packed_sizes + digests
        return header + xxh3_64_digest(header)

    def _pack_fixed(self, codec: str, length: int) -> bytes:
        heads, rows, dim = self.geometry.shape
        return _FIXED.pack(
            _MAGIC,
            RECORD_FORMAT,
            _CODECS[codec],
            _DTYPES[self.geometry.dtype],
            heads,
            rows,
            dim,
            length,
            self.signature,
        )


def damaged(key: RecordKey, what: str) -> CorruptBlock:
    """The error for a record that is not as it was written."""
    return CorruptBlock(
        f"{key} is damaged ({what}); run verify, or forget the document and ingest it again"
    )


def damaged_head(key: RecordKey, head: int, what: object) -> CorruptBlock:
    """The error for a head of a record that is not as it was written."""
    return damaged(key, f"head {head}: {what}")


def header_bytes(heads: int) -> int:
    """Bytes of the header of a record of so many heads."""
    return _FIXED.size + _OWN.size + (4 + 8) * heads + _DIGEST


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
