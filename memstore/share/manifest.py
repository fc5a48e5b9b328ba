"""Manifests of a publication: numbered, each written once, each with the whole state of the
publication. Readers use the newest manifest, and never return to an older one.

Manifest n is the object `manifests/` and 2**64 - 1 - n in 16 hexadecimal digits, so that the newest
is first in a listing. It has the memory's signature, codec and selector, the row of each document
with the place of its contents, and the objects of the selector's lists, if any.
memstore.share.publish writes the next manifest. An exported file ends with its own manifest.

    magic (8 bytes), format (u32), zero (u32), msgpack compressed by zstd, XXH3-64 of all before
"""

import os
import re
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import msgspec
import zstandard
from msgspec import Meta
from xxhash import xxh3_64_intdigest

from memstore.decode import Amount, Count, unpack
from memstore.disk.format.codec import decompressed
from memstore.disk.format.document import Document
from memstore.disk.format.signature import Signature
from memstore.disk.tables.runs import IndexSpec
from memstore.errors import (
    CorruptMemory,
    InvalidConfig,
    InvalidInput,
    MemoryNotFound,
    NewerFormat,
    OlderFormat,
    StaleMemory,
    WrongModel,
)
from memstore.share.contents import Entry, Name, Place
from memstore.share.object_store import ObjectStore
from memstore.share.ranges import OBJECT_BYTES

FORMAT = 12  # of publications and exported documents
MANIFESTS = "manifests"
LISTS = "lists"  # folder of the lists for search in two stages
MAGIC = b"mRmanife"
_HEAD, _DIGEST = struct.Struct("<8sII"), struct.Struct("<Q")
_LAST = (1 << 64) - 1
_DIGITS = re.compile("[0-9a-f]{16}")
_SEEN = struct.Struct("<Q16s")  # number and id of the newest manifest read so far


class _Manifest(msgspec.Struct, forbid_unknown_fields=True):
    number: Count
    id: Annotated[bytes, Meta(max_length=16)]
    signature: dict[str, Any]
    codec: Name
    created: Amount
    selector: IndexSpec | None
    documents: list[tuple[dict[str, Any], Place, tuple[Name, ...], Count]]
    lists: list[Place]


@dataclass(frozen=True)
class Manifest:
    """One state of a publication."""

    signature: Signature
    codec: str  # of the first publisher; each record names its own codec
    created: float
    selector: IndexSpec | None
    entries: dict[str, Entry] = field(default_factory=dict)  # by document name, in order of names
    lists: list[Place] = field(default_factory=list)  # lists of token landmarks; the header first
    number: int = 0  # 0: not published
    id: bytes = b""  # random

    @property
    def segments(self) -> set[str]:
        """The segments that it names."""
        return {name for entry in self.entries.values() for name in entry.objects}

    @property
    def objects(self) -> set[str]:
        """The segments and lists that it names."""
        return self.segments | {place.name for place in self.lists}

    def check_same(self, newest: "Manifest", url: str, advice: str) -> None:
        """Raises WrongModel for a manifest of another model or selector."""
        self.signature.check_same(newest.signature, url, advice)
        if newest.selector != self.selector:
            raise WrongModel(f"{url} holds documents of another selector; {advice}")

    def encode(self, magic: bytes = MAGIC) -> bytes:
        """The bytes of the object. Raises InvalidInput for a size that readers would refuse."""
        values = {**vars(self), "documents": list(self.entries.values())}
        del values["entries"]
        return pack(magic, values | {"signature": self.signature.to_dict()})

    @classmethod
    def decode(cls, data: bytes | memoryview, what: str, magic: bytes = MAGIC) -> "Manifest":
        """The manifest in the bytes of an object. what: the object's name, for messages. Raises
        CorruptMemory, NewerFormat, OlderFormat.
        """
        try:
            held = _open_packed(magic, data, what)
            documents = [Entry(_row(one[0]), *one[1:]) for one in held.documents]
            entries = {entry.row.name: entry for entry in documents}
            if [*entries] != sorted(entries) or len(entries) < len(held.documents):
                raise ValueError("its documents are not in order")
            return cls(
                Signature.from_dict(held.signature), held.codec, held.created, held.selector,
                entries, held.lists, held.number, held.id,
            )  # fmt: skip
        except (ValueError, InvalidConfig) as error:
            raise CorruptMemory(
                f"{what} is damaged ({error}); restore it from a copy, or publish to another prefix"
            ) from error


