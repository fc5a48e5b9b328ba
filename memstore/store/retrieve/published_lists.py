"""Lists of a published memory: read in parts from its object store, and published in the next
manifest.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from memstore.errors import CorruptMemory, ObjectNotFound, WrongModel
from memstore.index.index_file import FilePart, Unusable
from memstore.index.passage_files import Encoding, ListsHead, Made, PassageDirectory
from memstore.share.manifest import ListsRef, PartsRef
from memstore.share.object_store import Extent, ObjectStore
from memstore.share.piece_reader import Checked
from memstore.share.published_database import PublishedDatabase
from memstore.share.send_lists import send_lists
from memstore.store.retrieve.listed_passages import state_of, tokens_covered


class PublishedLists:
    """The objects of a memory's newest manifest as a Place of passage_files."""

    def __init__(self, database: PublishedDatabase) -> None:
        self._database = database

    @property
    def name(self) -> str:
        """See Place."""
        return self._database.path

    @property
    def stamp(self) -> str | None:
        """See Place."""
        lists = self._lists
        return None if lists is None else lists.head

    @property
    def _lists(self) -> ListsRef | None:
        return self._database.state.manifest.lists

    def head(self) -> np.ndarray:
        """See Place."""
        lists = self._lists
        if lists is None:
            raise FileNotFoundError
        where = Checked(Extent(lists.head, 0, lists.size), lists.digest)
        return np.frombuffer(self._checked([where])[0], np.uint8)

    def parts(self, size: int) -> "PublishedParts":
        """See Place."""
        lists = self._lists
        if lists is None or sum(part.size for part in lists.parts) != size:
            raise Unusable("its parts are not those that its head tells")
        return PublishedParts(self._checked, lists.parts)

    def write(self, made: Made) -> int:
        """See Place."""
        parts = Encoding(made)
        size = send_lists(self._database.objects, made.digest, parts, parts.head)
        self._database.refresh()
        return size

    def _checked(self, where: Sequence[Checked]) -> list[bytes | memoryview]:
        try:
            return self._database.pieces.read(where)
        except ObjectNotFound:
            self._database.look_again()
            raise


class PublishedParts:
    """Parts in objects, as a PartReader. Safe for several threads."""

    def __init__(
        self,
        checked: Callable[[Sequence[Checked]], list[bytes | memoryview]],
        objects: Sequence[PartsRef],
    ) -> None:
        """checked: reads them: PieceReader.read."""
        self._read = checked
        self._names = [each.name for each in objects]
        self._ends = [0, *accumulate(each.size for each in objects)]

    def read(self, parts: Sequence[FilePart]) -> list[np.ndarray]:
        """See PartReader. Raises also ObjectNotFound, where others were published and these are
        removed.
        """
        where = []
        for start, length, digest in parts:
            at = bisect_right(self._ends, start) - 1
            extent = Extent(self._names[at], start - self._ends[at], length)
            where.append(Checked(extent, digest))
        # copies: what is read comes in stretches, of which little may be held
        return [np.frombuffer(bytes(data), np.uint8) for data in self._read(where)]


def carry(directory: PassageDirectory, objects: ObjectStore, digest: str) -> bool:
    """Publish the lists of a memory's directory, for a selector of this digest, where all that they
    are of is published, and more than of those that are there; was that so? Raises
    StoreUnavailable, CorruptMemory (what is published).
    """
    try:
        local = ListsHead(directory.head(), digest)
        own, stored = local.covered, local.parts(directory)
    except (FileNotFoundError, Unusable, OSError):
        return False
    database = PublishedDatabase(objects)
    there = {entry.row.name: entry.row for entry in database.state.published.values()}
    try:
        published = ListsHead(PublishedLists(database).head(), digest).covered
    except (FileNotFoundError, Unusable, CorruptMemory, ObjectNotFound):
        published = []
    if any(state_of(there.get(one.name)) != one.state for one in own):
        return False  # what nobody was to see is none of theirs
    if tokens_covered(own, there) <= tokens_covered(published, there):
        return False
    parts = (part for number in range(len(stored)) for part in stored.read([number]))
    try:
        send_lists(objects, digest, parts, lambda: [local.content.data])
    except (CorruptMemory, WrongModel):  # they are caches, and all else is published
        return False
    return True
