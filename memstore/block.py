"""The stored form of a block: its key, the record that holds all KV heads of one layer, and the codecs.

A record is

    prefix (12 bytes): magic "mB", header bytes (u16 little-endian), XXH3-64 of the header and the four bytes before it
    header (msgpack): format, codec, dtype, shape [num_kv_heads, block_size, head_dim], own key [document, block,
        layer], length (valid content tokens), heads [[offset, bytes, XXH3-64], ...]
    payload: one encoded unit (K, then V) a head, in order of heads

so that one head is checked and decoded without touching the others, and nothing outside the record is needed to read
it. Every byte is under a checksum, and a record that is found under a key that is not its own is refused.
"""

import struct
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgpack
import numpy as np
import torch
import zstandard
from torch import Tensor
from xxhash import xxh3_64_intdigest

from memstore.errors import CorruptBlock, InvalidConfig

RECORD_FORMAT = 1

# KV dtypes that are stored, by the name they are stored under.
DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# NumPy has no bfloat16, so bits travel as integers of the same width.
_RAW: dict[int, tuple[torch.dtype, np.dtype[Any]]] = {
    2: (torch.int16, np.dtype("<i2")),
    4: (torch.int32, np.dtype("<i4")),
    8: (torch.int64, np.dtype("<i8")),
}

_PREFIX = struct.Struct("<2sHQ")
_MAGIC = b"mB"


class BlockKey(NamedTuple):
    """The unit that tiers cache, lease and count: one block of one KV head of one layer."""

    document: int  # id of a stored document; negative for a session's own blocks
    layer: int
    block: int
    head: int


# Tensors and raw bits


def dtype_name(dtype: torch.dtype) -> str:
    """The name a KV dtype is stored under. Raises InvalidConfig for a dtype that is not stored."""
    if dtype not in _NAMES:
        raise InvalidConfig(f"dtype {dtype} is not stored; choose one of {', '.join(DTYPES)}")
    return _NAMES[dtype]


def raw_view(tensor: Tensor) -> np.ndarray:
    """A tensor's bits as an integer array of the same shape.

    Shares memory with a CPU tensor (a slab can be filled through it); a tensor elsewhere is copied.
    """
    integer, array = _RAW[tensor.element_size()]
    return tensor.detach().cpu().view(integer).numpy().view(array)


def from_raw(data: bytes | memoryview | np.ndarray, shape: Sequence[int], dtype: str) -> Tensor:
    """A new tensor of the given shape and KV dtype over a copy of the raw bits in `data`."""
    torch_dtype = DTYPES[dtype]
    integer, array = _RAW[torch_dtype.itemsize]
    bits = np.frombuffer(data, dtype=array) if not isinstance(data, np.ndarray) else data.reshape(-1)
    return torch.from_numpy(bits.astype(array.newbyteorder("="))).view(integer).view(torch_dtype).reshape(*shape)


# Codecs


class Codec(Protocol):
    """How the units of a record are stored.

    A codec sees a head's K and V together and apart (K may be quantised by channel where V is by token), the KV
    dtype's name, and through the arrays the shape. It must be the same bytes in, same bytes out on every run.
    """

    name: str

    def encode(self, units: np.ndarray, dtype: str) -> Sequence[bytes | memoryview]:
        """Encode units [num_kv_heads, 2, block_size, head_dim] of raw bits (K is [:, 0], V is [:, 1]), one a head."""
        ...

    def decode(self, payload: memoryview, k: np.ndarray, v: np.ndarray, dtype: str) -> None:
        """Decode one head's payload into k and v, contiguous [block_size, head_dim] of raw bits.

        Raises ValueError if the payload does not decode to exactly that many values.
        """
        ...


class RawCodec:
    """The bits as they are."""

    name = "raw"

    def encode(self, units: np.ndarray, dtype: str) -> list[memoryview]:
        data = memoryview(np.ascontiguousarray(units).data).cast("B")
        size = len(data) // len(units)
        return [data[start : start + size] for start in range(0, len(data), size)]

    def decode(self, payload: memoryview, k: np.ndarray, v: np.ndarray, dtype: str) -> None:
        if len(payload) != 2 * k.nbytes:
            raise ValueError(f"{len(payload)} bytes instead of {2 * k.nbytes}")
        both = np.frombuffer(payload, dtype=k.dtype).reshape(2, *k.shape)
        k[...] = both[0]
        v[...] = both[1]


