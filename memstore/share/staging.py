"""Publishing by several processes: each uploads and stages its documents, and one process writes
the manifest that names all of them.

A process that continues finds what is staged; readers do not see it. It stays while any process
stages there: see `prune`.
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from memstore.disk.format.document import Document
from memstore.disk.tables.catalog import Catalog
from memstore.errors import ObjectNotFound, StoreUnavailable
from memstore.share.calls import at_once
from memstore.share.garbage_collection import GRACE
from memstore.share.manifest import Entry, Manifest
from memstore.share.manifest_commit import STAGED, Change, commit, read_staged, write_staged
from memstore.share.object_store import ObjectStore
from memstore.share.publish import PublishOptions, check_form, send_ahead
from memstore.share.published import Published
from memstore.share.segments import FOLDER

_RENEWED = 0.25  # of the grace period: the age at which the latest staged object is renewed


class Staged(NamedTuple):
    """The contents of a staged object."""

    name: str
    entries: dict[str, Entry]  # by name
    pages: list[str]  # objects


class Outcome(NamedTuple):
    """The result of publishing staged documents."""

    number: int  # of the newest manifest
    published: list[str]  # documents that are new in it, or changed
    refused: list[str]  # under whose names others published other content


def stage(
    catalog: Catalog,
    documents: Sequence[Document],
    objects: ObjectStore,
    key: str,
    options: PublishOptions,
) -> str:
    """Upload documents of a memory and stage them; return the object, `staged/KEY`. Raises as
    `publish` does.
    """
    first, entries = send_ahead(catalog, documents, objects, options)
    return write_staged(objects, key, first, entries)


def find_staged(objects: ObjectStore, like: Manifest, *, grace: float = GRACE) -> list[Staged]:
    """Complete staged documents of this signature, selector and codec; renews them, so that they
    stay. Raises CorruptMemory, StoreUnavailable.
    """
    found = list(objects.names(STAGED))
    if not found:
        return []
    latest = max(found, key=lambda each: each.modified)
    if latest.modified < time.time() - _RENEWED * grace:
        objects.put(latest.name, bytes(objects.get(latest.name)))
    return read_all(objects, like, [each.name for each in found])


def read_all(objects: ObjectStore, like: Manifest, names: Sequence[str]) -> list[Staged]:
    """The same of these objects; missing ones are passed over."""
    segments = {each.name for each in objects.names(FOLDER)}

    def read(name: str) -> Staged | None:
        try:
            held = read_staged(objects, name)
            if _form(held.manifest) != _form(like):
                return None
            whole = {
                entry.row.name: entry
                for entry in held.documents()
                if all(piece.segment in segments for piece in entry.pieces)
            }
        except ObjectNotFound:
            return None
        return Staged(name, whole, [page.name for page in held.manifest.pages])

    return [held for held in at_once(read, names) if held is not None]


def publish_staged(
    objects: ObjectStore,
    first: Manifest,
    wanted: Mapping[str, str],
    staged: Mapping[str, Entry],
    before: Mapping[str, Entry],
    *,
    replace: bool,
) -> Outcome:
    """Write the manifest that names staged documents, if there are any.

    wanted: the digests of their texts, by name. staged: their entries. before: what was published
    under their names when they were ingested. replace: also replace what others published since.
    Raises WrongModel, StoreUnavailable (another process pruned what was staged: ingest again).
    """
    new: dict[str, Entry | None] = {}
    refused: list[str] = []

    def change(newest: Published | None) -> tuple[Manifest, Change] | None:
        check_form(first, newest, objects.url)
        there = {} if newest is None else newest.entries(list(wanted))
        new.clear()
        refused.clear()
        segments = {found.name for found in objects.names(FOLDER)} if staged else set()
        for name, digest in wanted.items():
            entry, now = staged.get(name), there.get(name)
            others = now is not None and now != before.get(name)
            if entry is not None and (replace or not others):
                if not {piece.segment for piece in entry.pieces} <= segments:
                    raise _pruned(objects)
                new[name] = entry
            elif now is None or not others:
                raise _pruned(objects)
            elif now.row.source_hash != digest:
                refused.append(name)
        if not new:
            return None
        return first if newest is None else newest.manifest, Change(new)

    published = commit(objects, change)
    number = 0 if published is None else published.manifest.number
    return Outcome(number, list(new), list(refused))


def _pruned(objects: ObjectStore) -> StoreUnavailable:
    return StoreUnavailable(
        f"{objects.url}: another process pruned what was ingested; give the same command again"
    )


def remove_staged(
    objects: ObjectStore, staged: Iterable[Staged], published: Collection[str]
) -> None:
    """Remove staged objects whose documents are all published or given up."""
    done = [held for held in staged if held.entries.keys() <= set(published)]
    objects.delete([held.name for held in done])  # first, so that none names a missing page
    objects.delete([page for held in done for page in held.pages])


def _form(manifest: Manifest) -> tuple[object, ...]:
    return manifest.signature.digest, manifest.selector, manifest.codec
