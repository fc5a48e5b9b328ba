"""The manifests of a publication: numbered, each written once, each naming everything that the
publication holds; readers read the newest.

Manifest n is the object `manifests/` and 2**64 - 1 - n in 16 hexadecimal digits, so that the newest
is first in a listing. It holds the memory's signature, codec and selector, every document's row
with where its pieces are, and the objects of lists of the selector's token landmarks, if there are
any. memstore.share.publish writes the next manifest. An exported file ends with one of its own.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from memstore.decode import Amount, Count
from memstore.disk.format.document import Document
from memstore.disk.format.index_spec import IndexSpec
from memstore.disk.format.signature import Signature
from memstore.errors import CorruptMemory, InvalidConfig, MemoryNotFound
from memstore.share.newest_seen import Seen, check_newest, newest_seen, note_newest
from memstore.share.object_store import OBJECT_BYTES, ObjectStore
from memstore.share.packed_objects import PACKED_BYTES, open_packed, pack
from memstore.share.pieces import Digest, Entry, Name, Piece

MANIFESTS = "manifests"
LISTS = "lists"  # objects of the lists that passages are found by in two stages
MAGIC = b"mRmanife"
_LAST = (1 << 64) - 1
_DIGITS = re.compile("[0-9a-f]{16}")


class ListsObject(NamedTuple):
    """An object of some 32 MB with a part of lists."""

    name: Name
    size: Annotated[int, Meta(ge=1, le=OBJECT_BYTES)]  # bytes
    digest: Digest


class ListsRef(NamedTuple):
    """The objects of lists (memstore.index.passage_files), in order; the first is the header."""

    objects: Annotated[list[ListsObject], Meta(min_length=1)]

    @property
    def names(self) -> set[str]:
        """The names of all objects."""
        return {each.name for each in self.objects}


def new_lists_name() -> str:
    """The name of a new object of lists."""
    return f"{LISTS}/{os.urandom(16).hex()}"


class _Manifest(msgspec.Struct, forbid_unknown_fields=True):
    number: Count
    id: Annotated[bytes, Meta(max_length=16)]
    published: Amount
    signature: dict[str, Any]
    codec: Name
    created: Amount
    selector: IndexSpec | None
    documents: list[tuple[dict[str, Any], list[Piece]]]
    lists: ListsRef | None


@dataclass(frozen=True)
class Manifest:
    """A publication at one time."""

    signature: Signature
    codec: str  # of the first publisher; each record names its own
    created: float
    selector: IndexSpec | None
    entries: dict[str, Entry] = field(default_factory=dict)  # by name, in order of names
    lists: ListsRef | None = None  # of the selector's token landmarks
    number: int = 0  # 0: not published
    id: bytes = b""  # random
    published: float = 0.0  # seconds since 1970

    @property
    def segments(self) -> set[str]:
        """The segments that it names."""
        return segments_of(self.entries.values())

    @property
    def seen(self) -> Seen:
        """Which manifest it is."""
        return self.number, self.id

    def encode(self, magic: bytes = MAGIC) -> bytes:
        """The object. Raises InvalidInput where readers would refuse its size."""
        values = {**vars(self), "documents": list(self.entries.values())}
        del values["entries"]
        return pack(magic, values | {"signature": self.signature.to_dict()})

    @classmethod
    def decode(cls, data: bytes | memoryview, what: str, magic: bytes = MAGIC) -> "Manifest":
        """The manifest of an object. what: names the object. Raises CorruptMemory, NewerFormat,
        OlderFormat.
        """
        try:
            held = open_packed(magic, data, _Manifest, what)
            entries = {
                entry.row.name: entry for entry in (_entry(*each) for each in held.documents)
            }
            if [*entries] != sorted(entries) or len(entries) < len(held.documents):
                raise ValueError("its documents are not in order")
            return cls(
                Signature.from_dict(held.signature), held.codec, held.created, held.selector,
                entries, held.lists, held.number, held.id, held.published,
            )  # fmt: skip
        except (ValueError, InvalidConfig) as error:
            raise CorruptMemory(
                f"{what} is damaged ({error}); restore it from a copy, or publish to another prefix"
            ) from error


def _entry(row: dict[str, Any], pieces: list[Piece]) -> Entry:
    """An entry of these values. Raises ValueError."""
    document = Document.decode(row)
    if document.state != "ready" or document.id != 1:
        raise ValueError("a document is not ready")
    return Entry(document, tuple(sorted(pieces)))


def segments_of(entries: Iterable[Entry]) -> set[str]:
    """The segments that entries name."""
    return {piece.segment for entry in entries for piece in entry.pieces}


def manifest_name(number: int) -> str:
    """The object of a manifest."""
    return f"{MANIFESTS}/{_LAST - number:016x}"


def manifest_number(name: str) -> int:
    """The number of a manifest by its object. Raises ValueError."""
    folder, _, digits = name.rpartition("/")
    if folder != MANIFESTS or not _DIGITS.fullmatch(digits):
        raise ValueError(f"{name} is not a manifest")
    return _LAST - int(digits, 16)


def newest_number(objects: ObjectStore) -> int | None:
    """The number of the newest manifest, by one listing; None where there is none. Raises
    CorruptMemory, StoreUnavailable, MemoryNotFound (no bucket).
    """
    name = objects.first(MANIFESTS)
    try:
        return None if name is None else manifest_number(name)
    except ValueError as error:
        raise CorruptMemory(f"{objects.url}: {error}; keep other objects elsewhere") from error


def read_manifest(objects: ObjectStore, number: int) -> Manifest:
    """A manifest by its number. Raises CorruptMemory, NewerFormat, OlderFormat, ObjectNotFound,
    StoreUnavailable.
    """
    name = manifest_name(number)
    manifest = Manifest.decode(objects.get(name, PACKED_BYTES), f"{objects.url}: {name}")
    if manifest.number != number or not number:
        raise CorruptMemory(f"{objects.url}: {name} is another manifest; restore it from a copy")
    return manifest


def find_newest(
    objects: ObjectStore, *, folder: Path | None = None, at_least: int | None = None
) -> Manifest | None:
    """The newest manifest, or None where nothing was published.

    folder: remembers which that is. at_least: its number, whatever was read before. Raises as
    `read_manifest`, and StaleMemory.
    """
    before = newest_seen(objects.identity, folder)
    number = newest_number(objects)
    if number is None:
        return None
    manifest = read_manifest(objects, number)
    check_newest(objects.url, manifest.seen, before, at_least)
    note_newest(objects.identity, manifest.seen, folder, reset=at_least is not None)
    return manifest


def read_newest(
    objects: ObjectStore, *, folder: Path | None = None, at_least: int | None = None
) -> Manifest:
    """As `find_newest`; raises MemoryNotFound where nothing was published."""
    manifest = find_newest(objects, folder=folder, at_least=at_least)
    if manifest is None:
        raise MemoryNotFound(
            f"{objects.url} holds no published memory; memstore share push makes one"
        )
    return manifest
