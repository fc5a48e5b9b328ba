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
import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from memstore.block import RecordKey
from memstore.decode import Block, Count, Layer, Positive, unpack
from memstore.disk.blocks import BlockTable, is_finite
from memstore.disk.catalog import Catalog
from memstore.disk.database import Transaction
from memstore.disk.document import Document
from memstore.disk.files import NO_SPACE, replacement, storage_full
from memstore.disk.landmarks import LANDMARK_RUN
from memstore.disk.selector_form import SelectorForm
from memstore.disk.selector_runs import Coverage, Kind, decode, encode, kind_of
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
SELECTOR_FORMAT = 3  # of documents that a selector finds
MAGIC = "memstore document"
BATCH_BYTES = 16 << 20
_LARGEST_FRAME = 1 << 30


class _Version(msgspec.Struct):
    magic: str
    format: Positive


class _Head(_Version):
    signature: dict[str, Any]
    document: dict[str, Any]
    selector: dict[str, Any] | None = None  # the form of what the document is found by


class _Tokens(NamedTuple):
    first: Count
    char_start: Count
    ids: bytes  # u32 each


class _Landmarks(NamedTuple):
    layer: Layer
    first_block: Block
    keys: bytes  # as in the memory
    per_block: Positive = 1


class _Selected(NamedTuple):
    kind: Kind
    first_block: Block
    value: bytes  # as in the memory


class _Record(NamedTuple):
    block: Block
    layer: Layer
    data: bytes


_FORMS: dict[str, type[_Tokens | _Landmarks | _Selected | _Record]] = {
    "tokens": _Tokens,
    "landmarks": _Landmarks,
    "selected": _Selected,
    "record": _Record,
}
_KINDS = {form: kind for kind, form in _FORMS.items()}
_Part = _Tokens | _Landmarks | _Selected | _Record


class Head(NamedTuple):
    """What an exported file says of itself."""

    signature: Signature
    document: Document
    selector: SelectorForm | None


def export_document(catalog: Catalog, document: Document, file: Path) -> int:
    """Write a ready document to a new file; return its bytes. All or nothing: a file that exists is
    replaced at the end.

    Raises InvalidInput (the file cannot be written), StorageFull, CorruptMemory.
    """
    try:
        with replacement(file) as out:
            if file.is_file():  # as private as the file whose place it takes
                os.fchmod(out.fileno(), file.stat().st_mode & 0o777)
            form = catalog.selector_form
            order = _Order(Head(catalog.signature, document, form), catalog.blocks)
            head = {
                "magic": MAGIC,
                "format": FORMAT if form is None else SELECTOR_FORMAT,
                "signature": catalog.signature.to_dict(),
                "document": asdict(document),
            }
            if form is not None:
                head["selector"] = form.to_dict()
            out.write(_pack(0, "head", head))
            number = 1
            for number, part_of in enumerate(_stored(catalog, document), 1):
                order.add(part_of)
                out.write(_pack(number, _KINDS[type(part_of)], part_of))
            order.end()
            out.write(_pack(number + 1, "end", number + 2))
    except ValueError as error:
        raise CorruptMemory(
            f"a part of document {document.name!r} is missing ({error}); run verify"
        ) from error
    except OSError as error:
        if error.errno in NO_SPACE:
            raise storage_full(file, error.strerror) from error
        raise InvalidInput(
            f"{file} could not be written ({error.strerror}); name another file"
        ) from error
    return file.stat().st_size


def _stored(catalog: Catalog, document: Document) -> Iterator[_Part]:
    # one snapshot, so that the file is one state of the document
    with catalog.database.read() as txn:
        for part in catalog.token_parts(txn, document.id):
            yield _Tokens(part.first, part.char_start, part.ids.astype("<u4").tobytes())
        for run in catalog.landmarks(txn, document.id):
            yield _Landmarks(run.layer, run.first_block, run.keys.tobytes(), run.per_block)
        if catalog.selector is not None:
            catalog.check_selector(txn)
            form = catalog.selector.form
            for found in catalog.selector.all_runs(txn, document.id):
                yield _Selected(kind_of(found), found.first_block, encode(found, form))
        for key, data in catalog.blocks.walk(txn, document.id):
            yield _Record(key.block, key.layer, bytes(data))


def read_head(file: Path) -> Head:
    """What an exported file says of itself. Raises InvalidInput, NewerFormat."""
    for _, payload in _frames(file):
        try:
            version = unpack(payload, _Version)
            if version.magic != MAGIC:
                break
            if version.format > SELECTOR_FORMAT:
                raise NewerFormat(
                    f"{file} is in export format {version.format}, this version reads up to "
                    f"{SELECTOR_FORMAT}; update memstore"
                )
            head = unpack(payload, _Head)
            if (head.selector is not None) != (version.format == SELECTOR_FORMAT):
                raise ValueError("it does not say what its document is found by")
            form = None if head.selector is None else SelectorForm.decode(head.selector)
            return Head(Signature.from_dict(head.signature), Document.decode(head.document), form)
        except (ValueError, InvalidConfig) as error:
            raise _damaged(file, f"its head is not understood: {error}") from error
    raise _damaged(file, "it does not begin like one")


