"""Publishing: documents of a memory are uploaded as segments, and then the next manifest names
them. Until then no reader sees any of it. Pruning removes what no manifest names any longer.

Published data is not sent again: of a document, what is published of it; of passages, the records
that an earlier version of one of the documents has, or another of the documents sent; of an
interrupted publisher, the segments that it sent.

Manifest n + 1 is written by a create that fails where there is one: the loser of a race reads the
winner's and tries again. So readers see a change whole or not at all, and none is lost.
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
    WrongModel,
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

GRACE = 24 * 3600.0  # seconds: a manifest may be about to name an object that none names yet
_COMMITS = 100  # tries
_READS = 4  # segments that are read at once

Progress = Callable[[int, int], None]
"""Takes the number of documents that are done, and of all."""


@dataclass(frozen=True)
class PublishOptions:
    """How documents are published.

    keep: "text" for no keys and values of their passages, which readers compute. replace: also
    replace published documents of these names that hold other content. check: read what is
    published of the documents, and send damaged ones again. grace: seconds, the same as for
    `prune`: objects that no manifest names are not relied on after half of it.
    """

    keep: Keep = "kv"
    replace: bool = False
    check: bool = False
    grace: float = GRACE


class Report(NamedTuple):
    """What publishing did."""

    number: int  # of the manifest that is the newest now
    documents: list[str]  # that are new in it, or changed
    there: list[str]  # that were published already, unchanged
    segments: int  # that were sent
    bytes: int  # of these


def publish(
    catalog: Catalog,
    documents: Sequence[Document],
    objects: ObjectStore,
    options: PublishOptions,
    progress: Progress = lambda done, documents: None,
) -> Report:
    """Publish ready documents of a memory.

    Raises WrongModel (another model's memory is published there), DocumentExists, InvalidInput (a
    document that changed while it was published, or that cannot be kept as text), CorruptMemory,
    StoreUnavailable, MemoryNotFound (no bucket). Whatever happens, what was published before stays.
    """
    sent = upload(catalog, documents, objects, options, progress)
    number, _ = publish_sent(objects, sent, replace=options.replace, strict=True)
    there = sorted({document.name for document in documents} - {*sent.entries})
    return Report(number, [*sent.entries], there, len(sent.sizes), sum(sent.sizes))


# Uploading


class Sent(NamedTuple):
    """Documents that are uploaded, and that no manifest names yet."""

    first: Manifest  # of the memory, without documents
    entries: dict[str, Entry]  # of new and changed documents, by name
    before: Mapping[str, Entry]  # what was published under the names of all
    sizes: list[int]  # bytes of each segment that was uploaded


def upload(
    catalog: Catalog,
    documents: Sequence[Document],
    objects: ObjectStore,
    options: PublishOptions,
    progress: Progress = lambda done, documents: None,
) -> Sent:
    """Upload what is missing of ready documents of a memory. Raises as `publish`."""
    text = options.keep == "text"
    spec = catalog.index_spec
    first = Manifest(catalog.signature.public, catalog.codec, time.time(), spec)
    newest = find_newest(objects) or first
    check_same_memory(first, newest, objects.url)
    rows: dict[str, Document] = {}
    before: dict[str, Entry] = {}
    for document in sorted(documents, key=lambda document: document.name):
        name, old = document.name, newest.entries.get(document.name)
        if text and not document.of_passages:
            raise InvalidInput(
                f"document {name!r} is not made of passages, and its keys and values cannot be "
                "computed; publish it without --keep text"
            )
        rows[name] = replace(public_row(document), bytes=0 if text else document.bytes)
        if old is not None:
            before[name] = old
            if not options.replace and old.row.write != document.write:
                raise DocumentExists.published(name, objects.url)
    bad = _damaged(objects, before.values()) if options.check else set()
    usable = {  # whose content is published, whatever else their rows say
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
    entries |= {name: old for name, old in usable.items() if old.row != rows[name]}
    entries = {name: entries[name]._replace(row=rows[name]) for name in sorted(entries)}
    return Sent(first, entries, before, segments.sent)


def _damaged(objects: ObjectStore, entries: Iterable[Entry]) -> set[str]:
    """The damaged or missing segments of published documents."""
    names = sorted({name for entry in entries for name in entry.objects})
    whole = at_once(partial(is_whole, objects), names, _READS)
    return {name for name, good in zip(names, whole) if not good}


class _PassageWriter(DocumentWriter):
    """Writes documents without the passages that are published already."""

    def __init__(self, objects: ObjectStore, segments: SegmentWriter, bad: set[str]) -> None:
        """bad: damaged segments."""
        super().__init__(segments.append)
        self._objects, self._bad = objects, bad
        self.unlearned: list[Entry] = []  # that may have passages of the documents

    def is_new(self, passage: StoredPassage) -> bool:
        """Is a passage neither published nor written now?"""
        if passage.digest not in self.passages and passage.references > 1:
            others, self.unlearned = self.unlearned, []
            self.learn(others)
        return passage.digest not in self.passages

    def learn(self, entries: Iterable[Entry]) -> None:
        """Look up the passages of published documents. Raises CorruptMemory, StoreUnavailable."""
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


def check_same_memory(first: Manifest, newest: Manifest, url: str) -> None:
    """Is a manifest of this model and selector? Raises WrongModel."""
    elsewhere = "publish to another prefix"
    first.signature.check_same(newest.signature, url, elsewhere)
    if newest.selector != first.selector:
        raise WrongModel(f"{url} holds documents that are found by another selector; {elsewhere}")


# The next manifest


def publish_sent(
    objects: ObjectStore, sent: Sent, *, replace: bool, strict: bool = False
) -> tuple[int, list[str]]:
    """Write the manifest that is the union of the newest and of uploaded documents; return the
    number of the newest manifest, and the names under which others published other content since.

    replace: also replace what others published since. strict: raise DocumentExists for such a name,
    and publish nothing. Raises WrongModel, StoreUnavailable (also where another process
    pruned what was uploaded).
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

    Readers of an earlier manifest continue with it until `prune` removes what it names. Raises
    DocumentNotFound, MemoryNotFound, StoreUnavailable.
    """

    def change(newest: Manifest) -> Change:
        missing = [name for name in names if name not in newest.entries]
        if missing:
            raise DocumentNotFound(f"no document {missing[0]!r} is published at {objects.url}")
        return Change(dict.fromkeys(names))

    return commit(objects, change).number


class Change(NamedTuple):
    """What a publisher wants of the next manifest."""

    entries: Mapping[str, Entry | None]  # by name; None for one that goes
    lists: list[Place] | None = None  # in place of those there are


def commit(
    objects: ObjectStore, change: Callable[[Manifest], Change | None], first: Manifest | None = None
) -> Manifest:
    """Write the next manifest; return the newest.

    change: takes the newest manifest, and returns what changes, or None where nothing does; called
    again where another publisher was faster. first: stands for the newest where nothing is
    published.

    Raises StoreUnavailable (the publication then has all of the change, or none), MemoryNotFound
    (nothing is published, and there is no `first`), WrongModel, and what `change` raises.
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
        named = {name for entry in new for name in entry.objects}
        if not are_there(objects, named - newest.segments):
            raise StoreUnavailable(
                f"{objects.url}: another process pruned what was sent; give the same command again"
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
        # a repeated create whose first answer was lost finds its own
        if created or read_manifest(objects, manifest.number).id == manifest.id:
            return manifest
    raise StoreUnavailable(f"{objects.url}: {_COMMITS} others published at once; try again")


# Garbage collection


class Pruned(NamedTuple):
    """What was removed."""

    manifests: int
    objects: int  # segments, lists
    bytes: int  # of all of these


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
    named = newest.objects
    for number in sorted(manifests):
        if oldest <= number < newest.number:
            with suppress(ObjectNotFound):  # another process prunes, too
                named |= read_manifest(objects, number).objects
    old = [found for number, found in manifests.items() if number < oldest]
    gone = [found for found in listed if found.name not in named and found.modified < before]
    # Manifests first, so that none names an object that is gone.
    objects.delete([found.name for found in old])
    objects.delete([found.name for found in gone])
    return Pruned(len(old), len(gone), sum(found.size for found in (*old, *gone)))
