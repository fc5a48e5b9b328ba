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
import torch
from torch import Tensor
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from memstore.disk.codec import CODECS
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
_RAW_CODEC = "raw"


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
    bits = (
        np.frombuffer(data, dtype=array) if not isinstance(data, np.ndarray) else data.reshape(-1)
    )
    return (
        torch.from_numpy(bits.astype(array.newbyteorder("=")))
        .view(integer)
        .view(torch_dtype)
        .reshape(*shape)
    )


# Records


def encode_records(
    document: int,
    first_block: int,
    layer: int,
    k: Tensor,
    v: Tensor,
    last_length: int,
    codec: str,
    dtype: str,
) -> list[bytes]:
    """Encode consecutive blocks of one layer with all their KV heads; one record a block.

    k, v: [n, num_kv_heads, block_size, head_dim] in the KV dtype `dtype`; K is rotated by the
    offset inside the block only. last_length: valid content tokens of the last block, 1 to
    block_size; its rows from there on are stored as zero.
    """
    assert k.shape == v.shape and k.dtype == v.dtype == DTYPES[dtype], (
        k.shape,
        v.shape,
        k.dtype,
        v.dtype,
        dtype,
    )
    n, heads, block_size, dim = k.shape
    assert 1 <= last_length <= block_size, (last_length, k.shape)
    k_bits = raw_view(k)
    units = np.empty((n, heads, 2, block_size, dim), dtype=k_bits.dtype)
    units[:, :, 0] = k_bits
    units[:, :, 1] = raw_view(v)
    units[-1, :, :, last_length:] = 0
    full = n if last_length == block_size else n - 1
    payloads: list[bytes | memoryview] = []
    if full:
        payloads += CODECS[codec].encode(
            units[:full].reshape(full * heads, 2, block_size, dim), dtype, block_size
        )
    if full < n:
        payloads += CODECS[codec].encode(units[full], dtype, last_length)
    return [
        _record(
            {
                "format": RECORD_FORMAT,
                "codec": codec,
                "dtype": dtype,
                "shape": (heads, block_size, dim),
                "key": (document, first_block + at, layer),
                "length": block_size if at < full else last_length,
            },
            payloads[at * heads : (at + 1) * heads],
        )
        for at in range(n)
    ]


