"""What is read of memories of format 1: their records' headers and their documents' rows.

A record of format 1 is a prefix (magic "mB", header bytes, XXH3-64 of the header), a header in
msgpack (format, codec, dtype, shape, its own key, length, heads [[offset, bytes, XXH3-64], ...]),
and the payloads.
"""

import struct
from itertools import accumulate
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from xxhash import xxh3_64_intdigest

from memstore.block import Geometry, RecordKey
from memstore.decode import typed, unpack
from memstore.disk.codec import CODECS
from memstore.disk.record import Header, damaged

_PREFIX = struct.Struct("<2sHQ")
_MAGIC = b"mB"
_IMPORTING, _REPLACING = "\0import", "\0replace\0"  # names that stood for states


def read_header(record: memoryview, key: RecordKey, geometry: Geometry) -> Header:
    """The header of the record of this key. Raises CorruptBlock for another's, and for what is not
    a record.
    """
    if len(record) < _PREFIX.size:
        raise damaged(key, f"truncated to {len(record)} bytes")
    magic, size, digest = _PREFIX.unpack_from(record)
    start = _PREFIX.size + size
    packed = record[_PREFIX.size : start]
    # Seeded with what stands before it, so that those bytes are under the checksum too.
    right = xxh3_64_intdigest(packed, len(packed) + 0x6D42_0000)
    if magic != _MAGIC or len(packed) != size or digest != right:
        raise damaged(key, "its header does not match its checksum")
    try:
        header = unpack(packed, _Header)
    except ValueError as error:
        raise damaged(key, f"its header is not understood: {error}") from error
    if header.format != 1 or header.codec not in CODECS:
        raise damaged(key, f"format {header.format}, codec {header.codec!r} are not known here")
    if header.key != tuple(key):
        raise damaged(key, f"it is the record of {RecordKey(*header.key)}")
    if header.shape != geometry.shape or header.dtype != geometry.dtype:
        held = f"{header.dtype} {list(header.shape)}"
        raise damaged(key, f"it holds {held}, not {geometry.dtype} {geometry.shape}")
    if not 1 <= header.length <= geometry.block_size:
        raise damaged(key, f"{header.length} tokens in a block")
    sizes = tuple(size for _, size, _ in header.heads)
    *offsets, end = accumulate(sizes, initial=0)
    if len(sizes) != geometry.num_kv_heads or offsets != [at for at, _, _ in header.heads]:
        raise damaged(key, "its heads do not follow each other")
    if len(record) != start + end:
        raise damaged(key, f"{len(record)} bytes instead of {start + end}")
    digests = tuple(digest.to_bytes(8, "big") for _, _, digest in header.heads)
    return Header(start, header.codec, header.length, offsets, sizes, digests)


_U64 = Annotated[int, Meta(ge=0)]


class _Header(msgspec.Struct):
    format: int
    codec: str
    dtype: str
    shape: tuple[int, int, int]
    key: tuple[int, int, int]
    length: int
    heads: list[tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)], _U64]]


def most_header_bytes(heads: int) -> int:
    """Bytes that no header exceeds: a head takes 20 at most, and the rest fewer than 128."""
    return 128 + 20 * heads


def upgrade_row(row: dict[str, Any]) -> dict[str, Any]:
    """A document's row as format 2 has it; such a row is left as it is. Raises ValueError."""
    if "appended_to" in row:
        return row
    known = typed(row, _Row)
    name, state = known.name, known.state
    if name == _IMPORTING:
        name, state = "an interrupted import", "importing"
    elif name.startswith(_REPLACING):
        name, state = name.removeprefix(_REPLACING), "replacing"
    settings = dict(known.settings)
    appended_to = settings.pop("appended_to", 0)
    return {
        **row,
        "name": name,
        "state": state,
        "settings": settings,
        "appended_to": appended_to,
        "layers": None,
        "writes": [],
    }


class _Row(msgspec.Struct):
    name: str
    state: str
    settings: dict[str, Any]
