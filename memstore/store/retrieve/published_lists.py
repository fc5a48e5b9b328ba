"""Lists of a published memory: read whole from its object store, and published in the next
manifest.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress

import numpy as np
from xxhash import xxh3_64_intdigest

from memstore.errors import CorruptMemory, InvalidInput, ObjectNotFound, WrongModel
from memstore.index.index_file import Parts, Unusable, decode_file
from memstore.index.passage_files import FILE, PassageDirectory, PassageLists, covered_by, encode
from memstore.share.contents import Place
from memstore.share.manifest import LISTS, Manifest
from memstore.share.object_store import ObjectStore
from memstore.share.publication import PublishedDatabase
from memstore.share.publish import Change, commit
from memstore.share.ranges import OBJECT_BYTES
from memstore.share.segments import SEGMENT_BYTES
from memstore.store.retrieve.listed_passages import state_of, tokens_covered

_AT_ONCE = 8  # objects that are read at the same time


class PublishedLists(PassageDirectory):
    """The objects of a memory's newest manifest, in place of a file in a directory. Methods raise
    also CorruptMemory, ObjectNotFound, StoreUnavailable.
    """

    def __init__(self, database: PublishedDatabase) -> None:
        self.name, self._database = database.path, database

    @property
    def stamp(self) -> str | None:
        """See PassageDirectory."""
        objects = self._objects
        return objects[0].name if objects else None

    @property
    def _objects(self) -> list[Place]:
        return self._database.state.manifest.lists

    def header(self) -> np.ndarray:
        """See PassageDirectory."""
        return self._read(self._objects[:1])

    def content(self) -> np.ndarray:
        """See PassageDirectory."""
        return self._read(self._objects)

    def write(self, made: PassageLists) -> int:
        """See PassageDirectory."""
        header, *rest = encode(made)
        size = send_lists(self._database.objects, made.digest, bytes(header), rest)
        self._database.refresh()
        return size

    def _read(self, objects: list[Place]) -> np.ndarray:
        if not objects:
            raise FileNotFoundError
        content, end = np.empty(sum(each.length for each in objects), np.uint8), 0
        for first in range(0, len(objects), _AT_ONCE):
            try:
                found = self._database.reads.places(objects[first : first + _AT_ONCE])
            except ObjectNotFound:
                self._database.refresh()
                raise
            for data in found:
                content[end : end + len(data)] = np.frombuffer(data, np.uint8)
                end += len(data)
        return content


def carry(directory: PassageDirectory, objects: ObjectStore, digest: str) -> None:
    """Publish the lists of a memory's directory, for a selector of this digest, if all documents
    that they cover are published, and they cover more than the published lists do. Raises
    StoreUnavailable, CorruptMemory (what is published).
    """
    try:
        content = directory.content()
        own = covered_by(content, digest)
        header, _ = decode_file(FILE, content, Parts)
    except (Unusable, OSError):
        return
    with closing(PublishedDatabase(objects)) as database:
        there = {entry.row.name: entry.row for entry in database.state.published.values()}
        try:
            published = covered_by(PublishedLists(database).header(), digest)
        except (FileNotFoundError, Unusable, CorruptMemory, ObjectNotFound):
            published = []
    if any(state_of(there.get(one.name)) != one.state for one in own):
        return  # lists must not reveal documents that are not published
    if tokens_covered(own, there) <= tokens_covered(published, there):
        return
    end = len(content) - sum(header.lengths)
    with suppress(InvalidInput, WrongModel):  # lists are caches, and all else is published
        send_lists(objects, digest, content[:end].tobytes(), [content[end:].data])


def send_lists(
    objects: ObjectStore, digest: str, header: bytes, rest: Iterable[bytes | memoryview]
) -> int:
    """Publish lists for a selector of this digest; return their bytes. header, rest: as
    passage_files.encode returns them.

    The lists need not cover documents that others publish at the same time; readers notice. Raises
    WrongModel (another selector), InvalidInput (too many documents), MemoryNotFound,
    StoreUnavailable.
    """
    if len(header) > OBJECT_BYTES:
        raise InvalidInput(f"{objects.url}: too many documents for lists; use several prefixes")

    def send(data: bytes) -> Place:
        place = Place(f"{LISTS}/{os.urandom(16).hex()}", 0, len(data), xxh3_64_intdigest(data))
        objects.put(place.name, data)
        return place

    lists = [send(header), *map(send, _segments(rest))]

    def change(newest: Manifest) -> Change:
        if newest.selector is None or newest.selector.digest != digest:
            raise WrongModel(f"{objects.url} is found by another selector; open it again")
        return Change({}, lists=lists)

    commit(objects, change)
    return sum(each.length for each in lists)


def _segments(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Pieces joined and cut into objects."""
    held = bytearray()
    for piece in pieces:
        for at in range(0, len(piece), SEGMENT_BYTES):
            held += piece[at : at + SEGMENT_BYTES]
            if len(held) >= SEGMENT_BYTES:
                yield bytes(held)
                held.clear()
    if held:
        yield bytes(held)
