"""One document in one file: export from a memory, import into another memory of the same model.

The file is a stream of msgpack frames [kind, payload, XXH3-64 over frame number, kind and payload]:
"head" (format, signature, the document's row), "tokens", "landmarks" and "record" as they lie in
the memory, and "end" with the number of frames. Import reads the whole file once before it writes
anything.
"""

import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
from xxhash import xxh3_64_intdigest

from memstore.block import RecordKey
from memstore.disk.catalog import Catalog
from memstore.disk.database import Transaction
from memstore.disk.document import Document, document_from_row
from memstore.disk.files import NO_SPACE, replacement, storage_full
from memstore.disk.signature import Signature
from memstore.errors import (
    CorruptBlock,
    CorruptMemory,
    InvalidConfig,
    InvalidInput,
    NewerFormat,
    WrongModel,
)

FORMAT = 2
MAGIC = "memstore document"
BATCH_BYTES = 16 << 20
_LARGEST_FRAME = 1 << 30


class _Frame(NamedTuple):
    kind: str
    payload: Any


def export_document(catalog: Catalog, document: Document, file: Path) -> int:
    """Write a ready document to a new file; return its bytes. All or nothing: a file that exists is
    replaced at the end.

    Raises InvalidInput (the file cannot be written), StorageFull, CorruptMemory.
    """
    try:
        with replacement(file) as out:
            number = 0
            tally = _Tally(catalog.signature, document)
            for number, frame in enumerate(_document_frames(catalog, document)):
                tally.count(frame)
                out.write(_pack(number, frame))
            if not tally.is_all_of(document):
                raise CorruptMemory(f"a part of document {document.name!r} is missing; run verify")
            out.write(_pack(number + 1, _Frame("end", number + 2)))
    except OSError as error:
        if error.errno in NO_SPACE:
            raise storage_full(file, error.strerror) from error
        raise InvalidInput(
            f"{file} could not be written ({error.strerror}); name another file"
        ) from error
    return file.stat().st_size


def _document_frames(catalog: Catalog, document: Document) -> Iterator[_Frame]:
    head = {
        "magic": MAGIC,
        "format": FORMAT,
        "signature": catalog.signature.to_dict(),
        "document": asdict(document),
    }
    yield _Frame("head", head)
    # one snapshot, so that the file is one state of the document
    with catalog.database.read() as txn:
        for part in catalog.token_parts(txn, document.id):
            yield _Frame("tokens", [part.first, part.char_start, part.ids.astype("<u4").tobytes()])
        for run in catalog.landmarks(txn, document.id):
            yield _Frame(
                "landmarks", [run.layer, run.first_block, run.keys.tobytes(), run.per_block]
            )
        for key, data in catalog.blocks.walk(txn, document.id):
            catalog.blocks.check(data, key, document.write_of(key.block))
            yield _Frame("record", [key.block, key.layer, bytes(data)])


def read_head(file: Path) -> tuple[Signature, Document]:
    """The signature and the document's row in an exported file. Raises InvalidInput,
    NewerFormat.
    """
    for frame in _frames(file):
        return _read_head(frame, file)
    raise _damaged(file, "it is empty")


def import_document(catalog: Catalog, file: Path, name: str) -> Document:
    """Read an exported document into a memory under `name`, which must be free; the caller holds
    the writer lock.

    Raises InvalidInput (no exported document, damaged, truncated), WrongModel, NewerFormat,
    StorageFull; the memory is as it was.
    """
    database = catalog.database
    original = _check(catalog, file)
    imported = replace(original, name=name)
    if original.write_of(0) is None:  # records of format 1, which are made anew
        (write,) = original.begin_write(0).writes
        imported = replace(imported, writes=(write, *original.writes))

    def begin(txn: Transaction) -> Document:
        row = replace(
            imported,
            id=catalog.new_document_id(txn),
            state="importing",
            tokens=0,
            blocks=0,
            bytes=0,
        )
        catalog.put_document(txn, row)
        return row

    number = database.write(begin).id
    done = False
    try:
        batch: list[_Frame] = []
        size = 0
        for frame in _frames(file):
            if frame.kind in ("tokens", "landmarks", "record"):
                batch.append(frame)
                size += len(frame.payload[2])
            if size >= BATCH_BYTES:
                database.write(lambda txn: _store(txn, catalog, original, imported, number, batch))  # noqa: B023 (runs now)
                batch, size = [], 0

        def end(txn: Transaction) -> Document:
            _store(txn, catalog, original, imported, number, batch)
            row = replace(
                imported,
                id=number,
                state="ready",
                bytes=sum(len(record.data) for record in catalog.blocks.walk(txn, number)),
            )
            catalog.put_document(txn, row)
            return row

        row = database.write(end)
        done = True
        return row
    finally:
        if not done:
            database.write(lambda txn: catalog.delete_document(txn, number), beyond_limit=True)


