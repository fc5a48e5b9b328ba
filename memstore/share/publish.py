"""Publish documents of a memory: upload them as segments, then write a manifest that names them.
Readers see nothing before that. Pruning removes objects that no manifest names any more.

Data is not sent twice: neither published documents, nor records of passages that an earlier version
of a document or another sent document has, nor segments that an interrupted publisher sent.

Manifest n + 1 is written by a create that fails if it exists: the loser of a race reads the
winner's manifest and tries again. So readers see each change whole or not at all, and none is lost.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from memstore.disk.format.document import Document
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.texts import DIGEST_BYTES, Keep, StoredPassage
from memstore.errors import (
    DocumentExists,
    DocumentNotFound,
    InvalidInput,
    ObjectNotFound,
    StoreUnavailable,
)
from memstore.share.contents import (
    DocumentWriter,
    Draft,
    Entry,
    Place,
    Segment,
    public_row,
    read_contents,
)
from memstore.share.document_parts import Head, stored_parts
from memstore.share.manifest import (
    LISTS,
    MANIFESTS,
    Manifest,
    find_newest,
    manifest_name,
    manifest_number,
    read_manifest,
    read_newest,
)
from memstore.share.object_store import Found, ObjectStore
from memstore.share.parallel import at_once
from memstore.share.segments import FOLDER, SegmentWriter, are_there, is_whole

GRACE = 24 * 3600.0  # seconds that an object stays that no manifest names (yet)
_COMMITS = 100  # tries to write the next manifest
_READS = 4  # segments read concurrently
_ELSEWHERE = "publish to another prefix"

Progress = Callable[[int, int], None]
"""Takes the number of documents that are done, and the number of all."""


@dataclass(frozen=True)
class PublishOptions:
    """Options of publishing documents.

    keep: "text" leaves out keys and values of passages, which readers compute. replace: replace
    published documents of these names that have other content. check: read what is published of
    the documents, and send damaged objects again. grace: seconds, the same as for `prune`; objects
    that no manifest names are not reused after half of it.
    """

    keep: Keep = "kv"
    replace: bool = False
    check: bool = False
    grace: float = GRACE


class Report(NamedTuple):
    """The result of publishing."""

    number: int  # number of the newest manifest
    documents: list[str]  # new and changed documents
    there: list[str]  # documents that were published already, unchanged
    segments: int  # sent segments
    bytes: int  # bytes of sent segments


def publish(
    catalog: Catalog,
    documents: Sequence[Document],
    objects: ObjectStore,
    options: PublishOptions,
    progress: Progress = lambda done, documents: None,
) -> Report:
    """Publish ready documents of a memory.

    Raises WrongModel (another model's memory is published there), DocumentExists, InvalidInput (a
    document that changed concurrently, or that cannot be published as text), CorruptMemory,
    StoreUnavailable, MemoryNotFound (no bucket). An error leaves what is published unchanged.
    """
    sent = upload(catalog, documents, objects, options, progress)
    number, _ = publish_sent(objects, sent, replace=options.replace, strict=True)
    there = sorted({document.name for document in documents} - {*sent.entries})
    return Report(number, [*sent.entries], there, len(sent.sizes), sum(sent.sizes))


# Uploading


class Sent(NamedTuple):
    """Uploaded documents that no manifest names yet."""

    first: Manifest  # the memory's, without documents, for an empty store
    entries: dict[str, Entry]  # new and changed documents, by name
    before: Mapping[str, Entry]  # documents published under these names before
    sizes: list[int]  # bytes of each uploaded segment


def upload(
    catalog: Catalog,
    documents: Sequence[Document],
    objects: ObjectStore,
    options: PublishOptions,
    progress: Progress = lambda done, documents: None,
) -> Sent:
    """Upload the missing parts of ready documents. Raises as `publish`."""
    text = options.keep == "text"
    spec = catalog.index_spec
    first = Manifest(catalog.signature.public, catalog.codec, time.time(), spec)
    newest = find_newest(objects) or first
    first.check_same(newest, objects.url, _ELSEWHERE)
    rows: dict[str, Document] = {}
    before: dict[str, Entry] = {}
    for document in sorted(documents, key=lambda document: document.name):
        name, old = document.name, newest.entries.get(document.name)
        if text and not document.of_passages:
            raise InvalidInput(
                f"document {name!r} has no passages, so its keys and values cannot be "
                "computed; publish it without --keep text"
            )
        rows[name] = replace(public_row(document), bytes=0 if text else document.bytes)
        if old is not None:
            before[name] = old
            if not options.replace and old.row.write != document.write:
                raise DocumentExists.published(name, objects.url)
    bad = _damaged(objects, before.values()) if options.check else set()
    usable = {  # published documents with the same content, even if their rows differ
        name: old
        for name, old in before.items()
        if bad.isdisjoint(old.objects)
        and (old.row.write, old.row.bytes) == (rows[name].write, rows[name].bytes)
        and not (text and old.records)
    }
    segments = SegmentWriter(objects, options.grace)
    writer = _PassageWriter(objects, segments, bad)
    writer.learn(old for name, old in before.items() if name not in usable)
    writer.unlearned = [*usable.values()]
    missing = [document for document in documents if document.name not in usable]
    missing.sort(key=lambda document: document.name)
    drafts: list[Draft] = []
    for done, document in enumerate(missing):
        progress(done, len(missing))
        parts = stored_parts(catalog, document, None if text else writer.is_new)
        head = Head(first.signature, document, spec)
        drafts.append(writer.write(head, parts, records=not text))
    entries = {entry.row.name: entry for entry in segments.finish(drafts)}
    progress(len(missing), len(missing))
    entries |= {name: old for name, old in usable.items() if not old.row.stored_as(rows[name])}
    entries = {name: entries[name]._replace(row=rows[name]) for name in sorted(entries)}
    return Sent(first, entries, before, segments.sent)


def _damaged(objects: ObjectStore, entries: Iterable[Entry]) -> set[str]:
    """The damaged or missing segments of published documents."""
    names = sorted({name for entry in entries for name in entry.objects})
    whole = at_once(partial(is_whole, objects), names, _READS)
    return {name for name, good in zip(names, whole) if not good}


class _PassageWriter(DocumentWriter):
    """Writes documents without passages that are published already."""

    def __init__(self, objects: ObjectStore, segments: SegmentWriter, bad: set[str]) -> None:
        """bad: damaged segments."""
        super().__init__(segments.append)
        self._objects, self._bad = objects, bad
        self.unlearned: list[Entry] = []  # published documents that may share passages

    def is_new(self, passage: StoredPassage) -> bool:
        """Is a passage neither published nor written by this writer?"""
        if passage.digest not in self.passages and passage.references > 1:
            others, self.unlearned = self.unlearned, []
            self.learn(others)
        return passage.digest not in self.passages

    def learn(self, entries: Iterable[Entry]) -> None:
        """Add the passages of published documents. Raises CorruptMemory, StoreUnavailable."""
        some = [
            entry
            for entry in entries
            if entry.row.of_passages and entry.records and entry.contents.name not in self._bad
        ]

        def read(entry: Entry) -> bytes:
            return bytes(self._objects.get_range(*entry.contents.extent))

        segments: dict[str, Segment] = {}
        for entry, data in zip(some, at_once(read, some)):
            contents = read_contents(self._objects, entry, data)
            for block in range(entry.row.blocks):
                found = contents.record(block, 0)
                if found is not None and found.name not in self._bad:
                    segment = segments.setdefault(found.name, Segment(found.name))
                    digest = contents.digests[DIGEST_BYTES * block :][:DIGEST_BYTES]
                    self.passages.setdefault(digest, (segment, found.offset, found.length))


# The next manifest


def publish_sent(
    objects: ObjectStore, sent: Sent, *, replace: bool, strict: bool = False
) -> tuple[int, list[str]]:
    """Write a manifest with the newest one's documents and the uploaded ones; return its number,
    and the names under which others concurrently published other content.

    replace: replace that content, too. strict: raise DocumentExists for such a name, and publish
    nothing. Raises WrongModel, StoreUnavailable (also if another process pruned uploaded objects).
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
        if refused and strict:
            raise DocumentExists.published(refused[0], objects.url)
        return Change(new) if new or not newest.number else None

    return commit(objects, change, sent.first).number, refused


