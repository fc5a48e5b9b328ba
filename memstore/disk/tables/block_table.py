"""The table of records: encoded blocks of documents. A record holds all KV heads of one layer of a
block.

A record is, in little-endian order,

    magic "mR", format (u8), codec (u8), valid content tokens (u32), digest of the memory's
        signature (16 bytes)
    write id, or digest of the passage (16 bytes), block (u32; 0 for a passage), layer (u16)
    for each head: bytes of its payload (u32); then for each head: XXH3-64 of its payload
    XXH3-64 of all bytes so far
    payload: one encoded unit for each head (memstore.disk.format.codec), in order of heads

so that a head is checked and decoded without the others, and a record of another write, block or
model is refused. It does not contain the document's number, which changes with an import.
"""

import struct
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_digest

from memstore.block import CODEC_NUMBERS, RecordKey
from memstore.disk.format.codec import CODECS, Payload, floats_of, get_codec
from memstore.disk.format.document import WriteId
from memstore.disk.format.signature import Signature
from memstore.disk.lmdb.transaction import Transaction, read_record_key, record_key, record_range
from memstore.errors import CorruptBlock

RECORD_FORMAT = 4

_MAGIC = b"mR"
_FIXED = struct.Struct("<2sBBI16s16sIH")
_DIGEST = 8
_CODEC_NAMES = {number: name for name, number in CODEC_NUMBERS.items()}


def is_finite(bits: np.ndarray, dtype: str) -> bool:
    """Are all of these raw bits finite numbers?"""
    return bool(np.isfinite(floats_of(bits, dtype)).all())


class Header(NamedTuple):
    """A checked header. Head h: offsets[h] in the payload, sizes[h] bytes, digests[h]."""

    start: int  # offset of the payload in the record
    codec: str
    length: int  # valid content tokens
    offsets: Sequence[int]
    sizes: Sequence[int]
    digests: Sequence[bytes]


def damaged(key: RecordKey, what: str) -> CorruptBlock:
    """The error for a damaged record."""
    return CorruptBlock(
        f"{key} is damaged ({what}); run verify, or forget the document and ingest it again"
    )


