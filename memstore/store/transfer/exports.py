"""One document in one file: export from a memory, import into another memory of the same model.

The file is a stream of msgpack frames [kind, payload, XXH3-64 over frame number, kind and payload]:
"head" (format, signature, the document's row), its parts "tokens", "run" and "record" as they are
in the memory, and "end" with the number of frames.
"""

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgpack
import msgspec
from xxhash import xxh3_64_intdigest

from memstore.block import RecordKey
from memstore.decode import Positive, unpack
from memstore.disk.files import NO_SPACE, check_outside_memories, replacement, storage_full
from memstore.disk.format.document import Document
from memstore.disk.format.index_spec import IndexSpec
from memstore.disk.format.signature import Signature
from memstore.disk.format.text_parts import decode_part, decode_tokens
from memstore.disk.lmdb.database import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.errors import (
    CorruptBlock,
    CorruptMemory,
    InvalidConfig,
    InvalidInput,
    NewerFormat,
    OlderFormat,
    WrongModel,
)
from memstore.store.transfer.document_parts import Head, IndexRun, Part, PartOrder, Record, Tokens

FORMAT = 9
MAGIC = "memstore document"
_FIRST = b"\x93" + msgpack.packb("head")  # how the first frame begins
_LARGEST_FRAME = 1 << 30


class _Version(msgspec.Struct):
    magic: str
    format: Positive


class _Head(_Version):
    signature: dict[str, Any]
    document: dict[str, Any]
    selector: dict[str, Any] | None = None  # the form of what the document is found by


_FORMS: dict[str, type[Part]] = {"tokens": Tokens, "run": IndexRun, "record": Record}
_KINDS = {form: kind for kind, form in _FORMS.items()}


def check_target(file: Path) -> None:
    """Refuse to put an export in the place of anything but an export or an empty file, or into a
    memory's directory. Raises InvalidInput.
    """
    check_outside_memories(file)
    try:
        status = os.lstat(file)
    except OSError:  # nothing is there, or nothing can be: writing says what
        return
    if not stat.S_ISREG(status.st_mode):
        raise InvalidInput(f"{file} is a link, or no regular file; name another file")
    if status.st_size and not _begins_like_one(file):
        raise InvalidInput(
            f"{file} is no exported document, and is left as it is; name another file, or remove it"
        )


def _begins_like_one(file: Path) -> bool:
    """Was it written as an export, whole or not, of whatever format?"""
    try:
        with open(file, "rb") as source:
            return source.read(len(_FIRST)) == _FIRST
    except OSError:
        return False


def write_export(head: Head, parts: Iterable[Part], file: Path) -> int:
    """Write the parts of a document, in order, to a new file; return its bytes. All or nothing: a
    file that exists is replaced at the end.

    Raises InvalidInput (the file cannot be written), StorageFull, CorruptMemory.
    """
    signature, document, spec = head
    try:
        with replacement(file) as out:
            if file.is_file():  # as private as the file whose place it takes
                os.fchmod(out.fileno(), file.stat().st_mode & 0o777)
            order = PartOrder(head)
            row = replace(document.portable(), id=1)  # the number is its memory's own
            told = {
                "magic": MAGIC,
                "format": FORMAT,
                "signature": signature.to_dict(),
                "document": asdict(row),
            }
            if spec is not None:
                told["selector"] = spec.to_dict()
            out.write(_pack(0, "head", told))
            number = 0
            for number, part_of in enumerate(parts, 1):
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


def read_head(file: Path) -> Head:
    """What an exported file says of itself. Raises InvalidInput, NewerFormat, OlderFormat."""
    for _, payload in _frames(file):
        try:
            version = unpack(payload, _Version)
            if version.magic != MAGIC:
                break
            if version.format > FORMAT:
                raise NewerFormat(
                    f"{file} is in export format {version.format}, this version reads {FORMAT}; "
                    "update memstore"
                )
            if version.format < FORMAT:
                raise OlderFormat(
                    f"{file} was made by an older version; read the document in again (memstore "
                    "ingest)"
                )
            head = unpack(payload, _Head)
            spec = None if head.selector is None else IndexSpec.decode(head.selector)
            return Head(Signature.from_dict(head.signature), Document.decode(head.document), spec)
        except (ValueError, InvalidConfig) as error:
            raise _damaged(file, f"its head is not understood: {error}") from error
    raise _damaged(file, "it does not begin like one")


def check_export(file: Path) -> Head:
    """Read all of an exported file; what it says of itself. Raises InvalidInput, NewerFormat."""
    head = read_head(file)
    for _ in read_parts(file, head):
        pass
    return head


def read_parts(file: Path, head: Head) -> Iterator[Part]:
    """What a file holds of its document, each part checked. Raises InvalidInput, at the latest at
    the end, where a memory could not use it all.
    """

    def parts() -> Iterator[Part]:
        frames = _frames(file)
        next(frames)  # the head
        for kind, payload in frames:
            if kind not in _FORMS:
                raise ValueError("a frame has another form")
            yield unpack(payload, _FORMS[kind])

    try:
        yield from usable_parts(head, parts())
    except (ValueError, CorruptBlock) as error:
        raise _damaged(file, str(error)) from error


