"""What passages of a published memory are found by in two stages (memstore.index.passage_files), as
objects: a head, and the parts in objects of some 32 MB, none of which is cut.

    lists/ and a random number    each of them
"""

import os
from typing import Annotated, NamedTuple

from msgspec import Meta

from memstore.decode import Positive
from memstore.share.format.document_pages import Name
from memstore.share.format.pieces import Digest
from memstore.share.objects.sizes import OBJECT_BYTES

LISTS = "lists"


class PartsRef(NamedTuple):
    """An object of parts, which follow those of the one before."""

    name: Name
    size: Positive  # bytes


class ListsRef(NamedTuple):
    """Where they are."""

    head: Name
    size: Annotated[int, Meta(ge=1, le=OBJECT_BYTES)]  # bytes of the head
    digest: Digest  # XXH3-64 of it
    parts: list[PartsRef]

    @property
    def names(self) -> set[str]:
        """All objects."""
        return {self.head, *(part.name for part in self.parts)}


def new_name() -> str:
    """For an object of them."""
    return f"{LISTS}/{os.urandom(16).hex()}"
