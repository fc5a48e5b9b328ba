"""Garbage collection: removes superseded manifests, and segments and lists that no remaining
manifest names.
"""

import time
from contextlib import suppress
from typing import NamedTuple

from memstore.errors import ObjectNotFound
from memstore.share.manifest import (
    LISTS,
    MANIFESTS,
    Manifest,
    manifest_number,
    read_manifest,
    read_newest,
)
from memstore.share.object_store import Found, ObjectStore
from memstore.share.segments import FOLDER

GRACE = 24 * 3600.0  # seconds: a manifest may be about to name an object that none names yet


class Pruned(NamedTuple):
    """What was removed."""

    manifests: int
    objects: int  # segments, lists
    bytes: int  # of all of these
    leftovers: int  # half-written files in a directory


def prune(objects: ObjectStore, *, grace: float = GRACE) -> Pruned:
    """Remove what was not needed for `grace` seconds: publishing must not take longer, and readers
    of an older manifest have as long.

    A manifest and what it names are needed until a newer one is that old. Raises MemoryNotFound
    (nothing is published), StoreUnavailable, CorruptMemory (a needed manifest is damaged; nothing
    is removed).
    """
    before = time.time() - grace
    # Listed before the manifests are read: a later manifest names only objects that are sent later,
    # or that an earlier manifest names, too.
    listed = [found for folder in (FOLDER, LISTS) for found in objects.names(folder)]
    manifests: dict[int, Found] = {}
    for found in objects.names(MANIFESTS):
        with suppress(ValueError):  # an unknown object stays
            manifests[manifest_number(found.name)] = found
    newest = read_newest(objects)
    # of all before this one, a newer one is old enough
    oldest = max(
        (number for number, found in manifests.items() if found.modified < before), default=0
    )
    oldest = min(oldest, newest.number)
    named = _named(newest)
    for number in sorted(manifests):
        if oldest <= number < newest.number:
            with suppress(ObjectNotFound):  # another process prunes, too
                named |= _named(read_manifest(objects, number))
    old = [found for number, found in manifests.items() if number < oldest]
    gone = [found for found in listed if found.name not in named and found.modified < before]
    # Manifests first, so that none names an object that is gone.
    objects.delete([found.name for found in old])
    objects.delete([found.name for found in gone])
    size = sum(found.size for found in (*old, *gone))
    return Pruned(len(old), len(gone), size, objects.sweep(grace))


def _named(manifest: Manifest) -> set[str]:
    """The objects that a manifest names."""
    return manifest.segments | (manifest.lists.names if manifest.lists is not None else set())
