"""Removing what a published memory no longer names: manifests that were followed by others, and the
segments, pages and lists that none of those that are left names, nor what is staged for the next.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from memstore.errors import ObjectNotFound
from memstore.share.format.document_pages import PAGES, Entry
from memstore.share.format.manifest import LISTS, MANIFESTS, manifest_name, manifest_number
from memstore.share.format.published import Published
from memstore.share.format.segments import FOLDER
from memstore.share.objects.daemon_threads import at_once
from memstore.share.objects.object_store import Found, ObjectStore
from memstore.share.publish.manifest_commit import STAGED, read_staged

GRACE = 24 * 3600.0  # seconds that what no manifest names is kept: a publisher may be about to


class Pruned(NamedTuple):
    """What was removed."""

    manifests: int
    objects: int  # segments, pages, lists, and what was staged
    bytes: int  # of all of these
    leftovers: int  # half-written files of a directory


def prune(objects: ObjectStore, *, grace: float = GRACE) -> Pruned:
    """Remove what nobody has needed for `grace` seconds: publishing must not take longer, and
    readers of an older manifest have as long.

    A manifest is needed until another has followed it for so long, and so is what it names; what is
    staged, until nothing has been staged for so long.
    Raises MemoryNotFound (nothing is published, nor staged), StoreUnavailable, CorruptMemory (a
    manifest that is needed, or a page of it, is damaged: then nothing is removed).
    """
    before = time.time() - grace
    # Listed before the manifests are read: what a later manifest names was sent later, or is named
    # by an earlier one, too.
    listed_objects = [found for folder in (FOLDER, PAGES, LISTS) for found in objects.names(folder)]
    staged = list(objects.names(STAGED))  # before the manifests, by one of which it may be followed
    ever_staged = bool(staged)
    if not any(found.modified >= before for found in staged):
        listed_objects += staged  # nobody has gone on for so long
        staged = []
    named = _staged(objects, staged)
    listed: dict[int, Found] = {}
    for found in objects.names(MANIFESTS):
        with suppress(ValueError):  # another's object stays where it is
            listed[manifest_number(found.name)] = found
    # an ingest that nobody goes on with may have staged what no manifest ever followed
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
    objects.delete([manifest_name(number) for number in old])  # first, so that none names what goes
    objects.delete([found.name for found in gone])
    return Pruned(len(old), len(gone), _bytes([*manifests, *gone]), objects.sweep(grace))


def _followed(listed: Mapping[int, Found], newest: Published, before: float) -> list[int]:
    """The manifests that have been followed by another for so long."""
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
                continue  # another removes at the same time
    return named


def _staged(objects: ObjectStore, found: Iterable[Found]) -> set[str]:
    """The objects that staged manifests name."""

    def named(name: str) -> set[str]:
        try:
            return _named(read_staged(objects, name))
        except ObjectNotFound:
            return set()  # it was published, and is named by that manifest

    return set().union(*at_once(named, [each.name for each in found]))


def _named(published: Published, known: set[str] | None = None) -> set[str]:
    """The objects that a manifest names; pages that are known are not read, and not named again."""
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
