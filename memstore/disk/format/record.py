"""The stored form of a block: the record that holds all KV heads of one layer.

A record is, in little-endian order,

    magic "mR", format (u8), codec (u8), valid content tokens (u32), digest of the memory's
        signature (16 bytes)
    id of the write that made it, or digest of the passage (16 bytes), block (u32; of a passage 0),
        layer (u16)
    of each head: bytes of its payload (u32), then of each head: XXH3-64 of it
    XXH3-64 of all that stands before
    payload: one encoded unit a head (see memstore.disk.format.codec), in order of heads

so that one head is checked and decoded without touching the others, and it is known for what it is
wherever it is found: what another write made, another block or another model's is refused. The
document's number is not in it, since an import gives a document another one.
"""

import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_digest

from memstore.block import Geometry, RecordKey
from memstore.disk.format.codec import CODECS, Payload
from memstore.errors import CorruptBlock

RECORD_FORMAT = 4
WRITE_BYTES = 16
WriteId = bytes
"""16 bytes by which a record is known: of a passage the digest of its content, else random."""

_MAGIC = b"mR"
_FIXED = struct.Struct("<2sBBI16s16sIH")
_DIGEST = 8
_CODECS = {"raw": 0, "zstd": 1, "int8": 2}  # numbers in headers; none gets another meaning
_CODEC_NAMES = {number: name for name, number in _CODECS.items()}


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
    """The records of one memory. May be used by several threads."""

    def __init__(self, geometry: Geometry, signature: bytes) -> None:
        """signature: its digest (Signature.digest)."""
        self.geometry, self.signature = geometry, signature
        heads = geometry.num_kv_heads
        self.header_bytes = _FIXED.size + (4 + _DIGEST) * heads + _DIGEST
        self.raw_record_bytes = self.header_bytes + geometry.record_bytes
        self._raw_sizes = struct.pack(f"<{heads}I", *[geometry.unit_bytes] * heads)

    def encode(
        self,
        known_as: Sequence[tuple[RecordKey, WriteId]],
        k: np.ndarray,
        v: np.ndarray,
        codec: str,
    ) -> list[bytes]:
        """Encode blocks of one length with all their KV heads; one record a block.

        known_as: the key of each record, and by what it is known; k, v: raw bits [n, num_kv_heads,
        length, head_dim]; K is rotated by the offset inside the block only. length: valid content
        tokens, 1 to block_size.
        """
        geometry = self.geometry
        n, heads, length, dim = k.shape
        assert (
            k.shape == v.shape == (len(known_as), geometry.num_kv_heads, length, geometry.head_dim)
            and k.itemsize == geometry.itemsize
            and 1 <= length <= geometry.block_size
        ), (k.shape, v.shape, k.dtype, geometry)
        units = np.stack([k, v], 2).reshape(n * heads, 2, length, dim)
        payloads = CODECS[codec].encode(units, geometry.dtype)
        return [
            self.pack(*known, codec, length, payloads[at * heads : (at + 1) * heads])
            for at, known in enumerate(known_as)
        ]

    def pack(
        self, key: RecordKey, write: WriteId, codec: str, length: int, payloads: Sequence[Payload]
    ) -> bytes:
        """The record of encoded heads."""
        header = b"".join(
            (
                self._fixed(codec, length, key, write),
                struct.pack(f"<{len(payloads)}I", *map(len, payloads)),
                *map(xxh3_64_digest, payloads),
            )
        )
        return b"".join((header, xxh3_64_digest(header), *payloads))

    def raw_header(self, key: RecordKey, write: WriteId, digests: bytes) -> bytes:
        """The header of a full block in codec raw, whose heads have these checksums, concatenated.
        Key, write and checksums determine it, so comparing bytes identifies the record.
        """
        header = self._fixed("raw", self.geometry.block_size, key, write)
        header += self._raw_sizes + digests
        return header + xxh3_64_digest(header)

    def _fixed(self, codec: str, length: int, key: RecordKey, write: WriteId) -> bytes:
        known = self.signature, write, key[1], key[2]
        return _FIXED.pack(_MAGIC, RECORD_FORMAT, _CODECS[codec], length, *known)

    def header(self, record: memoryview, key: RecordKey, write: WriteId) -> Header:
        """The header of the record that `write` made under this key. Raises CorruptBlock for
        another's, and for what is not a record.
        """
        start, heads = self.header_bytes, self.geometry.num_kv_heads
        if len(record) < start:
            raise damaged(key, f"truncated to {len(record)} bytes")
        if record[start - _DIGEST : start] != xxh3_64_digest(record[: start - _DIGEST]):
            raise damaged(key, "its header does not match its checksum")
        _, _, codec, length, *_, block, layer = _FIXED.unpack_from(record)
        name = _CODEC_NAMES.get(codec, "raw")
        if record[: _FIXED.size] != self._fixed(name, length, key, write):
            raise damaged(
                key, f"it is a record of another write or model, of block {block}, layer {layer}"
            )
        if not 1 <= length <= self.geometry.block_size:
            raise damaged(key, f"{length} tokens in a block of {self.geometry.block_size}")
        sizes = struct.unpack_from(f"<{heads}I", record, _FIXED.size)
        digests = struct.unpack_from("<" + heads * "8s", record, _FIXED.size + 4 * heads)
        *offsets, size = accumulate(sizes, initial=0)
        if len(record) != start + size:
            raise damaged(key, f"{len(record)} bytes instead of {start + size}")
        return Header(start, name, length, offsets, sizes, digests)

    def decode_head(
        self,
        record: memoryview,
        key: RecordKey,
        header: Header,
        head: int,
        kv: tuple[np.ndarray, np.ndarray],
    ) -> None:
        """Check and decode one head of a record into kv, contiguous [block_size, head_dim] of raw
        bits.

        What they hold is its bits or, with an error raised, nothing of use. Raises CorruptBlock.
        """
        payload = self._payload(record, key, header, head)
        try:
            CODECS[header.codec].decode(payload, *kv, self.geometry.dtype, header.length)
        except ValueError as error:
            raise damaged(key, f"head {head}: {error}") from error

    def check(self, record: memoryview, key: RecordKey, write: WriteId) -> int:
        """Check every byte of a record without decoding it; return its valid content tokens. Raises
        CorruptBlock.
        """
        header = self.header(record, key, write)
        for head in range(self.geometry.num_kv_heads):
            self._payload(record, key, header, head)
        return header.length

    def _payload(self, record: memoryview, key: RecordKey, header: Header, head: int) -> memoryview:
        """A head's payload, checked. Raises CorruptBlock."""
        start = header.start + header.offsets[head]
        payload = record[start : start + header.sizes[head]]
        if xxh3_64_digest(payload) != header.digests[head]:
            raise damaged(key, f"head {head}: its checksum does not match")
        return payload


def damaged(key: RecordKey, what: str) -> CorruptBlock:
    """The error for a record that is not as it was written."""
    return CorruptBlock(
        f"{key} is damaged ({what}); run verify, or forget the document and ingest it again"
    )
