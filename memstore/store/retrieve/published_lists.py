"""Lists of a published memory: read whole from the object store, and published with a manifest."""

import os
from contextlib import closing, suppress

import numpy as np
from xxhash import xxh3_64_intdigest

from memstore.errors import InvalidInput, ObjectNotFound, WrongModel
from memstore.index.index_file import Parts, Unusable, decode_file, decode_header
from memstore.index.token_lists import FILE, Covered, PassageLists, covered_by
from memstore.share.contents import Place
from memstore.share.manifest import LISTS, Manifest
from memstore.share.object_store import ObjectStore
from memstore.share.publication import PublishedDatabase
from memstore.share.publish import Change, commit
from memstore.share.ranges import OBJECT_BYTES
from memstore.share.segments import SEGMENT_BYTES
from memstore.store.retrieve.first_stage import ListsDirectory, tokens_of


class PublishedLists(ListsDirectory):
    """Lists as objects that a memory's newest manifest names; the first begins with the file's
    header. Methods raise also CorruptMemory, ObjectNotFound, StoreUnavailable.
    """

    def __init__(self, database: PublishedDatabase) -> None:
        self.name, self._database = database.path, database

    @property
    def stamp(self) -> str | None:
        objects = self._database.state.manifest.lists
        return objects[0].name if objects else None

    def content(self, *, header: bool = False) -> np.ndarray:
        objects = self._database.state.manifest.lists[: 1 if header else None]
        if not objects:
            raise FileNotFoundError
        try:
            return np.frombuffer(b"".join(self._database.reads.places(objects)), np.uint8)
        except ObjectNotFound:  # newer lists have replaced them
            self._database.refresh()
            raise

    def write(self, lists: PassageLists) -> int:
        content = np.frombuffer(b"".join(lists.encode()), np.uint8)
        send_lists(self._database.objects, lists.digest, content)
        self._database.refresh()
        return len(content)


def carry(directory: ListsDirectory, objects: ObjectStore, digest: str) -> None:
    """Publish the lists of a memory's directory, for a selector of this digest, if all documents
    that they cover are published and they cover more than the published lists. Raises
    StoreUnavailable, CorruptMemory (of the publication).
    """
    try:
        content = directory.content()
        own = {*covered_by(content, digest)}
        decode_file(FILE, content, Parts)
    except (Unusable, OSError):
        return
    with closing(PublishedDatabase(objects)) as database:
        there = [entry.row for entry in database.state.published.values()]
        published = PublishedLists(database).covered(digest)
    # lists must not reveal documents that are not published
    revealed = own - {Covered.of(row) for row in there}
    if not revealed and tokens_of(own, there) > tokens_of(published, there):
        with suppress(InvalidInput, WrongModel):  # lists are optional; the documents are published
            send_lists(objects, digest, content)


def send_lists(objects: ObjectStore, digest: str, content: np.ndarray) -> None:
    """Publish lists for a selector of this digest. content: their file, uint8.

    The lists may lack documents that others publish concurrently; readers score those exactly.
    Raises WrongModel (another selector), InvalidInput (too many documents), MemoryNotFound,
    StoreUnavailable.
    """
    _, end = decode_header(FILE, content, Parts)
    if end > OBJECT_BYTES:
        raise InvalidInput(f"{objects.url}: too many documents for lists; use several prefixes")
    lists, ends = list[Place](), range(end + SEGMENT_BYTES, len(content), SEGMENT_BYTES)
    for data in np.split(content, [end, *ends]):
        place = Place(f"{LISTS}/{os.urandom(16).hex()}", 0, len(data), xxh3_64_intdigest(data.data))
        objects.put(place.name, data.tobytes())
        lists.append(place)

    def change(newest: Manifest) -> Change:
        if newest.selector is None or newest.selector.digest != digest:
            raise WrongModel(f"{objects.url} has another selector now; open it again")
        return Change({}, lists=lists)

    commit(objects, change)