class BlockTable:
    """The records of one memory. A record's `write` is its write id (Catalog.write_of), or the
    digest of a passage. Safe for several threads.
    """

    def __init__(self, signature: Signature, codec: str) -> None:
        """codec: for new records; each record names its codec, so a memory may have records of
        several. Raises InvalidConfig.
        """
        self.geometry, self.signature = signature.geometry, signature.digest
        self.codec = get_codec(codec).name
        heads = self.geometry.num_kv_heads
        self.header_bytes = _FIXED.size + (4 + _DIGEST) * heads + _DIGEST
        self.raw_record_bytes = self.header_bytes + self.geometry.record_bytes
        self._raw_sizes = struct.pack(f"<{heads}I", *[self.geometry.unit_bytes] * heads)

    # Encoding

    def encode(
        self, first: RecordKey, k: np.ndarray, v: np.ndarray, lengths: Sequence[int], write: WriteId
    ) -> list[bytes]:
        """The records of consecutive blocks of one layer.

        k, v: raw bits [n, num_kv_heads, block_size, head_dim], K rotated by the offset inside the
        block only; lengths: valid content tokens of each block, 1 to block_size; only their rows
        are stored. write: the write id.
        """
        records = list[bytes]()
        for length, alike in groupby(lengths):
            at = slice(len(records), len(records) + len(list(alike)))
            halves = k[at, :, :length], v[at, :, :length]
            for payloads in self._payloads(*halves, self.codec, length):
                key = first._replace(block=first.block + len(records))
                records.append(self._pack(key, write, self.codec, length, payloads))
        return records

    def encode_passage(self, k: np.ndarray, v: np.ndarray, digest: bytes, codec: str) -> bytes:
        """The record of a passage, which does not contain its number. k, v: raw bits [tokens,
        head_dim]; digest: the passage's, for this codec.
        """
        (payloads,) = self._payloads(k[None, None], v[None, None], codec, len(k))
        return self._pack(RecordKey(0, 0, 0), digest, codec, len(k), payloads)

    def _payloads(
        self, k: np.ndarray, v: np.ndarray, codec: str, length: int
    ) -> Iterator[Sequence[Payload]]:
        """The encoded heads of each block; k, v: raw bits [n, num_kv_heads, length, head_dim]."""
        heads, size, dim = self.geometry.shape
        assert k.shape == v.shape == (len(k), heads, length, dim) and 1 <= length <= size, k.shape
        assert k.itemsize == self.geometry.itemsize, k.dtype
        units = np.stack([k, v], 2).reshape(len(k) * heads, 2, *k.shape[2:])
        payloads = CODECS[codec].encode(units, self.geometry.dtype)
        for at in range(0, len(payloads), heads):
            yield payloads[at : at + heads]

    def _pack(
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
        """The header of a full block in codec raw; digests: the concatenated checksums of its
        heads. Key, write and checksums determine it, so comparing bytes identifies the record.
        """
        header = self._fixed("raw", self.geometry.block_size, key, write)
        header += self._raw_sizes + digests
        return header + xxh3_64_digest(header)

    def _fixed(self, codec: str, length: int, key: RecordKey, write: WriteId) -> bytes:
        known = self.signature, write, key[1], key[2]
        return _FIXED.pack(_MAGIC, RECORD_FORMAT, CODEC_NUMBERS[codec], length, *known)

    # Decoding

    def header(self, record: memoryview, key: RecordKey, write: WriteId) -> Header:
        """The header of a record. Raises CorruptBlock for a record of another key or write, and for
        other bytes.
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
        bits. Raises CorruptBlock; kv then holds arbitrary values.
        """
        payload = self._payload(record, key, header, head)
        try:
            CODECS[header.codec].decode(payload, *kv, self.geometry.dtype, header.length)
        except ValueError as error:
            raise damaged(key, f"head {head}: {error}") from error

    def decode(
        self, record: bytes | memoryview, key: RecordKey, write: WriteId
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Raw bits of K and V [num_kv_heads, block_size, head_dim], and the valid content tokens.
        Raises CorruptBlock for a record that is altered, truncated or of another key or write.
        """
        record = memoryview(record)
        header = self.header(record, key, write)
        k, v = np.empty((2, *self.geometry.shape), f"<i{self.geometry.itemsize}")
        for head in range(self.geometry.num_kv_heads):
            self.decode_head(record, key, header, head, (k[head], v[head]))
        return k, v, header.length

    def check(self, record: bytes | memoryview, key: RecordKey, write: WriteId) -> int:
        """Check every byte of a record without decoding it; return its valid content tokens. Raises
        CorruptBlock.
        """
        record = memoryview(record)
        header = self.header(record, key, write)
        for head in range(self.geometry.num_kv_heads):
            self._payload(record, key, header, head)
        return header.length

    def check_numbers(self, record: bytes | memoryview, key: RecordKey, write: WriteId) -> None:
        """Raises CorruptBlock for a record that decodes to numbers that are not finite."""
        with np.errstate(all="ignore"):
            k, v, _ = self.decode(record, key, write)
        if not (is_finite(k, self.geometry.dtype) and is_finite(v, self.geometry.dtype)):
            raise damaged(key, "it holds numbers that are not finite")

    def _payload(self, record: memoryview, key: RecordKey, header: Header, head: int) -> memoryview:
        """A head's payload, checked. Raises CorruptBlock."""
        start = header.start + header.offsets[head]
        payload = record[start : start + header.sizes[head]]
        if xxh3_64_digest(payload) != header.digests[head]:
            raise damaged(key, f"head {head}: its checksum does not match")
        return payload

    # The table

    def put(self, txn: Transaction, key: RecordKey, record: bytes) -> int:
        """Write one encoded record; return its bytes."""
        txn.put("blocks", record_key(key), record)
        return len(record)

    def walk(
        self, txn: Transaction, document: int, first: int = 0
    ) -> Iterator[tuple[RecordKey, memoryview]]:
        """A document's records from block `first` on, in order of block and layer; views that
        become invalid when the transaction ends or writes.
        """
        for key, view in txn.scan("blocks", *record_range(document, first=first)):
            yield read_record_key(key), view

    def delete(self, txn: Transaction, document: int) -> None:
        """Delete all records of a document, or of a passage."""
        txn.delete_range("blocks", *record_range(document))

    def delete_layers(
        self, txn: Transaction, document: int, layers: Collection[int], first: int, end: int
    ) -> int:
        """Delete the records of these layers of blocks `first` to `end` (exclusive); return the
        freed bytes.

        For layers without memory, which keep only the latest blocks. Missing records are ignored.
        """
        return sum(
            txn.delete("blocks", record_key(RecordKey(document, block, layer)))
            for block in range(first, end)
            for layer in sorted(layers)
        )
