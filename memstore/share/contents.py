"""The contents of a document: the places of its values and records in the objects of a publication
or in an exported file.

Objects and files hold values of the tables of tokens and search data (as in a memory, without their
checksum) and records, in any order; a passage is stored once for all documents that refer to it.
The contents are msgpack compressed by zstd; a manifest has their place. A name "" is the object, or
file, that holds the contents themselves.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
import zstandard
from msgspec import Meta
from xxhash import xxh3_64_intdigest

from memstore.decode import Block, Count, Layer, unpack
from memstore.disk.format.codec import decompressed
from memstore.disk.format.document import Document
from memstore.disk.tables.texts import DIGEST_BYTES, Digest
from memstore.errors import CorruptBlock, CorruptMemory, InvalidInput, MemstoreError
from memstore.share.document_parts import Head, IndexRun, Part, PartOrder, Record, Tokens
from memstore.share.ranges import OBJECT_BYTES, Extent, Ranges, read_extents

Kind = Literal["tokens", "landmarks", "records"]
Name = Annotated[str, Meta(max_length=4096)]

_BATCH_BYTES = 8 << 20  # bytes of parts that are read at once
_MOST = 1 << 20  # most values, layers or names: decoded ones take many times their bytes


class Place(NamedTuple):
    """A range of bytes of an object, and their XXH3-64."""

    name: Name
    offset: Count
    length: Annotated[int, Meta(ge=1, le=OBJECT_BYTES)]
    digest: Annotated[int, Meta(ge=0)]

    @property
    def extent(self) -> Extent:
        """The range without the checksum."""
        return Extent(*self[:3])


class Entry(NamedTuple):
    """A published or exported document in a manifest."""

    row: Document  # its id is 1
    contents: Place
    objects: tuple[Name, ...]  # all objects that its contents name, in order, and its contents' own
    records: Count  # blocks with records


def public_row(row: Document) -> Document:
    """A memory's row without the values that matter only inside that memory."""
    return replace(row.portable(), id=1)


class Value(NamedTuple):
    """An entry of the table of tokens or landmarks."""

    kind: Literal["tokens", "landmarks"]
    part: Layer  # layer of landmark keys, or part of a selector's runs; 0 for tokens
    first: Block  # its first token, passage or block