def _row(values: dict[str, Any]) -> Document:
    """Raises ValueError."""
    document = Document.decode(values)
    if document.state != "ready" or document.id != 1:
        raise ValueError("a document is not ready")
    return document


def pack(magic: bytes, value: Any, *, number: int = FORMAT) -> bytes:
    """Encode a manifest's values. Raises InvalidInput for a size that readers would refuse."""
    plain = msgspec.msgpack.encode(value)
    data: bytes = _HEAD.pack(magic, number, 0) + zstandard.compress(plain)
    if max(len(plain), len(data) + _DIGEST.size) > OBJECT_BYTES:
        raise InvalidInput(
            f"the table of the documents would have {len(plain):,} bytes, which readers refuse; "
            "publish some of them to another prefix"
        )
    return data + _DIGEST.pack(xxh3_64_intdigest(data))


def _open_packed(magic: bytes, data: bytes | memoryview, what: str) -> _Manifest:
    """Raises ValueError (damaged), NewerFormat, OlderFormat."""
    data = bytes(data)
    if len(data) < _HEAD.size + _DIGEST.size:
        raise ValueError("it is truncated")
    found, number, _ = _HEAD.unpack_from(data)
    if found != magic:
        raise ValueError("it is not a manifest")
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
    return unpack(decompressed(data[_HEAD.size : -_DIGEST.size], OBJECT_BYTES), _Manifest)


# Manifests of an object store


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
    """The number of the newest manifest, from one listing; None if there is none. Raises
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
    manifest = Manifest.decode(objects.get(name), f"{objects.url}: {name}")
    if manifest.number != number or not number:
        raise CorruptMemory(f"{objects.url}: {name} is another manifest; restore it from a copy")
    return manifest


def find_newest(objects: ObjectStore, folder: Path | None = None) -> Manifest | None:
    """The newest manifest, or None if nothing was published. folder: of a local cache, which
    remembers the newest manifest read so far. Raises as `read_manifest`, and StaleMemory if that
    manifest is newer, or another one with the same number.
    """
    file: Path | None = None
    seen, id_ = 0, b""  # number and id of the remembered one
    if folder is not None:
        name = blake2b(objects.identity.encode(), digest_size=20).hexdigest()
        file = folder / f"newest-{name}"
        with suppress(OSError, struct.error):
            seen, id_ = _SEEN.unpack(file.read_bytes())
    found = newest_number(objects)
    if found is None:
        return None
    manifest = read_manifest(objects, found)
    if seen > found or (seen == found and id_ != manifest.id):
        other = "another" if seen == found else f"the newest manifest is {found}, but"
        raise StaleMemory(
            f"{objects.url}: {other} manifest {seen} was read before: an older state was restored; "
            f"publish again, or delete {file} to accept it"
        )
    if file is not None and seen < found:
        # replaced by a rename, so that other processes read a whole file
        made = file.with_name(f"newest-{os.getpid()}-{threading.get_ident()}")
        with suppress(OSError):  # such as a full disk
            made.write_bytes(_SEEN.pack(found, manifest.id))
            made.rename(file)
    return manifest


def read_newest(objects: ObjectStore, folder: Path | None = None) -> Manifest:
    """As `find_newest`; raises MemoryNotFound if nothing was published."""
    manifest = find_newest(objects, folder)
    if manifest is None:
        raise MemoryNotFound(
            f"{objects.url} holds no published memory; memstore share push makes one"
        )
    return manifest