def check_export(file: Path) -> Head:
    """Read all of an exported file; what it says of itself. Raises InvalidInput, NewerFormat."""
    head = read_head(file)
    for _ in _parts(file, head, BlockTable(head.signature, "raw")):
        pass
    return head


def import_document(catalog: Catalog, file: Path, name: str) -> Document:
    """Read an exported document into a memory under `name`, which must be free; the caller holds
    the writer lock.

    Raises InvalidInput (no exported document, damaged, truncated), WrongModel, NewerFormat,
    StorageFull; the memory is as it was.
    """
    database = catalog.database
    head = read_head(file)
    signature, original, form = head
    differences = catalog.signature.difference(signature)
    if differences:
        raise WrongModel(
            f"{file} was written by another model than {database.path}: {'; '.join(differences)}"
        )
    if form != catalog.selector_form:
        here, there = (f.name if f is not None else "none" for f in (catalog.selector_form, form))
        raise WrongModel(
            f"{file} was written for selector {there}, {database.path} has {here}, or another "
            "state of it; import it into a memory with the same one"
        )
    for _ in _parts(file, head, catalog.blocks):
        pass  # all of it is right, before anything is written
    imported = replace(original, name=name)
    if original.write_of(0) is None:  # records of format 1, which are made anew
        (write,) = original.begin_write(0).writes
        imported = replace(imported, writes=(write, *original.writes))

    def begin(txn: Transaction) -> Document:
        catalog.check_selector(txn)
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
        batch: list[_Part] = []
        size = 0
        for part in _parts(file, head, catalog.blocks):
            batch.append(part)
            size += len(part[2])
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
    batch: list[_Part],
) -> None:
    geometry = catalog.signature.geometry
    bits, shape = f"<i{geometry.itemsize}", (-1, geometry.num_kv_heads, geometry.head_dim)
    for part in batch:
        if isinstance(part, _Tokens):
            ids = np.frombuffer(part.ids, dtype="<u4")
            catalog.put_tokens(txn, number, part.first, part.char_start, ids)
        elif isinstance(part, _Landmarks):
            keys = np.frombuffer(part.keys, bits).reshape(shape)
            catalog.put_landmarks(txn, number, part.layer, part.first_block, keys)
        elif isinstance(part, _Selected):
            assert catalog.selector is not None
            catalog.put_selected(txn, number, decode(*part, catalog.selector.form))
        else:
            block, layer, data = part
            key, write = RecordKey(original.id, block, layer), imported.write_of(block)
            if original.write_of(block) is None and write is not None:
                data = catalog.blocks.from_format1(data, key, write)
            catalog.blocks.put(txn, key._replace(document=number), data)


def _parts(file: Path, head: Head, blocks: BlockTable) -> Iterator[_Part]:
    """What a file holds of its document, each part checked. Raises InvalidInput, at the latest at
    the end, where a memory could not use it all.
    """
    signature, document, _ = head
    vocabulary = signature.architecture.get("vocab_size")
    most = vocabulary if isinstance(vocabulary, int) else 1 << 32
    try:
        order = _Order(head, blocks)
        for number, (kind, payload) in enumerate(_frames(file)):
            if number == 0:
                continue  # the head
            if kind not in _FORMS:
                raise ValueError("a frame has another form")
            part = unpack(payload, _FORMS[kind])
            order.add(part)
            if isinstance(part, _Tokens):
                if int(np.frombuffer(part.ids, "<u4").max()) >= most:
                    raise ValueError(f"it has tokens beyond the vocabulary of {most}")
            elif isinstance(part, _Landmarks):
                if part.per_block != 1:
                    raise ValueError(f"it has {part.per_block} landmark keys a block")
                keys = np.frombuffer(part.keys, f"<i{signature.geometry.itemsize}")
                if not is_finite(keys, signature.kv_dtype):
                    raise ValueError("it has landmark keys that are not finite")
            elif isinstance(part, _Record):
                key = RecordKey(document.id, part.block, part.layer)
                blocks.check_numbers(part.data, key, document.write_of(part.block))
            yield part
        order.end()
    except (ValueError, CorruptBlock) as error:
        raise _damaged(file, str(error)) from error


