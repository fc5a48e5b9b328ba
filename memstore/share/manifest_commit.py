"""Writing the next manifest of a publication, and manifests of documents that wait for it.

A change writes the pages that it touches, then manifest n + 1, by a create that fails where there
is one: the loser of a race reads the winner's and tries again. So readers see a change whole or not
at all, and none is lost.

Documents that several processes sent wait, staged, for the manifest that publishes all of them: of
each batch a manifest of its own, `staged/KEY`, which no reader looks for.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from memstore.errors import CorruptMemory, StoreUnavailable
from memstore.share.manifest import (
    PAGE_ENTRIES,
    Entry,
    ListsRef,
    Manifest,
    PageRef,
    manifest_name,
    read_manifest,
    write_pages,
)
from memstore.share.object_store import ObjectStore
from memstore.share.packed_objects import PACKED_BYTES
from memstore.share.published import Published, note_newest

STAGED = "staged"
_TRIES = 100


class Change(NamedTuple):
    """What a publisher wants of the next manifest."""

    entries: Mapping[str, Entry | None]  # by name; None for one that goes
    lists: ListsRef | None = None  # in place of those there are


def commit(
    objects: ObjectStore, change: Callable[[Published | None], tuple[Manifest, Change] | None]
) -> Published | None:
    """Write the next manifest.

    change: takes the newest (None where there is none), and returns the manifest to begin from and
    what changes, or None where nothing does; called again where another publisher was faster.
    Return the newest.

    Raises StoreUnavailable; the publication then has all of the change, or none.
    """
    for _ in range(_TRIES):
        newest = Published.newest(objects)
        wanted = change(newest)
        if wanted is None:
            return newest
        base, changes = wanted
        pages = _changed_pages(objects, newest, changes.entries)
        manifest = replace(
            base,
            number=1 if newest is None else newest.manifest.number + 1,
            id=os.urandom(16),
            published=time.time(),
            pages=tuple(pages),
            lists=changes.lists or base.lists,
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
    """The pages of the table with these documents in it, or out of it; writes those that are
    new.
    """
    old = () if newest is None else newest.manifest.pages
    touched: dict[int, dict[str, Entry | None]] = {}
    for name, entry in changes.items():
        number = 0 if newest is None else max(0, newest.page_of(name))
        touched.setdefault(number, {})[name] = entry
    pages: list[PageRef] = []
    carried: dict[str, Entry] = {}  # of pages that became small: the next takes them in
    if newest is not None:
        newest.entries([old[number].first for number in touched if number < len(old)])
    for number in range(max(len(old), 1)):
        mine = touched.get(number)
        if mine is None and not carried:
            if number < len(old):
                pages.append(old[number])
            continue
        held = dict(carried)
        if newest is not None and number < len(old):
            held |= {entry.row.name: entry for entry in newest.read(old[number])}
        for name, entry in (mine or {}).items():
            if entry is None:
                held.pop(name, None)
            else:
                held[name] = entry
        carried = {}
        if len(held) < PAGE_ENTRIES // 4 and number + 1 < len(old):
            carried = held
            continue
        pages += write_pages(objects, [held[name] for name in sorted(held)])
    return pages


def write_staged(objects: ObjectStore, key: str, first: Manifest, entries: Sequence[Entry]) -> str:
    """Stage documents, in order of names; return the object. first: has their signature, codec and
    selector. Raises StoreUnavailable.
    """
    pages = tuple(write_pages(objects, entries))
    name = f"{STAGED}/{key}"
    made = replace(first, number=1, id=os.urandom(16), published=time.time(), pages=pages)
    objects.put(name, made.encode())
    return name


def read_staged(objects: ObjectStore, name: str) -> Published:
    """The documents that an object stages. Raises ObjectNotFound, CorruptMemory, NewerFormat,
    StoreUnavailable.
    """
    data = objects.get(name, PACKED_BYTES)
    return Published(objects, Manifest.decode(data, f"{objects.url}: {name}"))
