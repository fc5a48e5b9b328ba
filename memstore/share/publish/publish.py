"""Publishing: documents of a memory into segments of an object store, and then into its next
manifest.

What is there already is not sent again: of a document, the records of writes that are published,
and values (landmarks, tokens) that are the same from the beginning on; of passages, the records of
those that a former version of one of the documents has, or that another one of them has sent; of a
publisher that was interrupted, the segments that it had sent. Until the manifest is written nobody
sees any of it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar, get_args

from memstore.disk.format.document import Document
from memstore.disk.format.text_parts import Keep
from memstore.disk.tables.catalog import Catalog
from memstore.errors import (
    DocumentExists,
    DocumentNotFound,
    InvalidInput,
    StoreUnavailable,
    WrongModel,
)
from memstore.share.format.document_pages import Entry
from memstore.share.format.manifest import Manifest
from memstore.share.format.pieces import Piece
from memstore.share.format.published import Published
from memstore.share.format.segments import SEGMENT_BYTES, is_whole
from memstore.share.objects.daemon_threads import at_once
from memstore.share.objects.object_store import ObjectStore
from memstore.share.publish.appended import Appended
from memstore.share.publish.garbage_collection import GRACE
from memstore.share.publish.manifest_commit import Change, commit
from memstore.share.publish.segment_writer import SegmentWriter
from memstore.share.publish.send_document import DocumentPublisher

T = TypeVar("T")

_TRIES = 20
_READS = 4  # segments that are read at once

Progress = Callable[[int, int], None]
"""Takes the documents that are done, and the documents there are."""


class Report(NamedTuple):
    """What publishing did."""

    number: int  # of the manifest that is the newest now
    documents: list[str]  # that are new in it, or changed
    there: list[str]  # that were published already, as they are
    segments: int  # that were sent
    bytes: int  # of these


class _Changed(Exception):
    """Others changed a document, or removed what was to be published, meanwhile."""


@dataclass(frozen=True)
class PublishOptions:
    """How documents are published.

    keep: "text" for no keys and values of their passages, which readers compute. replace: also in
    place of published documents of these names that hold other content. check: read what is
    published of the documents, and send again what is damaged. grace: seconds, that of `prune`, by
    whoever prunes: nothing that no manifest names is relied on once it is older than half of it.
    segment_bytes: of a segment, about.
    """

    keep: Keep = "kv"
    replace: bool = False
    check: bool = False
    grace: float = GRACE
    segment_bytes: int = SEGMENT_BYTES


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
    document that changed meanwhile, or that is not made of passages and to be kept as text),
    CorruptMemory, StoreUnavailable, MemoryNotFound (no bucket). What was published before stays
    whatever happens.
    """
    return _tried(
        documents,
        objects,
        options,
        lambda: _Publishing(catalog, documents, objects, options).run(progress),
    )


def send_ahead(
    catalog: Catalog, documents: Sequence[Document], objects: ObjectStore, options: PublishOptions
) -> tuple[Manifest, list[Entry]]:
    """Send documents for a manifest that is to come; return what a first one would be, and what it
    is to say of those that are not published as they are, in order of names. Raises as `publish`.
    """
    return _tried(
        documents,
        objects,
        options,
        lambda: _Publishing(catalog, documents, objects, options).ahead(),
    )


def _tried(
    documents: Sequence[Document],
    objects: ObjectStore,
    options: PublishOptions,
    work: Callable[[], T],
) -> T:
    """The result of work that finds again what was sent, where others changed what is there."""
    _check_keep(documents, options.keep)
    for _ in range(_TRIES):
        with suppress(_Changed):
            return work()
    raise StoreUnavailable(f"{objects.url}: others keep changing what is published; try again")


def _check_keep(documents: Sequence[Document], keep: Keep) -> None:
    if keep not in get_args(Keep):
        raise InvalidInput(f"keep is {' or '.join(get_args(Keep))}, not {keep!r}")
    for document in documents:
        if keep == "text" and not document.of_passages:
            raise InvalidInput(
                f"document {document.name!r} is not made of passages, whose keys and values alone "
                "can be computed; publish it without --keep text"
            )


def unpublish(objects: ObjectStore, names: Sequence[str]) -> int:
    """Take documents out of a published memory; return the number of its newest manifest.

    Who has read an earlier manifest goes on with it until `prune` has removed what it names. Raises
    DocumentNotFound, MemoryNotFound, StoreUnavailable.
    """

    def change(newest: Published | None) -> tuple[Manifest, Change]:
        newest = newest or Published.open(objects)
        found = newest.entries(names)
        missing = [name for name in names if name not in found]
        if missing:
            raise DocumentNotFound(f"no document {missing[0]!r} is published at {objects.url}")
        return newest.manifest, Change(dict.fromkeys(names))

    published = commit(objects, change)
    assert published is not None
    return published.manifest.number