class _Order:
    """Are these the parts of a whole document, in order? Raises ValueError where they are not."""

    def __init__(self, head: Head, blocks: BlockTable) -> None:
        signature, document, self._form = head
        self._document, self._blocks, self._size = document, blocks, signature.block_size
        layers = {*document.layers_of(signature)}
        _expect(document.state == "ready" and document.id > 0, "it is not ready")
        _expect(document.blocks == -(-document.tokens // self._size), "its blocks are not counted")
        _expect(document.appended_to <= document.tokens, "more was appended to than there is")
        _expect(
            all(write.first <= document.blocks for write in document.writes),
            "it has a write behind its end",
        )
        _expect(
            {*signature.memory_layers} <= layers <= {*range(signature.num_layers)},
            "it has other layers than its model",
        )
        geometry = signature.geometry
        self._key_bytes = geometry.num_kv_heads * geometry.head_dim * geometry.itemsize
        self._tokens = self._characters = 0
        self._first = document.first_blocks(signature)
        self._landmarks = dict.fromkeys(self._first, 0) if self._form is None else {}
        self._coverage: Coverage | None = None
        if self._form is not None:
            tokens, blocks_ = document.tokens, document.blocks
            self._coverage = Coverage(self._form, self._size, tokens, blocks_)
        self._records = (
            (block, layer)
            for block in range(min(self._first.values(), default=0), document.blocks)
            for layer, first in self._first.items()
            if block >= first
        )

    def add(self, part: _Part) -> None:
        """The next part. Raises CorruptBlock too."""
        document = self._document
        if isinstance(part, _Tokens):
            count, rest = divmod(len(part.ids), 4)
            _expect(part.first == self._tokens and count and not rest, "tokens are missing")
            _expect(part.char_start >= self._characters, "its characters are not in order")
            self._tokens += count
            self._characters = part.char_start
            _expect(self._tokens <= document.tokens, "there are more tokens than its row says")
        elif isinstance(part, _Landmarks):
            count, rest = divmod(len(part.keys), self._key_bytes * part.per_block)
            layer, first, end = part.layer, part.first_block, part.first_block + count
            at = self._landmarks.get(layer)
            _expect(at is not None and count and not rest, f"landmark keys of layer {layer}")
            _expect(
                first == at or (not at and first <= self._first[layer]),
                f"landmark keys of layer {layer} are missing before block {first}",
            )
            # An append writes the last run anew, by its first block.
            whole = first % LANDMARK_RUN == 0 and count <= LANDMARK_RUN
            last = end == document.blocks
            _expect(
                whole and (last or (count == LANDMARK_RUN and end < document.blocks)),
                f"landmark keys of layer {layer} from block {first} on are not one run",
            )
            self._landmarks[layer] = end
        elif isinstance(part, _Selected):
            _expect(self._form is not None, "landmarks of a selector")
            if self._form is not None and self._coverage is not None:
                self._coverage.add(decode(*part, self._form))
        else:
            block, layer, data = part
            _expect(
                next(self._records, None) == (block, layer),
                f"a record before block {block}, layer {layer} is missing, or it is one too many",
            )
            key = RecordKey(document.id, block, layer)
            length = self._blocks.check(data, key, document.write_of(block))
            right = min(self._size, document.tokens - block * self._size)
            _expect(length == right, f"block {block} has {length} tokens instead of {right}")

    def end(self) -> None:
        """Nothing follows."""
        document = self._document
        _expect(self._tokens == document.tokens, "it does not hold all of its tokens")
        ends = {*self._landmarks.values()}
        _expect(ends <= {document.blocks}, "it does not hold all of its landmark keys")
        if self._coverage is not None:
            self._coverage.end()
        _expect(next(self._records, None) is None, "it does not hold all of its records")


def _expect(right: object, otherwise: str) -> None:
    if not right:
        raise ValueError(otherwise)


def _pack(number: int, kind: str, payload: Any) -> bytes:
    data = msgpack.packb(payload)
    packed: bytes = msgpack.packb([kind, data, _digest(number, kind, data)])
    return packed


def _frames(file: Path) -> Iterator[tuple[str, bytes]]:
    """Kind and payload of every frame before the end, checked; the first is the head. Raises
    InvalidInput for anything but a whole, undamaged file.
    """
    try:
        if file.exists() and not file.is_file():
            raise ValueError("it is no file")
        with open(file, "rb") as source:
            unpacker = msgpack.Unpacker(
                source, max_buffer_size=_LARGEST_FRAME, max_array_len=3, max_map_len=0
            )
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
                if (kind == "head") != (number == 0):
                    raise ValueError("it does not begin like one")
                if kind == "end":
                    ended = unpack(payload, int) == number + 1
                    if not ended:
                        raise ValueError("its end counts other frames")
                    continue
                yield kind, payload
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
