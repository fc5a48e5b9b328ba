"""The stored form of a block: its key, and the record that holds all KV heads of one layer.

A record is

    prefix (12 bytes): magic "mB", header bytes (u16 little-endian), XXH3-64 of the header and the
    four bytes before it header (msgpack): format, codec, dtype, shape [num_kv_heads, block_size,
    head_dim], own key [document, block,
        layer], length (valid content tokens), heads [[offset, bytes, XXH3-64], ...]
    payload: one encoded unit a head (see memstore.disk.codec), in order of heads

so that one head is checked and decoded without touching the others, and nothing outside the record
is needed to read it. Every byte is under a checksum, and a record that is found under a key that is
not its own is refused.
"""

import functools
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from memstore.block import Geometry, RecordKey
from memstore.disk.codec import CODECS
from memstore.errors import CorruptBlock

RECORD_FORMAT = 1

_PREFIX = struct.Struct("<2sHQ")
_MAGIC = b"mB"
_RAW_CODEC = "raw"


def encode_records(
    first: RecordKey, k: np.ndarray, v: np.ndarray, last_length: int, codec: str, geometry: Geometry
) -> list[bytes]:
    """Encode consecutive blocks of one layer with all their KV heads; one record a block.

    k, v: raw bits [n, num_kv_heads, block_size, head_dim]; K is rotated by the offset inside the
    block only. last_length: valid content tokens of the last block, 1 to block_size; its rows from
    there on are stored as zero.
    """
    heads, block_size, dim = geometry.shape
    n = len(k)
    assert k.shape == v.shape == (n, *geometry.shape) and k.itemsize == geometry.itemsize, (
        k.shape,
        v.shape,
        k.dtype,
        geometry,
    )
    assert 1 <= last_length <= block_size, (last_length, geometry)
    units = np.empty((n, heads, 2, block_size, dim), dtype=k.dtype)
    units[:, :, 0] = k
    units[:, :, 1] = v
    units[-1, :, :, last_length:] = 0
    full = n if last_length == block_size else n - 1
    payloads: list[bytes | memoryview] = []
    if full:
        payloads += CODECS[codec].encode(
            units[:full].reshape(full * heads, 2, block_size, dim), geometry.dtype, block_size
        )
    if full < n:
        payloads += CODECS[codec].encode(units[full], geometry.dtype, last_length)
    return [
        _record(
            {
                "format": RECORD_FORMAT,
                "codec": codec,
                "dtype": geometry.dtype,
                "shape": geometry.shape,
                "key": (first.document, first.block + at, first.layer),
                "length": block_size if at < full else last_length,
            },
            payloads[at * heads : (at + 1) * heads],
        )
        for at in range(n)
    ]


def _record(header: dict[str, Any], payloads: Sequence[bytes | memoryview]) -> bytes:
    heads = []
    offset = 0
    for payload in payloads:
        heads.append((offset, len(payload), xxh3_64_intdigest(payload)))
        offset += len(payload)
    return b"".join((_pack_header({**header, "heads": heads}), *payloads))


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