class _Publishing:
    """One try."""

    def __init__(
        self,
        catalog: Catalog,
        documents: Sequence[Document],
        objects: ObjectStore,
        options: PublishOptions,
    ) -> None:
        self._catalog, self._objects, self._options = catalog, objects, options
        self._appended = Appended(catalog, objects, damaged=options.check)
        self._documents = sorted(documents, key=lambda document: document.name)
        digest = catalog.signature.digest
        self._sending = SegmentWriter(
            objects, digest, limit=options.segment_bytes, grace=options.grace
        )

    def run(self, progress: Progress) -> Report:
        objects, form, sending = self._objects, self._catalog.index_spec, self._sending
        newest = Published.newest(objects)
        old = self._admitted(newest)
        new_form = newest is None or newest.manifest.selector != form
        entries = self.send(newest, old, progress)
        change = Change(entries, form, new_form)

        def next_manifest(now: Published | None) -> tuple[Manifest, Change] | None:
            if self._admitted(now) != old:
                raise _Changed
            if now is not None:
                if now.manifest.selector != (None if newest is None else newest.manifest.selector):
                    raise _Changed
                if not (entries or new_form):
                    return None
            if not sending.lasts():
                raise _Changed
            return self.first() if now is None else now.manifest, change

        published = commit(objects, next_manifest)
        assert published is not None
        there = [d.name for d in self._documents if d.name not in entries]
        return Report(
            published.manifest.number, list(entries), there, len(sending.sent), sum(sending.sent)
        )

    def ahead(self) -> tuple[Manifest, list[Entry]]:
        """As send_ahead."""
        newest = Published.newest(self._objects)
        entries = self.send(newest, self._admitted(newest), lambda done, documents: None)
        if not self._sending.lasts():
            raise _Changed
        return self.first(), [entries[name] for name in sorted(entries)]

    def send(
        self, newest: Published | None, old: Mapping[str, Entry], progress: Progress
    ) -> dict[str, Entry]:
        """Send what is not there of the documents that are not published as they are; return what
        a manifest is to say of these. old: what is published of the documents.
        """
        objects, form = self._objects, self._catalog.index_spec
        whole = self._whole(newest, old)
        new_form = newest is None or newest.manifest.selector != form
        wanted = [
            document
            for document in self._documents
            if new_form
            or (entry := old.get(document.name)) is None
            or whole[document.name] != entry
            or not self._is_there(document, entry)
        ]
        sending = self._sending
        sending.runs.learn(whole[d.name] for d in wanted if d.name in whole)
        documents = DocumentPublisher(
            self._catalog, objects, sending, keep=self._options.keep, others=list(whole.values())
        )
        for done, document in enumerate(wanted):
            progress(done, len(wanted))
            documents.add(document, whole.get(document.name))
        sending.flush()
        progress(len(wanted), len(wanted))
        return {d.name: self._entry(d, sending.pieces(d.name)) for d in wanted}

    def first(self) -> Manifest:
        """What the first manifest begins from."""
        catalog, selector = self._catalog, self._catalog.index_spec
        return Manifest(
            0, b"", 0.0, catalog.signature.public, catalog.codec, time.time(), selector, (),
        )  # fmt: skip

    def _entry(self, document: Document, pieces: Sequence[Piece]) -> Entry:
        """What is published of a document."""
        if self._options.keep == "text":
            document = replace(document, bytes=0)
        return Entry.of(document, pieces)

    # What is there

    def _is_there(self, document: Document, published: Entry) -> bool:
        """Is a document published as it is to be?"""
        kinds = {piece.kind for piece in published.pieces}
        if self._options.keep == "text" and "records" in kinds:
            return False
        return published.row == self._entry(document, ()).row

    def _admitted(self, newest: Published | None) -> dict[str, Entry]:
        """The published documents of these names, which may be changed. Raises WrongModel,
        DocumentExists.
        """
        if newest is None:
            return {}
        catalog, url = self._catalog, self._objects.url
        catalog.signature.check_same(newest.manifest.signature, url, "publish to another prefix")
        old = newest.entries([document.name for document in self._documents])
        if newest.manifest.selector != catalog.index_spec:
            others = newest.manifest.documents - len(old)
            if others:
                raise WrongModel(
                    f"{url} holds {others} other documents that are found by another selector; "
                    "publish all of them together, or to another prefix"
                )
        for document in self._documents:
            entry = old.get(document.name)
            if (
                entry is not None
                and not self._options.replace
                and not self._appended.continues(document, entry)
            ):
                raise DocumentExists(
                    f"document {document.name!r} is published at {url} with other content; give "
                    "--replace to put this in its place, or publish it under another name"
                )
        return old

    def _whole(self, newest: Published | None, old: Mapping[str, Entry]) -> dict[str, Entry]:
        """What is published of the documents, and is not damaged, as far as that is to be
        looked at.
        """
        entries = {**old}
        if not self._options.check:
            return entries
        names = sorted({piece.segment for entry in entries.values() for piece in entry.pieces})
        whole: set[str] = set()
        for at in range(0, len(names), _READS):
            some = names[at : at + _READS]
            found = at_once(partial(is_whole, self._objects), some)
            whole |= {name for name, good in zip(some, found) if good}
        return {
            name: entry._replace(pieces=tuple(p for p in entry.pieces if p.segment in whole))
            for name, entry in entries.items()
        }
