"""Manifests, and the footers of exported files.

magic (8 bytes), format (u32), a zero (u32), msgpack compressed by zstd, XXH3-64 of all that
"""

import struct
from typing import Any

import msgspec
import zstandard
from xxhash import xxh3_64_intdigest

from memstore.decode import T, unpack
from memstore.errors import InvalidInput, NewerFormat, OlderFormat

FORMAT = 12  # of publications and exported documents
PACKED_BYTES = 256 << 20  # packed or unpacked
_HEAD, _DIGEST = struct.Struct("<8sII"), struct.Struct("<Q")


def pack(magic: bytes, value: Any, *, number: int = FORMAT) -> bytes:
    """Encode a value. Raises InvalidInput where readers would refuse the size."""
    plain = msgspec.msgpack.encode(value)
    data: bytes = _HEAD.pack(magic, number, 0) + zstandard.compress(plain)
    if max(len(plain), len(data) + _DIGEST.size) > PACKED_BYTES:
        raise InvalidInput(
            f"the table of the documents would have {len(plain):,} bytes, which readers refuse; "
            "publish some of them to another prefix"
        )
    return data + _DIGEST.pack(xxh3_64_intdigest(data))


def open_packed(magic: bytes, data: bytes | memoryview, form: type[T], what: str) -> T:
    """Decode an object. what: names it. Raises ValueError (damaged), NewerFormat, OlderFormat."""
    data = bytes(data)
    if len(data) < _HEAD.size + _DIGEST.size:
        raise ValueError("it is truncated")
    found, number, _ = _HEAD.unpack_from(data)
    if found != magic:
        raise ValueError("it is something else")
    if data[-_DIGEST.size :] != _DIGEST.pack(xxh3_64_intdigest(data[: -_DIGEST.size])):
        raise ValueError("its checksum does not match")
    if number > FORMAT:
        raise NewerFormat(
            f"{what} is in format {number}, this version reads {FORMAT}; update memstore"
        )
    if number < FORMAT:
        raise OlderFormat(
            f"{what} was made by an older version; ingest the documents again (memstore ingest), "
            "and export them again, or publish them to another prefix"
        )
    return unpack(decompressed(data[_HEAD.size : -_DIGEST.size]), form)


def decompressed(data: bytes, most: int = PACKED_BYTES) -> bytes:
    """Decompress zstd. Raises ValueError, also for more than `most` bytes."""
    try:
        if not 0 <= zstandard.frame_content_size(data) <= most:
            raise ValueError("it is too large")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=most)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
