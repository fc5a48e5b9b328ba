"""Writing the next manifest of a publication.

A change writes the pages that it touches, then manifest n + 1, by a create that fails where there
is one: the loser of a race reads the winner's and tries again. So readers see a change whole or not
at all, and none is lost.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from memstore.errors import CorruptMemory, StoreUnavailable
from memstore.share.entries import Entry
from memstore.share.manifest import (
    ListsRef,
    Manifest,
    PageRef,
    manifest_name,
    read_manifest,
    write_pages,
)
from memstore.share.object_store import ObjectStore
from memstore.share.published import Published, note_newest

_TRIES = 100


class Change(NamedTuple):
    """What a publisher wants of the next manifest."""

    entries: Mapping[str, Entry | None]  # by name; None for one that goes
    lists: ListsRef | None = None  # in place of those there are


def commit(
    objects: ObjectStore,
    change: Callable[[Published | None], Change | None],
    first: Manifest | None = None,
) -> Published | None:
    """Write the next manifest; return the newest, or None where there is none.

    change: takes the newest, and returns what changes, or None where nothing does; called again
    where another publisher was faster. first: what the first manifest would be.

    Raises StoreUnavailable (the publication then has all of the change, or none), MemoryNotFound
    (nothing is published, and there is no `first`), and what `change` raises.
    """
    for _ in range(_TRIES):
        newest = Published.newest(objects) if first is not None else Published.open(objects)
        wanted = change(newest)
        if wanted is None:
            return newest
        base = first if newest is None else newest.manifest
        assert base is not None
        manifest = replace(
            base,
            number=1 if newest is None else base.number + 1,
            id=os.urandom(16),
            published=time.time(),
            pages=tuple(_changed_pages(objects, newest, wanted.entries)),
            lists=wanted.lists or base.lists,
        )
        if _create(objects, manifest):
            published = Published(objects, manifest)
            note_newest(objects.identity, published.seen, reset=manifest.number == 1)
            return published
    raise StoreUnavailable(f"{objects.url}: {_TRIES} others published at the same time; try again")


def _create(objects: ObjectStore, manifest: Manifest) -> bool:
    """Write a manifest; False where another has its number.

    A create whose answer was lost may have been done: then its own is there.
    """
    name = manifest_name(manifest.number)
    try:
        if objects.create(name, manifest.encode()):
            return True
    except StoreUnavailable:
        try:
            if read_manifest(objects, manifest.number).id == manifest.id:
                return True
        except (StoreUnavailable, CorruptMemory):
            pass
        raise
    return read_manifest(objects, manifest.number).id == manifest.id


def _changed_pages(
    objects: ObjectStore, newest: Published | None, changes: Mapping[str, Entry | None]
) -> list[PageRef]:
    """The pages of the table with these documents in it, or out of it; writes changed ones."""
    old = () if newest is None else newest.manifest.pages
    touched: dict[int, dict[str, Entry | None]] = {}
    for name, entry in changes.items():
        number = 0 if newest is None else max(0, newest.page_of(name))
        touched.setdefault(number, {})[name] = entry
    if newest is not None:  # all at the same time
        newest.read_pages([old[number] for number in touched if number < len(old)])
    pages: list[PageRef] = []
    for number in range(max(len(old), 1)):
        if number not in touched:
            pages += old[number : number + 1]
            continue
        entries: dict[str, Entry | None] = {}
        if newest is not None and old:
            entries = {e.row.name: e for e in newest.read_pages([old[number]])[0]}
        entries |= touched[number]
        pages += write_pages(objects, [e for _, e in sorted(entries.items()) if e is not None])
    return pages
