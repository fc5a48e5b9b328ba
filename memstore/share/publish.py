"""Publishing: documents of a memory are uploaded as segments, and then the next manifest names
them. Until then no reader sees any of it.

Published data is not sent again: of a document, what is published of it; of passages, the records
that an earlier version of one of the documents has, or another of the documents sent; of an
interrupted publisher, the segments that it sent.

Manifest n + 1 is written by a create that fails where there is one: the loser of a race reads the
winner's and tries again. So readers see a change whole or not at all, and none is lost.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from memstore.disk.format.document import Document
from memstore.disk.tables.catalog import Catalog
from memstore.errors import DocumentNotFound, StoreUnavailable
from memstore.share.manifest import (
    ListsRef,
    Manifest,
    find_newest,
    manifest_name,
    read_manifest,
    read_newest,
    segments_of,
)
from memstore.share.newest_seen import note_newest
from memstore.share.object_store import ObjectStore
from memstore.share.pieces import Entry
from memstore.share.segments import are_there
from memstore.share.upload import Progress, PublishOptions, Sent, Upload, check_same_memory

_TRIES, _COMMITS = 20, 100


class Report(NamedTuple):
    """What publishing did."""

    number: int  # of the manifest that is the newest now
    documents: list[str]  # that are new in it, or changed
    there: list[str]  # that were published already, unchanged
    segments: int  # that were sent
    bytes: int  # of these


_USUAL = PublishOptions()


def publish(
    catalog: Catalog,
    documents: Sequence[Document],
    objects: ObjectStore,
    options: PublishOptions = _USUAL,
    progress: Progress = lambda done, documents: None,
) -> Report:
    """Publish ready documents of a memory.

    Raises WrongModel (another model's memory is published there), DocumentExists, InvalidInput (a
    document that changed while it was published, or that cannot be kept as text), CorruptMemory,
    StoreUnavailable, MemoryNotFound (no bucket). Whatever happens, what was published before stays.
    """
    names = {document.name for document in documents}
    for _ in range(_TRIES):  # a later try finds again what an earlier one sent
        sent = Upload(catalog, documents, objects, options).send(progress)

        def change(newest: Manifest, sent: Sent = sent) -> Change | None:
            if {name: newest.entries[name] for name in names & {*newest.entries}} != sent.before:
                raise Changed
            return Change(sent.entries) if sent.entries or not newest.number else None

        try:
            newest = commit(objects, change, sent.first)
        except Changed:
            continue
        there = sorted(names - {*sent.entries})
        return Report(newest.number, [*sent.entries], there, len(sent.sizes), sum(sent.sizes))
    raise StoreUnavailable(f"{objects.url}: others keep changing what is published; try again")


def publish_sent(objects: ObjectStore, sent: Sent, *, replace: bool) -> tuple[int, list[str]]:
    """Write the manifest that is the union of the newest and of documents that other processes
    uploaded; return the number of the newest manifest, and the names under which others published
    other content since.

    replace: also replace what others published since. Raises WrongModel, StoreUnavailable (another
    process pruned what was uploaded: ingest again).
    """
    refused: list[str] = []

    def change(newest: Manifest) -> Change | None:
        refused.clear()
        new: dict[str, Entry | None] = {}
        for name, entry in sent.entries.items():
            now = newest.entries.get(name)
            if replace or now is None or now == sent.before.get(name):
                new[name] = entry
            elif now.row.source_hash != entry.row.source_hash:
                refused.append(name)
        return Change(new) if new else None

    try:
        return commit(objects, change, sent.first).number, refused
    except Changed:
        raise StoreUnavailable(
            f"{objects.url}: another process pruned what was ingested; give the same command again"
        ) from None


def unpublish(objects: ObjectStore, names: Sequence[str]) -> int:
    """Remove documents from a publication; return the number of its newest manifest.

    Readers of an earlier manifest continue with it until `prune` removes what it names. Raises
    DocumentNotFound, MemoryNotFound, StoreUnavailable.
    """

    def change(newest: Manifest) -> Change:
        missing = [name for name in names if name not in newest.entries]
        if missing:
            raise DocumentNotFound(f"no document {missing[0]!r} is published at {objects.url}")
        return Change(dict.fromkeys(names))

    return commit(objects, change).number


# The next manifest


class Change(NamedTuple):
    """What a publisher wants of the next manifest."""

    entries: Mapping[str, Entry | None]  # by name; None for one that goes
    lists: ListsRef | None = None  # in place of those there are


class Changed(Exception):
    """Another process changed a document, or pruned what was to be published."""


def commit(
    objects: ObjectStore, change: Callable[[Manifest], Change | None], first: Manifest | None = None
) -> Manifest:
    """Write the next manifest; return the newest.

    change: takes the newest manifest, and returns what changes, or None where nothing does; called
    again where another publisher was faster. first: stands for the newest where nothing is
    published.

    Raises StoreUnavailable (the publication then has all of the change, or none), MemoryNotFound
    (nothing is published, and there is no `first`), WrongModel, Changed, and what `change` raises.
    """
    for _ in range(_COMMITS):
        newest = (find_newest(objects) or first) if first is not None else read_newest(objects)
        assert newest is not None
        if first is not None:
            check_same_memory(first, newest, objects.url)
        wanted = change(newest)
        if wanted is None:
            return newest
        new = [entry for entry in wanted.entries.values() if entry is not None]
        if not are_there(objects, segments_of(new) - newest.segments):
            raise Changed
        entries = {**newest.entries, **wanted.entries}
        manifest = replace(
            newest,
            entries={name: entry for name, entry in sorted(entries.items()) if entry is not None},
            lists=wanted.lists or newest.lists,
            number=newest.number + 1,
            id=os.urandom(16),
            published=time.time(),
        )
        created = objects.create(manifest_name(manifest.number), manifest.encode())
        # a repeated create whose first answer was lost finds its own
        if created or read_manifest(objects, manifest.number).id == manifest.id:
            note_newest(objects.identity, manifest.seen, reset=manifest.number == 1)
            return manifest
    raise StoreUnavailable(f"{objects.url}: {_COMMITS} others published at once; try again")