def unpublish(objects: ObjectStore, names: Sequence[str]) -> int:
    """Remove documents from a publication; return the number of its newest manifest.

    Readers of an earlier manifest can use the documents until `prune`. Raises DocumentNotFound,
    MemoryNotFound, StoreUnavailable.
    """

    def change(newest: Manifest) -> Change:
        missing = [name for name in names if name not in newest.entries]
        if missing:
            raise DocumentNotFound(f"no document {missing[0]!r} is published at {objects.url}")
        return Change(dict.fromkeys(names))

    return commit(objects, change).number


class Change(NamedTuple):
    """Changes for the next manifest."""

    entries: Mapping[str, Entry | None]  # by name; None removes a document
    lists: list[Place] | None = None  # new lists; None leaves them unchanged


def commit(
    objects: ObjectStore, change: Callable[[Manifest], Change | None], first: Manifest | None = None
) -> Manifest:
    """Write the next manifest; return the newest.

    change: takes the newest manifest, and returns its changes, or None for no change; called again
    if another publisher was faster. first: the manifest to start from if nothing is published.

    Raises StoreUnavailable (the publication then has all of the change, or none of it),
    MemoryNotFound (nothing is published, without `first`), WrongModel, and what `change` raises.
    """
    for _ in range(_COMMITS):
        newest = (find_newest(objects) or first) if first is not None else read_newest(objects)
        assert newest is not None
        if first is not None:
            first.check_same(newest, objects.url, _ELSEWHERE)
        wanted = change(newest)
        if wanted is None:
            return newest
        new = [entry for entry in wanted.entries.values() if entry is not None]
        named = {name for entry in new for name in entry.objects}
        if not are_there(objects, named - newest.segments):
            raise StoreUnavailable(
                f"{objects.url}: another process pruned the uploaded objects; run the command again"
            )
        entries = {**newest.entries, **wanted.entries}
        manifest = replace(
            newest,
            entries={name: entry for name, entry in sorted(entries.items()) if entry is not None},
            lists=newest.lists if wanted.lists is None else wanted.lists,
            number=newest.number + 1,
            id=os.urandom(16),
        )
        created = objects.create(manifest_name(manifest.number), manifest.encode())
        # a retried create whose first response was lost finds its own manifest
        if created or read_manifest(objects, manifest.number).id == manifest.id:
            return manifest
    raise StoreUnavailable(f"{objects.url}: others published first {_COMMITS} times; try again")


