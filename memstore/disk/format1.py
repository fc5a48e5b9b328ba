"""What is read of memories of format 1: their records' headers and their documents' rows.

A record of format 1 is a prefix (magic "mB", header bytes, XXH3-64 of the header), a header in
msgpack (format, codec, dtype, shape, its own key, length, heads [[offset, bytes, XXH3-64], ...]),
and the payloads.
"""

import struct
from typing import Any

import msgpack
from xxhash import xxh3_64_intdigest

from memstore.block import Geometry, RecordKey
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
    header = msgpack.unpackb(packed)
    if header["format"] != 1 or header["codec"] not in CODECS:
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


def most_header_bytes(heads: int) -> int:
    """Bytes that no header exceeds: a head takes 20 at most, and the rest fewer than 128."""
    return 128 + 20 * heads


def upgrade_row(row: dict[str, Any]) -> dict[str, Any]:
    """A document's row as format 2 has it; such a row is left as it is."""
    if "appended_to" in row:
        return row
    settings, name, state = dict(row["settings"]), row["name"], row["state"]
    if name == _IMPORTING:
        state = "importing"
    elif name.startswith(_REPLACING):
        name, state = name.removeprefix(_REPLACING), "replacing"
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