class HeaderReader:
    """Reads the headers of records of one geometry; may be used by several threads."""

    def __init__(self, geometry: Geometry) -> None:
        """geometry: that records must have."""
        self.geometry = geometry
        heads, rows, _ = shape = geometry.shape
        size = geometry.unit_bytes
        self._raw_bytes = geometry.record_bytes  # payload of codec raw
        self._offsets, self._sizes = tuple(range(0, heads * size, size)), (size,) * heads
        digest = b"\xff" * 8
        packed = msgpack.packb(
            {
                "format": RECORD_FORMAT,
                "codec": _RAW_CODEC,
                "dtype": geometry.dtype,
                "shape": shape,
                "key": (),
                "length": rows,
                "heads": [
                    (offset, size, int.from_bytes(digest, "big")) for offset in self._offsets
                ],
            }
        )
        before, after = packed.split(b"\xa3key\x90")
        self._before = before + b"\xa3key"
        self._after, *between, _ = after.split(digest)
        self._rest = "8s" + "".join(f"{len(part)}x8s" for part in between)
        # by length of what stands before the heads: keys vary in length
        self._forms: dict[int, struct.Struct] = {}
        self._local = threading.local()
        # Bytes that no header of this geometry exceeds: another codec's name and the key may take
        # 32 bytes more, and offset and size of a head grow from 1 to 5 bytes each.
        self.most = _PREFIX.size + len(packed) + 32 + heads * 8

    def read(self, record: memoryview, key: RecordKey) -> Header:
        """The header of the record of this key. Raises CorruptBlock for another's, and for what is
        not a record.
        """
        geometry = self.geometry
        digests = self.raw_digests(record, key)
        if digests is not None:
            start = len(record) - self._raw_bytes
            return Header(
                start, _RAW_CODEC, geometry.block_size, self._offsets, self._sizes, digests
            )
        header, start = _unpack_header(record, key)
        if header["format"] != RECORD_FORMAT or header["codec"] not in CODECS:
            raise damaged(
                key, f"format {header['format']}, codec {header['codec']!r} are not known here"
            )
        if header["key"] != list(key):
            raise damaged(key, f"it is the record of {RecordKey(*header['key'])}")
        if header["shape"] != list(geometry.shape) or header["dtype"] != geometry.dtype:
            held = f"{header['dtype']} {header['shape']}"
            raise damaged(key, f"it holds {held}, not {geometry.dtype} {geometry.shape}")
        offsets, sizes, digests = zip(*header["heads"])
        end = start + offsets[-1] + sizes[-1]
        if len(record) != end:
            raise damaged(key, f"{len(record)} bytes instead of {end}")
        digests = tuple(digest.to_bytes(8, "big") for digest in digests)
        return Header(start, header["codec"], int(header["length"]), offsets, sizes, digests)

    def raw_digests(self, record: memoryview, key: RecordKey) -> Sequence[bytes] | None:
        """Read the header of a full block in codec raw: its digests, or None, and `read` tells what
        the record is.

        Of one geometry these headers differ in the key and the digests alone (a head's offset and
        size follow from it), so they are compared with what they must be, instead of unpacked: in a
        sixth of the time, where records are small and their headers most of the work.
        """
        known, form = self._raw_form(key)
        if len(record) != form.size + self._raw_bytes:
            return None
        magic, size, digest, own, after, *digests = form.unpack_from(record)
        packed = record[_PREFIX.size : form.size]
        if own == known and after == self._after and magic == _MAGIC and size == len(packed):
            return digests if digest == _header_digest(packed) else None
        return None

    def raw_digests_of(
        self, records: Sequence[memoryview], keys: Sequence[RecordKey]
    ) -> list[Sequence[bytes]] | None:
        """The same for several records of one size, with the checks of all taken together: the
        digests of each, or None where one of them is something else, or damaged.
        """
        form = self._raw_form(keys[0])[1]
        if len(records[0]) != form.size + self._raw_bytes:
            return None
        packed = b"".join([record[: form.size] for record in records])
        magics, sizes, digests, owns, afters, *heads = zip(*form.iter_unpack(packed))
        pack, size = self._packer(), form.size - _PREFIX.size
        if (
            owns != tuple([self._before + own for own in map(pack, keys)])
            or {*magics, *sizes, *afters} != {_MAGIC, size, self._after}
            or digests
            != tuple(
                [
                    _header_digest(packed[at : at + size])
                    for at in range(_PREFIX.size, len(packed), form.size)
                ]
            )
        ):
            return None
        return list(zip(*heads))

    def raw_bytes(self, key: RecordKey) -> tuple[int, int]:
        """Bytes of header and payload that a full block in codec raw has, whatever its values."""
        return self._raw_form(key)[1].size, self._raw_bytes

    def _raw_form(self, key: RecordKey) -> tuple[bytes, struct.Struct]:
        """Of a full block in codec raw, what stands before the heads in the header, and the
        header's form.
        """
        known = self._before + self._packer()(key)
        form = self._forms.get(len(known))
        if form is None:
            form = struct.Struct(f"{_PREFIX.format}{len(known)}s{len(self._after)}s{self._rest}")
            self._forms[len(known)] = form
        return known, form

    def _packer(self) -> Callable[[RecordKey], bytes]:
        """What packs a key, of this thread."""
        try:
            pack: Callable[[RecordKey], bytes] = self._local.pack
        except AttributeError:
            # making one takes ten times as long as using it
            pack = self._local.pack = msgpack.Packer(buf_size=64).pack
        return pack


_reader = functools.lru_cache(maxsize=16)(HeaderReader)