class ZstdCodec:
    """Byte-plane shuffle, then zstd: lossless. Bytes of equal significance lie together, which compresses better."""

    name = "zstd"
    level = 1

    def __init__(self) -> None:
        self._local = threading.local()  # neither object may be used by two threads at once

    def encode(self, units: np.ndarray, dtype: str) -> list[bytes]:
        heads, itemsize = len(units), units.itemsize
        # [heads, 2 * block_size * head_dim, itemsize] -> [heads, itemsize, 2 * block_size * head_dim]
        planes = np.ascontiguousarray(units).view(np.uint8).reshape(heads, -1, itemsize).transpose(0, 2, 1)
        shuffled = np.ascontiguousarray(planes).reshape(heads, -1)
        compressor = getattr(self._local, "compressor", None)
        if compressor is None:
            compressor = self._local.compressor = zstandard.ZstdCompressor(level=self.level)
        return [compressor.compress(unit.data) for unit in shuffled]

    def decode(self, payload: memoryview, k: np.ndarray, v: np.ndarray, dtype: str) -> None:
        decompressor = getattr(self._local, "decompressor", None)
        if decompressor is None:
            decompressor = self._local.decompressor = zstandard.ZstdDecompressor()
        try:
            shuffled = decompressor.decompress(payload, max_output_size=2 * k.nbytes)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from error
        if len(shuffled) != 2 * k.nbytes:
            raise ValueError(f"{len(shuffled)} bytes instead of {2 * k.nbytes}")
        # [itemsize, K and V, block_size * head_dim]
        planes = np.frombuffer(shuffled, dtype=np.uint8).reshape(k.itemsize, 2, k.size)
        for out, plane in ((k, planes[:, 0]), (v, planes[:, 1])):
            out.view(np.uint8).reshape(k.size, k.itemsize)[...] = plane.T


CODECS: dict[str, Codec] = {codec.name: codec for codec in (RawCodec(), ZstdCodec())}


def get_codec(name: str) -> Codec:
    """A codec by name. Raises InvalidConfig, which lists the names there are."""
    if name not in CODECS:
        raise InvalidConfig(f"codec {name!r} is unknown; choose one of {', '.join(CODECS)}")
    return CODECS[name]


# Records


def encode_record(
    document: int, block: int, layer: int, k: Tensor, v: Tensor, length: int, codec: str, dtype: str
) -> bytes:
    """Encode one block of one layer with all its KV heads.

    k, v: [num_kv_heads, block_size, head_dim] in the KV dtype `dtype`; K is rotated by the offset inside the block
    only. length: valid content tokens, 1 to block_size; rows from there on are stored as zero.
    """
    assert k.shape == v.shape and k.dtype == v.dtype == DTYPES[dtype], (k.shape, v.shape, k.dtype, v.dtype, dtype)
    assert 1 <= length <= k.shape[1], (length, k.shape)
    k_bits = raw_view(k)
    units = np.empty((k_bits.shape[0], 2, *k_bits.shape[1:]), dtype=k_bits.dtype)  # [Hkv, 2, l, D]
    units[:, 0] = k_bits
    units[:, 1] = raw_view(v)
    units[:, :, length:] = 0
    payloads = CODECS[codec].encode(units, dtype)
    heads = []
    offset = 0
    for payload in payloads:
        heads.append((offset, len(payload), xxh3_64_intdigest(payload)))
        offset += len(payload)
    header = {
        "format": RECORD_FORMAT,
        "codec": codec,
        "dtype": dtype,
        "shape": k_bits.shape,
        "key": (document, block, layer),
        "length": length,
        "heads": heads,
    }
    return b"".join((_pack_header(header), *payloads))


def decode_heads(
    record: memoryview | bytes,
    document: int,
    block: int,
    layer: int,
    heads: Sequence[int],
    out_k: Sequence[np.ndarray],
    out_v: Sequence[np.ndarray],
    *,
    shape: tuple[int, int, int],
    dtype: str,
) -> int:
    """Check and decode some heads of a record; return its valid content tokens.

    out_k, out_v: one contiguous [block_size, head_dim] array of raw bits (see raw_view) for each of `heads`.
    shape: [num_kv_heads, block_size, head_dim] that the record must have; dtype: the KV dtype that it must have.
    What a head's arrays hold is its bits or, with an error raised, nothing of use.

    Raises CorruptBlock, naming the key, for a record that is altered in what is read, truncated, another block's, or
    of another geometry.
    """
    record = memoryview(record)
    header, start = _checked_header(record, document, block, layer, shape, dtype)
    codec: Codec = CODECS[header["codec"]]
    table = header["heads"]
    for head, k, v in zip(heads, out_k, out_v, strict=True):
        try:
            offset, size, digest = table[head]
            payload = record[start + offset : start + offset + size]
            if xxh3_64_intdigest(payload) != digest:
                raise ValueError("its checksum does not match")
            codec.decode(payload, k, v, dtype)
        except (ValueError, IndexError) as error:
            raise _corrupt(document, block, layer, f"head {head}: {error}") from error
    return int(header["length"])


