"""Writing the next manifest of a published memory.

A change writes the pages that it touches, then manifest n + 1, by a create that fails where there
is one: the loser of a race reads the winner's and tries again. So readers see a change whole or not
at all, and none is lost.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from memstore.disk.format.index_spec import IndexSpec
from memstore.errors import CorruptMemory, StoreUnavailable
from memstore.share.format.document_pages import PAGE_ENTRIES, Entry, PageRef, write_pages
from memstore.share.format.lists import ListsRef
from memstore.share.format.manifest import Manifest, manifest_name, read_manifest
from memstore.share.format.published import Published
from memstore.share.format.rollback import note_newest
from memstore.share.objects.object_store import ObjectStore

_TRIES = 100


class Change(NamedTuple):
    """What a publisher wants of the next manifest."""

    entries: Mapping[str, Entry | None]  # by name; None for one that goes
    selector: IndexSpec | None = None
    new_selector: bool = False  # what was found by the old one is not found by its lists any more
    lists: ListsRef | None = None  # in place of those there are


def commit(
    objects: ObjectStore, change: Callable[[Published | None], tuple[Manifest, Change] | None]
) -> Published | None:
    """Write the next manifest.

    change: what the newest is to become: told the newest (None where there is none), it returns the
    manifest to begin from and what changes, or None where nothing does; asked again where another
    publisher was faster. Return the newest.

    Raises StoreUnavailable; the memory is then as it was, or has all of the change.
    """
    for _ in range(_TRIES):
        newest = Published.newest(objects)
        wanted = change(newest)
        if wanted is None:
            return newest
        base, changes = wanted
        pages = _changed_pages(objects, newest, changes.entries)
        form = changes.selector if changes.new_selector else base.selector
        lists = changes.lists or (None if changes.new_selector else base.lists)
        manifest = replace(
            base,
            number=1 if newest is None else newest.manifest.number + 1,
            id=os.urandom(16),
            published=time.time(),
            selector=form,
            pages=tuple(pages),
            lists=lists,
        )
        if _create(objects, manifest):
            published = Published(objects, manifest)
            note_newest(objects.identity, published.seen, anew=manifest.number == 1)
            return published
    raise StoreUnavailable(
        f"{objects.url}: {_TRIES} others published meanwhile, one after the other; try again"
    )


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