def decode_heads(
    record: memoryview | bytes,
    key: RecordKey,
    heads: Sequence[int],
    out_k: Sequence[np.ndarray],
    out_v: Sequence[np.ndarray],
    geometry: Geometry,
) -> int:
    """Check and decode some heads of a record; return its valid content tokens.

    out_k, out_v: one contiguous [block_size, head_dim] array of raw bits for each of `heads`. What
    a head's arrays hold is its bits or, with an error raised, nothing of use.

    Raises CorruptBlock, naming the key, for a record that is altered in what is read, truncated,
    another block's, or of another geometry.
    """
    record = memoryview(record)
    header = _reader(geometry).read(record, key)
    for head, k, v in zip(heads, out_k, out_v, strict=True):
        decode_head(record, key, header, head, k, v, geometry.dtype)
    return header.length


def decode_head(
    record: memoryview,
    key: RecordKey,
    header: Header,
    head: int,
    k: np.ndarray,
    v: np.ndarray,
    dtype: str,
) -> None:
    """Check and decode one head, as decode_heads does. Raises CorruptBlock."""
    try:
        start = header.start + header.offsets[head]
        payload = record[start : start + header.sizes[head]]
        if xxh3_64_digest(payload) != header.digests[head]:
            raise ValueError("its checksum does not match")
        CODECS[header.codec].decode(payload, k, v, dtype, header.length)
    except (ValueError, IndexError) as error:
        raise damaged_head(key, head, error) from error


def decode_record(
    record: memoryview | bytes, key: RecordKey, geometry: Geometry
) -> tuple[np.ndarray, np.ndarray, int]:
    """Check and decode a record whole: raw bits of K and V [num_kv_heads, block_size, head_dim],
    and the valid content tokens.

    Raises CorruptBlock as decode_heads does.
    """
    k, v = (np.empty(geometry.shape, f"<i{geometry.itemsize}") for _ in range(2))
    return k, v, decode_heads(record, key, range(geometry.num_kv_heads), list(k), list(v), geometry)


def check_record(record: memoryview | bytes, key: RecordKey, geometry: Geometry) -> int:
    """Check every byte of a record without decoding it; return its valid content tokens.

    Raises CorruptBlock as decode_heads does.
    """
    record = memoryview(record)
    start, _, length, *heads = _reader(geometry).read(record, key)
    for head, (offset, size, digest) in enumerate(zip(*heads)):
        if xxh3_64_digest(record[start + offset : start + offset + size]) != digest:
            raise damaged_head(key, head, "its checksum does not match")
    return length


def rename_record(
    record: memoryview | bytes, key: RecordKey, new_document: int, geometry: Geometry
) -> bytes:
    """The same record as a block of another document, checked; the payload is copied as it is.

    For import and export, where a document's number changes. Raises CorruptBlock as decode_heads
    does.
    """
    check_record(record, key, geometry)
    record = memoryview(record)
    header, start = _unpack_header(record, key)
    return b"".join((_pack_header({**header, "key": (new_document, *key[1:])}), record[start:]))


def _pack_header(header: dict[str, Any]) -> bytes:
    packed = msgpack.packb(header)
    return _PREFIX.pack(_MAGIC, len(packed), _header_digest(packed)) + packed


def _header_digest(packed: bytes | memoryview) -> int:
    # Seeded with what stands before it, so that those bytes are under the checksum too.
    return xxh3_64_intdigest(packed, len(packed) + 0x6D42_0000)


def _unpack_header(record: memoryview, key: RecordKey) -> tuple[dict[str, Any], int]:
    """A record's header, as it was written, and where its payload begins. Raises CorruptBlock."""
    if len(record) < _PREFIX.size:
        raise damaged(key, f"truncated to {len(record)} bytes")
    magic, size, digest = _PREFIX.unpack_from(record)
    start = _PREFIX.size + size
    packed = record[_PREFIX.size : start]
    if magic != _MAGIC or len(packed) != size or _header_digest(packed) != digest:
        raise damaged(key, "its header does not match its checksum")
    return msgpack.unpackb(packed), start


def damaged(key: RecordKey, what: str) -> CorruptBlock:
    """The error for a record that is not as it was written."""
    return CorruptBlock(
        f"{key} is damaged ({what}); run verify, or forget the document and ingest it again"
    )


def damaged_head(key: RecordKey, head: int, what: object) -> CorruptBlock:
    """The error for a head of a record that is not as it was written."""
    return damaged(key, f"head {head}: {what}")