def usable_parts(head: Head, parts: Iterable[Part]) -> Iterator[Part]:
    """These parts, each checked: a memory can use them all. Raises ValueError, CorruptBlock."""
    vocabulary = head.signature.architecture.get("vocab_size")
    most = vocabulary if isinstance(vocabulary, int) else 1 << 32
    order = PartOrder(head)
    for part in parts:
        order.add(part)
        if isinstance(part, Tokens):
            if _largest(part, head) >= most:
                raise ValueError(f"it has tokens beyond the vocabulary of {most}")
        elif isinstance(part, Record):
            order.blocks.check_numbers(part.data, *order.known_as(part.block, part.layer))
        yield part
    order.end()


def _largest(part: Tokens, head: Head) -> int:
    """The largest token of a part."""
    first, value = part
    if not head.document.of_passages:
        return int(decode_tokens(first, value).ids.max())
    passages = decode_part(first, value, head.signature.block_size).passages
    return max(int(passage.ids.max()) for passage in passages)


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
            for number, frame in enumerate(unpacker):
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
                    if unpack(payload, int) != number + 1:
                        raise ValueError("its end counts other frames")
                    # here: an unpacker counts the bytes of a frame that is begun and not whole
                    if unpacker.tell() != os.fstat(source.fileno()).st_size:
                        raise ValueError("something follows its end")
                    return
                yield kind, payload
            raise ValueError("it is truncated")
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


BATCH_BYTES = 16 << 20


def export_document(catalog: Catalog, document: Document, file: Path) -> int:
    """Write a ready document to a new file; return its bytes. All or nothing: a file that exists is
    replaced at the end.

    Raises InvalidInput (the file cannot be written), StorageFull, CorruptMemory.
    """
    head = Head(catalog.signature.public, document, catalog.index_spec)
    return write_export(head, _stored(catalog, document), file)


def _stored(catalog: Catalog, document: Document) -> Iterator[Part]:
    # one snapshot, so that the file is one state of the document
    with catalog.database.read() as txn:
        for number, value in catalog.texts.parts(txn, document.id):
            yield Tokens(number, bytes(value))
        for part, first_block, run in catalog.runs.values(txn, document.id):
            yield IndexRun(part, first_block, run)
        if document.of_passages:
            for block, passage in catalog.passages_of(txn, document):
                for key, data in catalog.blocks.walk(txn, passage.number):
                    yield Record(block, key.layer, bytes(data))
        for key, data in catalog.blocks.walk(txn, document.id):
            yield Record(key.block, key.layer, bytes(data))


def check_importable(catalog: Catalog, head: Head, source: Path | str) -> None:
    """Raises WrongModel for a document of another model or selector than the memory's; source:
    where it comes from.
    """
    path = catalog.database.path
    catalog.signature.check_same(
        head.signature, str(source), f"only a memory of that model can import it, and {path} is not"
    )
    if head.selector != catalog.index_spec:
        specs = catalog.index_spec, head.selector
        here, there = (spec.name if spec is not None else "none" for spec in specs)
        raise WrongModel(
            f"{source} was written for selector {there}, {path} has {here}, or another state of "
            "it; import it into a memory with the same one"
        )


def import_document(
    catalog: Catalog, original: Document, parts: Iterable[Part], name: str
) -> Document:
    """Store the parts of a document under `name`, which must be free; the caller holds the writer
    lock.

    Raises StorageFull, and what reading the parts raises; the memory is as it was.
    """
    database = catalog.database
    # Which file it was read from there is of no folder here.
    imported = replace(original.portable(), name=name)

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
    imported = replace(imported, id=number)
    done = False
    try:
        batch: list[Part] = []
        size, last = 0, -1
        for part in parts:
            block = part.block if isinstance(part, Record) else -1
            if size >= BATCH_BYTES and block != last:  # a passage is stored whole
                database.write(lambda txn: _store(txn, catalog, imported, batch))  # noqa: B023 (runs now)
                batch, size = [], 0
            batch.append(part)
            size, last = size + max(len(x) for x in part if isinstance(x, bytes)), block

        def end(txn: Transaction) -> Document:
            _store(txn, catalog, imported, batch)
            row = replace(imported, state="ready", bytes=catalog.record_bytes(txn, imported))
            catalog.put_document(txn, row)
            return row

        row = database.write(end)
        done = True
        return row
    finally:
        if not done:
            database.write(lambda txn: catalog.delete_document(txn, number), beyond_limit=True)


def _store(txn: Transaction, catalog: Catalog, document: Document, batch: list[Part]) -> None:
    number = document.id
    for part in batch:
        if isinstance(part, Tokens):
            catalog.texts.put_part(txn, number, part.first, part.value)
            if document.of_passages:
                found = decode_part(part.first, part.value, catalog.signature.block_size)
                digests = catalog.digests(document, found.passages)
                catalog.refer(txn, document, part.first, digests)
        elif isinstance(part, IndexRun):
            catalog.runs.put_value(txn, number, *part)
        elif not document.of_passages:
            catalog.blocks.put(txn, RecordKey(number, part.block, part.layer), part.data)
    if document.of_passages:
        _store_passages(txn, catalog, document, [one for one in batch if isinstance(one, Record)])


def _store_passages(
    txn: Transaction, catalog: Catalog, document: Document, records: list[Record]
) -> None:
    """Store the records of those of these passages that have none."""
    for record in records:
        _, digest = next(catalog.digests_of(txn, document, record.block))
        row = catalog.passages.find(txn, digest)
        if row is not None and not row.bytes:
            catalog.passages.store(txn, row, record.data)
