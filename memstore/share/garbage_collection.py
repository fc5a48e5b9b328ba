"""Garbage collection: removes superseded manifests, and segments, pages and lists that no remaining
or staged manifest names.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from memstore.errors import ObjectNotFound
from memstore.share.calls import at_once
from memstore.share.manifest import LISTS, MANIFESTS, PAGES, Entry, manifest_name, manifest_number
from memstore.share.manifest_commit import STAGED, read_staged
from memstore.share.object_store import Found, ObjectStore
from memstore.share.published import Published
from memstore.share.segments import FOLDER

GRACE = 24 * 3600.0  # seconds: a manifest may be about to name an object that none names yet


class Pruned(NamedTuple):
    """What was removed."""

    manifests: int
    objects: int  # segments, pages, lists, and what was staged
    bytes: int  # of all of these
    leftovers: int  # half-written files in a directory


def prune(objects: ObjectStore, *, grace: float = GRACE) -> Pruned:
    """Remove what was not needed for `grace` seconds: publishing must not take longer, and readers
    of an older manifest have as long.

    A manifest and what it names are needed until a newer one is that old; what is staged, until
    nothing was staged for so long. Raises MemoryNotFound (nothing is published or staged),
    StoreUnavailable, CorruptMemory (a needed manifest or page is damaged; nothing is removed).
    """
    before = time.time() - grace
    # Listed before the manifests are read: a later manifest names only objects that are sent later,
    # or that an earlier manifest names, too.
    listed_objects = [found for folder in (FOLDER, PAGES, LISTS) for found in objects.names(folder)]
    staged = list(objects.names(STAGED))  # before the manifests, one of which may publish it
    ever_staged = bool(staged)
    if not any(found.modified >= before for found in staged):
        listed_objects += staged  # abandoned
        staged = []
    named = _staged(objects, staged)
    listed: dict[int, Found] = {}
    for found in objects.names(MANIFESTS):
        with suppress(ValueError):  # an unknown object stays
            listed[manifest_number(found.name)] = found
    # An abandoned ingest may have staged documents where nothing was ever published.
    newest = Published.newest(objects) if ever_staged else Published.open(objects)
    old: list[int] = []
    if newest is not None:
        old = _followed(listed, newest, before)
        named |= _named_by(
            objects, newest, [number for number in sorted(listed) if number not in old]
        )
    gone = [
        found for found in listed_objects if found.name not in named and found.modified < before
    ]
    manifests = [listed[number] for number in old]
    # Manifests first, so that none names an object that is gone.
    objects.delete([manifest_name(number) for number in old])
    objects.delete([found.name for found in gone])
    return Pruned(len(old), len(gone), _bytes([*manifests, *gone]), objects.sweep(grace))


def _followed(listed: Mapping[int, Found], newest: Published, before: float) -> list[int]:
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


def _staged(objects: ObjectStore, found: Iterable[Found]) -> set[str]:
    """The objects that staged manifests name."""

    def named(name: str) -> set[str]:
        try:
            return _named(read_staged(objects, name))
        except ObjectNotFound:
            return set()  # published by now; a manifest names its objects

    return set().union(*at_once(named, [each.name for each in found]))


def _named(published: Published, known: set[str] | None = None) -> set[str]:
    """The objects that a manifest names, without those of known pages, which are not read."""
    pages = [page for page in published.manifest.pages if page.name not in (known or ())]
    entries: list[Entry] = []
    for read in at_once(published.read, pages):
        entries += read
    if known is not None:
        known |= {page.name for page in pages}
    lists = published.manifest.lists
    named = set() if lists is None else lists.names
    return named.union(
        (page.name for page in pages), (p.segment for entry in entries for p in entry.pieces)
    )


def _bytes(found: Iterable[Found]) -> int:
    return sum(each.size for each in found)