def encode_record(
    document: int, block: int, layer: int, k: Tensor, v: Tensor, length: int, codec: str, dtype: str
) -> bytes:
    """The same for one block: k, v [num_kv_heads, block_size, head_dim]."""
    return encode_records(document, block, layer, k[None], v[None], length, codec, dtype)[0]


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

    def __init__(self, shape: tuple[int, int, int], dtype: str) -> None:
        """shape: [num_kv_heads, block_size, head_dim] that records must have; dtype: the KV dtype
        they must have.
        """
        self.shape = shape
        self.dtype = dtype
        heads, rows, dim = shape
        size = 2 * rows * dim * DTYPES[dtype].itemsize
        self._raw_bytes = heads * size  # payload of codec raw
        self._offsets, self._sizes = tuple(range(0, heads * size, size)), (size,) * heads
        digest = b"\xff" * 8
        packed = msgpack.packb(
            {
                "format": RECORD_FORMAT,
                "codec": _RAW_CODEC,
                "dtype": dtype,
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

    def read(self, record: memoryview, document: int, block: int, layer: int) -> Header:
        """The header of the record of this key. Raises CorruptBlock for another's, and for what is
        not a record.
        """
        digests = self.raw_digests(record, document, block, layer)
        if digests is not None:
            start = len(record) - self._raw_bytes
            return Header(start, _RAW_CODEC, self.shape[1], self._offsets, self._sizes, digests)
        header, start = _unpack_header(record, document, block, layer)
        if header["format"] != RECORD_FORMAT or header["codec"] not in CODECS:
            raise _corrupt(
                document,
                block,
                layer,
                f"format {header['format']}, codec {header['codec']!r} are not known here",
            )
        if header["key"] != [document, block, layer]:
            owner = "document {}, block {}, layer {}".format(*header["key"])
            raise _corrupt(document, block, layer, f"it is the record of {owner}")
        if header["shape"] != list(self.shape) or header["dtype"] != self.dtype:
            held = f"{header['dtype']} {header['shape']}"
            raise _corrupt(
                document, block, layer, f"it holds {held}, not {self.dtype} {self.shape}"
            )
        offsets, sizes, digests = zip(*header["heads"])
        end = start + offsets[-1] + sizes[-1]
        if len(record) != end:
            raise _corrupt(document, block, layer, f"{len(record)} bytes instead of {end}")
        digests = tuple(digest.to_bytes(8, "big") for digest in digests)
        return Header(start, header["codec"], int(header["length"]), offsets, sizes, digests)

    def raw_digests(
        self, record: memoryview, document: int, block: int, layer: int
    ) -> Sequence[bytes] | None:
        """Read the header of a full block in codec raw: its digests, or None, and `read` tells what
        the record is.

        Of one geometry these headers differ in the key and the digests alone (a head's offset and
        size follow from it), so they are compared with what they must be, instead of unpacked: in a
        sixth of the time, where records are small and their headers most of the work.
        """
        known, form = self._raw_form(document, block, layer)
        if len(record) != form.size + self._raw_bytes:
            return None
        magic, size, digest, own, after, *digests = form.unpack_from(record)
        packed = record[_PREFIX.size : form.size]
        if own == known and after == self._after and magic == _MAGIC and size == len(packed):
            return digests if digest == _header_digest(packed) else None
        return None

    def raw_digests_of(
        self, records: Sequence[memoryview], keys: Sequence[tuple[int, int, int]]
    ) -> list[Sequence[bytes]] | None:
        """The same for several records of one size, with the checks of all taken together: the
        digests of each, or None where one of them is something else, or damaged.

        keys: document, block and layer of each.
        """
        form = self._raw_form(*keys[0])[1]
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

    def raw_bytes(self, document: int, block: int, layer: int) -> tuple[int, int]:
        """Bytes of header and payload that a full block in codec raw has, whatever its values."""
        return self._raw_form(document, block, layer)[1].size, self._raw_bytes

    def _raw_form(self, document: int, block: int, layer: int) -> tuple[bytes, struct.Struct]:
        """Of a full block in codec raw, what stands before the heads in the header, and the
        header's form.
        """
        known = self._before + self._packer()((document, block, layer))
        form = self._forms.get(len(known))
        if form is None:
            form = struct.Struct(f"{_PREFIX.format}{len(known)}s{len(self._after)}s{self._rest}")
            self._forms[len(known)] = form
        return known, form

    def _packer(self) -> Callable[[tuple[int, int, int]], bytes]:
        """What packs a key, of this thread."""
        try:
            pack: Callable[[tuple[int, int, int]], bytes] = self._local.pack
        except AttributeError:
            # making one takes ten times as long as using it
            pack = self._local.pack = msgpack.Packer(buf_size=64).pack
        return pack


_reader = functools.lru_cache(maxsize=16)(HeaderReader)


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

    out_k, out_v: one contiguous [block_size, head_dim] array of raw bits (see raw_view) for each of
    `heads`. shape: [num_kv_heads, block_size, head_dim] that the record must have; dtype: the KV
    dtype that it must have. What a head's arrays hold is its bits or, with an error raised, nothing
    of use.

    Raises CorruptBlock, naming the key, for a record that is altered in what is read, truncated,
    another block's, or of another geometry.
    """
    record = memoryview(record)
    header = _reader(shape, dtype).read(record, document, block, layer)
    for head, k, v in zip(heads, out_k, out_v, strict=True):
        try:
            decode_head(record, header, head, k, v, dtype)
        except (ValueError, IndexError) as error:
            raise damaged_head(document, block, layer, head, error) from error
    return header.length


def decode_head(
    record: memoryview, header: Header, head: int, k: np.ndarray, v: np.ndarray, dtype: str
) -> None:
    """Check and decode one head, as decode_heads does. Raises ValueError, IndexError."""
    start = header.start + header.offsets[head]
    payload = record[start : start + header.sizes[head]]
    if xxh3_64_digest(payload) != header.digests[head]:
        raise ValueError("its checksum does not match")
    CODECS[header.codec].decode(payload, k, v, dtype, header.length)


def decode_record(
    record: memoryview | bytes,
    document: int,
    block: int,
    layer: int,
    *,
    shape: tuple[int, int, int],
    dtype: str,
) -> tuple[Tensor, Tensor, int]:
    """Check and decode a record whole: new K and V [num_kv_heads, block_size, head_dim], valid
    content tokens.

    Raises CorruptBlock as decode_heads does.
    """
    k, v = torch.empty(shape, dtype=DTYPES[dtype]), torch.empty(shape, dtype=DTYPES[dtype])
    length = decode_heads(
        record,
        document,
        block,
        layer,
        range(shape[0]),
        list(raw_view(k)),
        list(raw_view(v)),
        shape=shape,
        dtype=dtype,
    )
    return k, v, length


def check_record(
    record: memoryview | bytes,
    document: int,
    block: int,
    layer: int,
    *,
    shape: tuple[int, int, int],
    dtype: str,
) -> int:
    """Check every byte of a record without decoding it; return its valid content tokens.

    Raises CorruptBlock as decode_heads does.
    """
    record = memoryview(record)
    start, _, length, *heads = _reader(shape, dtype).read(record, document, block, layer)
    for head, (offset, size, digest) in enumerate(zip(*heads)):
        if xxh3_64_digest(record[start + offset : start + offset + size]) != digest:
            raise damaged_head(document, block, layer, head, "its checksum does not match")
    return length


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

    For import and export, where a document's number changes. Raises CorruptBlock as decode_heads
    does.
    """
    check_record(record, document, block, layer, shape=shape, dtype=dtype)
    record = memoryview(record)
    header, start = _unpack_header(record, document, block, layer)
    return b"".join((_pack_header({**header, "key": (new_document, block, layer)}), record[start:]))


def _pack_header(header: dict[str, Any]) -> bytes:
    packed = msgpack.packb(header)
    return _PREFIX.pack(_MAGIC, len(packed), _header_digest(packed)) + packed


def _header_digest(packed: bytes | memoryview) -> int:
    # Seeded with what stands before it, so that those bytes are under the checksum too.
    return xxh3_64_intdigest(packed, len(packed) + 0x6D42_0000)


def _unpack_header(
    record: memoryview, document: int, block: int, layer: int
) -> tuple[dict[str, Any], int]:
    """A record's header, as it was written, and where its payload begins. Raises CorruptBlock."""
    if len(record) < _PREFIX.size:
        raise _corrupt(document, block, layer, f"truncated to {len(record)} bytes")
    magic, size, digest = _PREFIX.unpack_from(record)
    start = _PREFIX.size + size
    packed = record[_PREFIX.size : start]
    if magic != _MAGIC or len(packed) != size or _header_digest(packed) != digest:
        raise _corrupt(document, block, layer, "its header does not match its checksum")
    return msgpack.unpackb(packed), start


def damaged_head(document: int, block: int, layer: int, head: int, what: object) -> CorruptBlock:
    """The error for a head of a record that is not as it was written."""
    return _corrupt(document, block, layer, f"head {head}: {what}")


def _corrupt(document: int, block: int, layer: int, what: str) -> CorruptBlock:
    return CorruptBlock(
        f"document {document}, block {block}, layer {layer} is damaged ({what}); "
        "run verify, or forget the document and ingest it again"
    )
