"""Keys of the tables: big-endian, so that their order is the order of ingest and of locality."""

import struct
from typing import Any

from memstore.block import RecordKey
from memstore.errors import CorruptMemory

_U64, _BLOCK, _RUN, _TOKENS = (
    struct.Struct(">Q"),
    struct.Struct(">QIH"),
    struct.Struct(">QHI"),
    struct.Struct(">QQ"),
)
Range = tuple[bytes, bytes | None]  # first key, and the key to stop before (None: the table's end)


def number_key(number: int) -> bytes:
    """Key of the row of a document, or of a passage."""
    return _U64.pack(number)


def tokens_key(document: int, first: int) -> bytes:
    """Key of the part of a document's tokens that begins with token `first`; of a document of
    passages, with block `first`.
    """
    return _TOKENS.pack(document, first)


def run_key(document: int, part: int, first_block: int) -> bytes:
    """Key of a run of what blocks are found by; part: the layer of landmark keys, or the kind of
    a selector's runs.
    """
    return _RUN.pack(document, part, first_block)


def read_run_key(key: bytes) -> tuple[int, int, int]:
    """Document, part and first block of such a key. Raises CorruptMemory for another's."""
    document, part, first_block = _unpack_key(_RUN, key)
    return document, part, first_block


def run_range(document: int, part: int) -> Range:
    """All keys of one document and part."""
    return _RUN.pack(document, part, 0), _RUN.pack(document, part + 1, 0)


def record_key(key: RecordKey) -> bytes:
    """Key of a record."""
    return _BLOCK.pack(*key)


def _unpack_key(form: struct.Struct, key: bytes) -> tuple[Any, ...]:
    """The parts of a key. Raises CorruptMemory: keys are under no checksum of their own."""
    if len(key) != form.size:
        raise CorruptMemory(
            f"a key of {len(key)} bytes instead of {form.size} ({key[:32].hex()}); run verify"
        )
    parts = form.unpack(key)
    if parts[0] >> 62:
        raise CorruptMemory(f"a key of number {parts[0]}, which is never given out; run verify")
    return parts


def read_number_key(key: bytes) -> int:
    """The number of such a key. Raises CorruptMemory for another's."""
    number: int = _unpack_key(_U64, key)[0]
    return number


def read_tokens_key(key: bytes) -> tuple[int, int]:
    """Document and first token, or block, of a part's key."""
    document, first = _unpack_key(_TOKENS, key)
    return document, first


def read_record_key(key: bytes) -> RecordKey:
    """The record of a key."""
    return RecordKey(*_unpack_key(_BLOCK, key))


def document_range(document: int | None = None) -> Range:
    """All keys of one document, or of every document, in a table whose keys begin with the
    document.
    """
    return (b"", None) if document is None else (_U64.pack(document), _U64.pack(document + 1))


def record_range(document: int, first: int = 0) -> Range:
    """All keys of a document's records from block `first` on."""
    return _BLOCK.pack(document, first, 0), _U64.pack(document + 1)
