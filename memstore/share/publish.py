"""Publishing: uploads documents of a memory as segments, and then writes the next manifest.

Published data is not sent again: of a document, what is published of it; of passages, the records
that an earlier version of one of the documents has, or another of the documents sent; of an
interrupted publisher, the segments that it sent. Until the manifest is written no reader sees any
of it.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from memstore.disk.format.document import Document
from memstore.disk.tables.catalog import Catalog
from memstore.errors import DocumentNotFound, StoreUnavailable
from memstore.share.entries import Entry
from memstore.share.manifest_commit import Change, commit
from memstore.share.object_store import ObjectStore
from memstore.share.published import Published
from memstore.share.segments import FOLDER
from memstore.share.upload import (
    Changed,
    Progress,
    PublishOptions,
    Sent,
    Upload,
    check_form,
    silent,
)

_TRIES = 20


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
    progress: Progress = silent,
) -> Report:
    """Publish ready documents of a memory.

    Raises WrongModel (another model's memory is published there), DocumentExists, InvalidInput (a
    document that changed while it was published, or that cannot be kept as text), CorruptMemory,
    StoreUnavailable, MemoryNotFound (no bucket). Whatever happens, what was published before stays.
    """
    for _ in range(_TRIES):  # a later try finds again what an earlier one sent
        push = Upload(catalog, documents, objects, options)
        sent = push.send(progress)
        with suppress(Changed):
            published = commit(objects, partial(push.change, sent), sent.first)
            assert published is not None
            there = [document.name for document in documents if document.name not in sent.entries]
            sizes = push.uploaded
            return Report(
                published.manifest.number, [*sent.entries], sorted(there), len(sizes), sum(sizes)
            )
    raise StoreUnavailable(f"{objects.url}: others keep changing what is published; try again")


def publish_sent(objects: ObjectStore, sent: Sent, *, replace: bool) -> tuple[int, list[str]]:
    """Write the manifest that names documents that other processes uploaded; return the number of
    the newest manifest, and the names under which others published other content since.

    replace: also replace what others published since. Raises WrongModel, StoreUnavailable (another
    process pruned what was uploaded: ingest again).
    """
    refused: list[str] = []

    def change(newest: Published | None) -> Change | None:
        check_form(sent.first, newest, objects.url)
        there = {} if newest is None else newest.entries([*sent.entries])
        segments = {found.name for found in objects.names(FOLDER)}
        new: dict[str, Entry | None] = {}
        refused.clear()
        for name, entry in sent.entries.items():
            now = there.get(name)
            if replace or now is None or now == sent.before.get(name):
                if not {piece.segment for piece in entry.pieces} <= segments:
                    raise StoreUnavailable(
                        f"{objects.url}: another process pruned what was ingested; give the same "
                        "command again"
                    )
                new[name] = entry
            elif now.row.source_hash != entry.row.source_hash:
                refused.append(name)
        return Change(new) if new else None

    published = commit(objects, change, sent.first)
    return 0 if published is None else published.manifest.number, refused


def unpublish(objects: ObjectStore, names: Sequence[str]) -> int:
    """Remove documents from a publication; return the number of its newest manifest.

    Readers of an earlier manifest continue with it until `prune` removes what it names. Raises
    DocumentNotFound, MemoryNotFound, StoreUnavailable.
    """

    def change(newest: Published | None) -> Change:
        found = {} if newest is None else newest.entries(names)
        missing = [name for name in names if name not in found]
        if missing:
            raise DocumentNotFound(f"no document {missing[0]!r} is published at {objects.url}")
        return Change(dict.fromkeys(names))

    published = commit(objects, change)
    assert published is not None
    return published.manifest.number
