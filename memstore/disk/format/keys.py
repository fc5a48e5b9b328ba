"""Keys of the tables: big-endian, so that their order is the order of ingest and of locality."""

import struct
from typing import Any

from memstore.block import RecordKey
from memstore.errors import CorruptMemory

_U64, _BLOCK, _LANDMARKS, _TOKENS = (
    struct.Struct(">Q"),
    struct.Struct(">QIH"),
    struct.Struct(">QHIB"),
    struct.Struct(">QQ"),
)
_RUN, _SELECTOR = 1, 2
Range = tuple[bytes, bytes | None]  # first key, and the key to stop before (None: the table's end)


def document_key(document: int) -> bytes:
    """Key of a document's row."""
    return _U64.pack(document)


def passage_key(number: int) -> bytes:
    """Key of what is told of a stored passage."""
    return _U64.pack(number)


def read_passage_key(key: bytes) -> int:
    """The number of a passage's key."""
    number: int = _unpack_key(_U64, key)[0]
    return number


def worth_key(worth: int, number: int) -> bytes:
    """Key of a passage with records, in order of worth."""
    return _TOKENS.pack(worth, number)


def read_worth_key(key: bytes) -> tuple[int, int]:
    """Worth and number of such a key."""
    worth, number = _unpack_key(_TOKENS, key)
    return worth, number


def tokens_key(document: int, first: int) -> bytes:
    """Key of the part of a document's tokens that begins with token `first`; of a document of
    passages, with block `first`.
    """
    return _TOKENS.pack(document, first)


def landmarks_key(document: int, layer: int, first_block: int) -> bytes:
    """Key of a run of landmark keys."""
    return _LANDMARKS.pack(document, layer, first_block, _RUN)


def record_key(key: RecordKey) -> bytes:
    """Key of a record."""
    return _BLOCK.pack(*key)


def _unpack_key(form: struct.Struct, key: bytes) -> tuple[Any, ...]:
    """The parts of a key. Raises CorruptMemory: keys are under no checksum of their own."""
    if len(key) != form.size:
        raise CorruptMemory(
            f"a key of {len(key)} bytes instead of {form.size} ({key[:32].hex()}); run verify"
        )
    return form.unpack(key)


def read_document_key(key: bytes) -> int:
    """The document of a row's key."""
    number: int = _unpack_key(_U64, key)[0]
    return number


def read_tokens_key(key: bytes) -> tuple[int, int]:
    """Document and first token, or block, of a part's key."""
    document, first = _unpack_key(_TOKENS, key)
    return document, first


def read_landmarks_key(key: bytes) -> tuple[int, int, int]:
    """Document, layer and first block of a key of landmarks. Raises CorruptMemory for another's."""
    document, layer, first_block, kind = _unpack_key(_LANDMARKS, key)
    if kind != _RUN:
        raise CorruptMemory(f"document {document}: {key.hex()} is no key of landmarks; run verify")
    return document, layer, first_block


def selector_key(document: int, part: int, first_block: int) -> bytes:
    """Key of a run of what a selector finds blocks by; part: a kind in a generation."""
    return _LANDMARKS.pack(document, part, first_block, _SELECTOR)


def read_selector_key(key: bytes) -> tuple[int, int, int]:
    """Document, part and first block of such a key. Raises CorruptMemory for another's."""
    document, part, first_block, kind = _unpack_key(_LANDMARKS, key)
    if kind != _SELECTOR:
        raise CorruptMemory(f"document {document}: {key.hex()} is no key of a selector; run verify")
    return document, part, first_block


def selector_range(document: int, part: int) -> Range:
    """All keys of one document and part."""
    return _LANDMARKS.pack(document, part, 0, 0), _LANDMARKS.pack(document, part + 1, 0, 0)


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