def decode_record(
    record: memoryview | bytes,
    document: int,
    block: int,
    layer: int,
    *,
    shape: tuple[int, int, int],
    dtype: str,
) -> tuple[Tensor, Tensor, int]:
    """Check and decode a record whole: new K and V [num_kv_heads, block_size, head_dim], valid content tokens.

    Raises CorruptBlock as decode_heads does.
    """
    k, v = torch.empty(shape, dtype=DTYPES[dtype]), torch.empty(shape, dtype=DTYPES[dtype])
    length = decode_heads(
        record, document, block, layer, range(shape[0]), list(raw_view(k)), list(raw_view(v)), shape=shape, dtype=dtype
    )
    return k, v, length


def check_record(
    record: memoryview | bytes, document: int, block: int, layer: int, *, shape: tuple[int, int, int], dtype: str
) -> int:
    """Check every byte of a record without decoding it; return its valid content tokens.

    Raises CorruptBlock as decode_heads does.
    """
    record = memoryview(record)
    header, start = _checked_header(record, document, block, layer, shape, dtype)
    for head, (offset, size, digest) in enumerate(header["heads"]):
        if xxh3_64_intdigest(record[start + offset : start + offset + size]) != digest:
            raise _corrupt(document, block, layer, f"head {head}: its checksum does not match")
    return int(header["length"])


def rename_record(
    record: memoryview | bytes,
    document: int,
    block: int,
    layer: int,
    new_document: int,
    *,
    shape: tuple[int, int, int],
    dtype: str,
) -> bytes:
    """The same record as a block of another document, checked; the payload is copied as it is.

    For import and export, where a document's number changes. Raises CorruptBlock as decode_heads does.
    """
    check_record(record, document, block, layer, shape=shape, dtype=dtype)
    record = memoryview(record)
    header, start = _checked_header(record, document, block, layer, shape, dtype)
    return b"".join((_pack_header({**header, "key": (new_document, block, layer)}), record[start:]))


def _pack_header(header: dict[str, Any]) -> bytes:
    packed = msgpack.packb(header)
    return _PREFIX.pack(_MAGIC, len(packed), _header_digest(packed)) + packed


def _header_digest(packed: bytes | memoryview) -> int:
    # Seeded with what stands before it, so that those bytes are under the checksum too.
    return xxh3_64_intdigest(packed, len(packed) + 0x6D42_0000)


def _checked_header(
    record: memoryview, document: int, block: int, layer: int, shape: tuple[int, int, int], dtype: str
) -> tuple[dict[str, Any], int]:
    """A record's header and where its payload begins, once it is sure that it is the record asked for."""
    if len(record) < _PREFIX.size:
        raise _corrupt(document, block, layer, f"truncated to {len(record)} bytes")
    magic, size, digest = _PREFIX.unpack_from(record)
    start = _PREFIX.size + size
    packed = record[_PREFIX.size : start]
    if magic != _MAGIC or len(packed) != size or _header_digest(packed) != digest:
        raise _corrupt(document, block, layer, "its header does not match its checksum")
    header = msgpack.unpackb(packed)
    if header["format"] != RECORD_FORMAT or header["codec"] not in CODECS:
        raise _corrupt(
            document, block, layer, f"format {header['format']}, codec {header['codec']!r} are not known here"
        )
    if header["key"] != [document, block, layer]:
        owner = "document {}, block {}, layer {}".format(*header["key"])
        raise _corrupt(document, block, layer, f"it is the record of {owner}")
    if header["shape"] != list(shape) or header["dtype"] != dtype:
        raise _corrupt(document, block, layer, f"it holds {header['dtype']} {header['shape']}, not {dtype} {shape}")
    offset, last, _ = header["heads"][-1]
    if len(record) != start + offset + last:
        raise _corrupt(document, block, layer, f"{len(record)} bytes instead of {start + offset + last}")
    return header, start


def _corrupt(document: int, block: int, layer: int, what: str) -> CorruptBlock:
    return CorruptBlock(
        f"document {document}, block {block}, layer {layer} is damaged ({what}); "
        "run verify, or forget the document and ingest it again"
    )