def _store(
    txn: Transaction,
    catalog: Catalog,
    original: Document,
    imported: Document,
    number: int,
    batch: list[_Frame],
) -> None:
    geometry = catalog.signature.geometry
    bits, shape = f"<i{geometry.itemsize}", (-1, geometry.num_kv_heads, geometry.head_dim)
    for kind, (first, second, data, *per_block) in batch:
        if kind == "tokens":
            catalog.put_tokens(txn, number, first, second, np.frombuffer(data, dtype="<u4"))
        elif kind == "landmarks":
            keys = np.frombuffer(data, bits).reshape(shape)
            catalog.put_landmarks(txn, number, first, second, keys, *per_block)
        else:
            key, write = RecordKey(original.id, first, second), imported.write_of(first)
            if original.write_of(first) is None and write is not None:
                data = catalog.blocks.from_format1(data, key, write)
            catalog.blocks.put(txn, key._replace(document=number), data)


def _check(catalog: Catalog, file: Path) -> Document:
    """Read the whole file; return the document's row if it is whole and of this model."""
    signature, document = read_head(file)
    differences = catalog.signature.difference(signature)
    if differences:
        raise WrongModel(
            f"{file} was written by another model than {catalog.database.path}: "
            f"{'; '.join(differences)}"
        )
    tally = _Tally(signature, document)
    try:
        for frame in _frames(file):
            tally.count(frame)
            if frame.kind == "record":
                block, layer, data = frame.payload
                key = RecordKey(document.id, block, layer)
                catalog.blocks.check(data, key, document.write_of(block))
    except CorruptBlock as error:
        raise _damaged(file, str(error)) from error
    if not tally.is_all_of(document):
        raise _damaged(file, "it does not hold all of its document")
    return document


class _Tally:
    """Is a stream of frames all of a document? Frames come in order, so nothing is missing where
    the ends are right.
    """

    def __init__(self, signature: Signature, document: Document) -> None:
        geometry = signature.geometry
        self._key_bytes = geometry.num_kv_heads * geometry.head_dim * geometry.itemsize
        self._tokens = 0
        layers = {*signature.memory_layers} & {*document.layers_of(signature)}
        self._landmarks, self._blocks = dict.fromkeys(layers, 0), dict.fromkeys(layers, 0)
        self._in_order = True

    def count(self, frame: _Frame) -> None:
        if frame.kind == "tokens":
            first, _, ids = frame.payload
            self._in_order &= first == self._tokens
            self._tokens += len(ids) // 4
        elif frame.kind == "landmarks" and frame.payload[0] in self._landmarks:
            layer, first, keys, *per_block = frame.payload
            self._in_order &= first == self._landmarks[layer]
            self._landmarks[layer] += len(keys) // (self._key_bytes * (per_block or [1])[0])
        elif frame.kind == "record" and frame.payload[1] in self._blocks:
            block, layer, _ = frame.payload
            self._in_order &= block == self._blocks[layer]
            self._blocks[layer] += 1

    def is_all_of(self, document: Document) -> bool:
        ends = {*self._blocks.values(), *self._landmarks.values()}
        return self._in_order and self._tokens == document.tokens and ends <= {document.blocks}


def _read_head(frame: _Frame, file: Path) -> tuple[Signature, Document]:
    head = frame.payload
    if frame.kind != "head" or not isinstance(head, dict) or head.get("magic") != MAGIC:
        raise _damaged(file, "it does not begin like one")
    if head["format"] > FORMAT:
        raise NewerFormat(
            f"{file} is in export format {head['format']}, this version reads up to {FORMAT}; "
            "update memstore"
        )
    try:
        return Signature.from_dict(head["signature"]), document_from_row(head["document"])
    except (TypeError, KeyError, InvalidConfig) as error:
        raise _damaged(file, f"its head is not understood: {error}") from error


def _pack(number: int, frame: _Frame) -> bytes:
    payload = msgpack.packb(frame.payload)
    packed: bytes = msgpack.packb([frame.kind, payload, _digest(number, frame.kind, payload)])
    return packed


def _frames(file: Path) -> Iterator[_Frame]:
    """Every frame before the end, checked. Raises InvalidInput for anything but a whole, undamaged
    file.
    """
    try:
        with open(file, "rb") as source:
            unpacker = msgpack.Unpacker(source, max_buffer_size=_LARGEST_FRAME)
            ended = False
            for number, frame in enumerate(unpacker):
                if ended:
                    raise ValueError("something follows its end")
                if not (
                    isinstance(frame, list) and [type(part) for part in frame] == [str, bytes, int]
                ):
                    raise ValueError("a frame has another form")
                kind, payload, digest = frame
                if digest != _digest(number, kind, payload):
                    raise ValueError(f"the checksum of frame {number} does not match")
                content = msgpack.unpackb(payload)
                if kind == "end":
                    ended = True
                    continue
                yield _Frame(kind, content)
            if not ended:
                raise ValueError("it is truncated")
            if unpacker.tell() != os.fstat(source.fileno()).st_size:
                raise ValueError("something follows its end")
    except OSError as error:
        raise InvalidInput(
            f"{file} cannot be read ({error.strerror}); name a file that `memstore export` wrote"
        ) from error
    except (ValueError, msgpack.UnpackException) as error:
        raise _damaged(file, str(error) or type(error).__name__) from error


def _digest(number: int, kind: str, payload: bytes) -> int:
    return xxh3_64_intdigest(payload, xxh3_64_intdigest(kind.encode(), number))


def _damaged(file: Path, what: str) -> InvalidInput:
    return InvalidInput(
        f"{file} is no whole exported document ({what}); export it again, nothing was imported"
    )