# Garbage collection


class Pruned(NamedTuple):
    """Counts of removed objects."""

    manifests: int
    objects: int  # segments and lists
    bytes: int  # bytes of all removed objects


def prune(objects: ObjectStore, *, grace: float = GRACE) -> Pruned:
    """Remove objects that were unused for `grace` seconds. Publishing must take less time, and
    readers can use an older manifest for as long.

    A manifest and its objects are in use until a newer manifest is older than `grace`. Raises
    MemoryNotFound (nothing is published), StoreUnavailable, CorruptMemory (a manifest in use is
    damaged; nothing is removed).
    """
    before = time.time() - grace
    # listed before the manifests are read: a later manifest names only objects that are sent later
    # or that an earlier manifest also names
    listed = [found for folder in (FOLDER, LISTS) for found in objects.names(folder)]
    manifests: dict[int, Found] = {}
    for found in objects.names(MANIFESTS):
        with suppress(ValueError):  # keep unknown objects
            manifests[manifest_number(found.name)] = found
    newest = read_newest(objects)
    # every manifest before this one has a newer one that is old enough
    oldest = max(
        (number for number, found in manifests.items() if found.modified < before), default=0
    )
    oldest = min(oldest, newest.number)
    named = newest.objects
    for number in sorted(manifests):
        if oldest <= number < newest.number:
            with suppress(ObjectNotFound):  # pruned by another process
                named |= read_manifest(objects, number).objects
    old = [found for number, found in manifests.items() if number < oldest]
    gone = [found for found in listed if found.name not in named and found.modified < before]
    # manifests first, so that none names a deleted object
    objects.delete([found.name for found in old])
    objects.delete([found.name for found in gone])
    return Pruned(len(old), len(gone), sum(found.size for found in (*old, *gone)))