class _Stored(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    values: Annotated[list[tuple[Value, Place]], Meta(max_length=_MOST)]
    digests: bytes
    layers: Annotated[list[Layer], Meta(max_length=_MOST)]
    names: Annotated[list[Name], Meta(max_length=_MOST)]
    records: bytes  # int64, little-endian


@dataclass(frozen=True)
class Contents:
    """The places of the values and records of a document."""

    values: dict[Value, Place]
    digests: bytes  # digests of its passages, by block; b"" for a document of blocks
    layers: tuple[int, ...]
    names: tuple[str, ...]  # names of the objects with its records
    records: np.ndarray  # int64 [3, blocks, layers]: number of a name, offset, length (0: none)

    def record(self, block: int, layer: int) -> Extent | None:
        """The place of a block's record, or None."""
        if layer not in self.layers or not 0 <= block < self.records.shape[1]:
            return None
        name, offset, length = self.records[:, block, self.layers.index(layer)].tolist()
        return Extent(self.names[name], offset, length) if length else None

    @classmethod
    def decode(cls, data: bytes | memoryview, row: Document, where: str) -> "Contents":
        """The contents of a document, decoded; where: the object of `data`. Raises ValueError."""
        stored = unpack(decompressed(data, OBJECT_BYTES), _Stored)
        layers, names = stored.layers, [name or where for name in stored.names]
        if not layers or layers != sorted(set(layers)):
            raise ValueError("its layers are not in order")
        records = np.frombuffer(stored.records, "<i8").reshape(3, row.blocks, len(layers))
        numbers, offsets, lengths = records
        right = (numbers >= 0) & (numbers < len(names)) & (offsets >= 0) & (lengths > 0)
        if not ((right & (lengths <= OBJECT_BYTES)) | (lengths == 0)).all():
            raise ValueError("its records have no objects")
        if len(stored.digests) != (DIGEST_BYTES * row.blocks if row.of_passages else 0):
            raise ValueError("it does not name its passages")
        values = {value: place._replace(name=place.name or where) for value, place in stored.values}
        return cls(values, stored.digests, tuple(layers), tuple(names), records)


# Reading


def read_contents(objects: Ranges, entry: Entry, data: bytes | memoryview) -> Contents:
    """The contents of an entry, decoded. Raises CorruptMemory."""
    check_digest(objects, entry.contents, data)
    try:
        return Contents.decode(data, entry.row, entry.contents.name)
    except ValueError as error:
        raise damaged(objects, entry.contents.extent, error) from error


def read_parts(objects: Ranges, entry: Entry) -> Iterator[Part]:
    """The parts of a document: tokens, search data, then records in order of block and layer, read
    in batches of 8 MB. Checks values; the caller checks records. Raises CorruptMemory,
    StoreUnavailable.
    """
    contents = read_contents(objects, entry, objects.get_range(*entry.contents.extent))
    batch, size = list[tuple[Value | tuple[int, int], Extent]](), 0
    for what, extent in _extents(contents):
        batch.append((what, extent))
        size += extent.length
        if size >= _BATCH_BYTES:
            yield from _read(objects, contents, batch)
            batch, size = [], 0
    yield from _read(objects, contents, batch)


def _extents(contents: Contents) -> Iterator[tuple[Value | tuple[int, int], Extent]]:
    for value, place in contents.values.items():
        yield value, place.extent
    for block in range(contents.records.shape[1]):
        for layer in contents.layers:
            found = contents.record(block, layer)
            if found is not None:
                yield (block, layer), found


def _read(
    objects: Ranges, contents: Contents, batch: list[tuple[Value | tuple[int, int], Extent]]
) -> Iterator[Part]:
    found = read_extents(objects, [extent for _, extent in batch])
    for (what, _), answer in zip(batch, found):
        if isinstance(answer, MemstoreError):
            raise answer
        data = bytes(answer)
        if not isinstance(what, Value):
            yield Record(*what, data)
            continue
        check_digest(objects, contents.values[what], data)
        tokens = what.kind == "tokens"
        yield Tokens(what.first, data) if tokens else IndexRun(what.part, what.first, data)


def check_digest(objects: Ranges, place: Place, data: bytes | memoryview) -> None:
    """Raises CorruptMemory if `data` does not match a place's checksum."""
    if len(data) != place.length or xxh3_64_intdigest(data) != place.digest:
        raise damaged(objects, place.extent, "wrong checksum")


def damaged(objects: Ranges, extent: Extent, error: object) -> CorruptMemory:
    """The error for damaged bytes."""
    name, offset, length = extent
    return CorruptMemory(
        f"{objects.url}: {length:,} bytes from {offset:,} of {name or 'it'} are damaged ({error}); "
        "run memstore verify, or publish the document again with --check"
    )


# Writing


@dataclass(eq=False)
class Segment:
    """Bytes of a future object, or of a part of one."""

    name: str = ""  # name of the object; "" until it has one
    start: int = 0  # offset of these bytes in the object
    chunks: list[bytes] = field(default_factory=list)
    size: int = 0  # bytes

    def add(self, data: bytes) -> int:
        """Append bytes; return their offset."""
        self.chunks.append(data)
        self.size += len(data)
        return self.size - len(data)


Stored = tuple[Segment, int, int]
"""A segment, an offset in it, and a length."""


@dataclass(frozen=True)
class Draft:
    """The contents of a document whose segments may have no names yet."""

    document: Document
    layers: list[int]
    values: dict[Value, tuple[Stored, int]] = field(default_factory=dict)  # with checksums
    digests: list[Digest] = field(default_factory=list)
    records: dict[tuple[int, int], Stored] = field(default_factory=dict)  # by block and layer

    def encode(self) -> bytes:
        """The stored form of the contents; all other objects must have names. Raises InvalidInput
        for a size that readers would refuse.
        """
        names: dict[str, int] = {}
        records = np.zeros((3, self.document.blocks, len(self.layers)), "<i8")
        for (block, layer), (segment, offset, length) in self.records.items():
            name = names.setdefault(segment.name, len(names))
            records[:, block, self.layers.index(layer)] = name, segment.start + offset, length
        values = [
            (value, Place(segment.name, segment.start + offset, length, digest))
            for value, ((segment, offset, length), digest) in self.values.items()
        ]
        stored = _Stored(values, b"".join(self.digests), self.layers, [*names], records.tobytes())
        packed = msgspec.msgpack.encode(stored)
        if len(packed) > OBJECT_BYTES or len(values) > _MOST:
            raise InvalidInput(
                f"document {self.document.name!r} is too large to be exported or published; "
                "ingest it as several documents"
            )
        return zstandard.compress(packed)

    def entry(self, contents: Place) -> Entry:
        """The entry of the document, whose contents are stored at `contents`."""
        segments = [segment for segment, _, _ in self.records.values()]
        segments += [segment for (segment, _, _), _ in self.values.values()]
        names = {segment.name or contents.name for segment in segments} | {contents.name}
        blocks = len({block for block, _ in self.records})
        return Entry(public_row(self.document), contents, tuple(sorted(names)), blocks)


Append = Callable[[Kind, bytes], Stored]
"""Appends bytes of a kind to a segment."""


class DocumentWriter:
    """Writes documents in turn. For one thread."""

    def __init__(self, append: Append) -> None:
        self._append = append
        self.passages: dict[Digest, Stored] = {}  # stored passages

    def write(self, head: Head, parts: Iterable[Part], *, records: bool = True) -> Draft:
        """Write a document. Passages that are stored already need no records among the parts.

        records: False for a document of passages as text, whose parts have no records. Raises
        CorruptMemory (a part is damaged or missing), and what the parts and the target raise.
        """
        document = head.document
        try:
            order = PartOrder(head)
            draft = Draft(document, document.memory_layers(head.signature), digests=order.digests)
            for part in order.checked(parts):
                if isinstance(part, Tokens):
                    self._write_value(draft, Value("tokens", 0, part.first), part.value)
                elif isinstance(part, IndexRun):
                    self._write_value(draft, Value("landmarks", *part[:2]), part.value)
                elif not document.of_passages:
                    draft.records[part.block, part.layer] = self._append("records", part.data)
                elif (digest := draft.digests[part.block]) not in self.passages:
                    self.passages[digest] = self._append("records", part.data)
        except CorruptBlock:
            raise
        except ValueError as error:
            raise CorruptMemory(
                f"a part of document {document.name!r} is missing ({error}); run verify"
            ) from error
        for block, digest in enumerate(order.digests if records else ()):
            if digest in self.passages:
                draft.records[block, 0] = self.passages[digest]
        return draft

    def _write_value(self, draft: Draft, value: Value, data: bytes) -> None:
        draft.values[value] = self._append(value.kind, data), xxh3_64_intdigest(data)
