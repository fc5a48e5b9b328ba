"""Garbage collection: removes superseded manifests, and segments, pages and lists that no remaining
manifest names.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from memstore.errors import ObjectNotFound
from memstore.share.manifest import LISTS, MANIFESTS, PAGES, manifest_name, manifest_number
from memstore.share.object_store import Found, ObjectStore
from memstore.share.published import Published
from memstore.share.segments import FOLDER

GRACE = 24 * 3600.0  # seconds: a manifest may be about to name an object that none names yet


class Pruned(NamedTuple):
    """What was removed."""

    manifests: int
    objects: int  # segments, pages, lists
    bytes: int  # of all of these
    leftovers: int  # half-written files in a directory


def prune(objects: ObjectStore, *, grace: float = GRACE) -> Pruned:
    """Remove what was not needed for `grace` seconds: publishing must not take longer, and readers
    of an older manifest have as long.

    A manifest and what it names are needed until a newer one is that old. Raises MemoryNotFound
    (nothing is published), StoreUnavailable, CorruptMemory (a needed manifest or page is damaged;
    nothing is removed).
    """
    before = time.time() - grace
    # Listed before the manifests are read: a later manifest names only objects that are sent later,
    # or that an earlier manifest names, too.
    listed_objects = [found for folder in (FOLDER, PAGES, LISTS) for found in objects.names(folder)]
    listed: dict[int, Found] = {}
    for found in objects.names(MANIFESTS):
        with suppress(ValueError):  # an unknown object stays
            listed[manifest_number(found.name)] = found
    newest = Published.open(objects)
    old = _superseded(listed, newest, before)
    named = _named_by(objects, newest, [number for number in sorted(listed) if number not in old])
    gone = [
        found for found in listed_objects if found.name not in named and found.modified < before
    ]
    manifests = [listed[number] for number in old]
    # Manifests first, so that none names an object that is gone.
    objects.delete([manifest_name(number) for number in old])
    objects.delete([found.name for found in gone])
    size = sum(each.size for each in (*manifests, *gone))
    return Pruned(len(old), len(gone), size, objects.sweep(grace))


def _superseded(listed: Mapping[int, Found], newest: Published, before: float) -> list[int]:
    """The manifests that were superseded before a time."""
    return [
        number
        for number in sorted(listed)
        if number < newest.manifest.number
        and any(other > number and found.modified < before for other, found in listed.items())
    ]


def _named_by(objects: ObjectStore, newest: Published, numbers: Sequence[int]) -> set[str]:
    """The objects that the newest manifest and those before it of these numbers name."""
    named = _named(newest)
    pages = {page.name for page in newest.manifest.pages}
    for number in numbers:
        if number < newest.manifest.number:
            try:
                named |= _named(Published.at(objects, number), known=pages)
            except ObjectNotFound:
                continue  # another process prunes, too
    return named


def _named(published: Published, known: set[str] | None = None) -> set[str]:
    """The objects that a manifest names, without those of known pages, which are not read."""
    pages = [page for page in published.manifest.pages if page.name not in (known or ())]
    entries = [entry for page in published.read_pages(pages) for entry in page]
    if known is not None:
        known |= {page.name for page in pages}
    lists = published.manifest.lists
    named = set() if lists is None else lists.names
    return named.union(
        (page.name for page in pages), (p.segment for entry in entries for p in entry.pieces)
    )
