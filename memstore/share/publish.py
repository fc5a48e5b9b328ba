"""Publishing: uploads documents of a memory as segments, and then writes the next manifest.

Published data is not sent again: of a document, what is published of it; of passages, the records
that an earlier version of one of the documents has, or another of the documents sent; of an
interrupted publisher, the segments that it sent. Until the manifest is written no reader sees any
of it.
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
from memstore.share.calls import at_once
from memstore.share.garbage_collection import GRACE
from memstore.share.manifest import Entry, Manifest
from memstore.share.manifest_commit import Change, commit
from memstore.share.object_store import ObjectStore
from memstore.share.pieces import Piece
from memstore.share.published import Published
from memstore.share.segments import SegmentWriter, is_whole
from memstore.share.send_document import DocumentPublisher

T = TypeVar("T")

_TRIES = 20
_READS = 4  # segments that are read at once

Progress = Callable[[int, int], None]
"""Takes the number of documents that are done, and of all."""


def _silent(done: int, documents: int) -> None:
    """A Progress that shows nothing."""


class Report(NamedTuple):
    """What publishing did."""

    number: int  # of the manifest that is the newest now
    documents: list[str]  # that are new in it, or changed
    there: list[str]  # that were published already, unchanged
    segments: int  # that were sent
    bytes: int  # of these


class _Changed(Exception):
    """Another process changed a document, or pruned what was to be published."""


@dataclass(frozen=True)
class PublishOptions:
    """How documents are published.

    keep: "text" for no keys and values of their passages, which readers compute. replace: also
    replace published documents of these names that hold other content. check: read what is
    published of the documents, and send damaged parts again. grace: seconds, the same as for
    `prune`: objects that no manifest names are not relied on after half of it.
    """

    keep: Keep = "kv"
    replace: bool = False
    check: bool = False
    grace: float = GRACE


_USUAL = PublishOptions()


def publish(
    catalog: Catalog,
    documents: Sequence[Document],
    objects: ObjectStore,
    options: PublishOptions = _USUAL,
    progress: Progress = _silent,
) -> Report:
    """Publish ready documents of a memory.

    Raises WrongModel (another model's memory is published there), DocumentExists, InvalidInput (a
    document that changed while it was published, or that cannot be kept as text), CorruptMemory,
    StoreUnavailable, MemoryNotFound (no bucket). Whatever happens, what was published before stays.
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
    """Send documents for a later manifest; return what the first manifest would be, and the entries
    of new and changed documents, in order of names. Raises as `publish`.
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
    """Repeat work, which finds again what it sent, while others change what is published."""
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
                f"document {document.name!r} is not made of passages, and its keys and values "
                "cannot be computed; publish it without --keep text"
            )


def unpublish(objects: ObjectStore, names: Sequence[str]) -> int:
    """Remove documents from a publication; return the number of its newest manifest.

    Readers of an earlier manifest continue with it until `prune` removes what it names. Raises
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


def check_form(first: Manifest, newest: Published | None, url: str) -> None:
    """Is the newest manifest of the model and selector of this one? Raises WrongModel."""
    if newest is None:
        return
    elsewhere = "publish to another prefix"
    first.signature.check_same(newest.manifest.signature, url, elsewhere)
    if newest.manifest.selector != first.selector:
        raise WrongModel(f"{url} holds documents that are found by another selector; {elsewhere}")


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
        self._documents = sorted(documents, key=lambda document: document.name)
        self._first = Manifest(
            0, b"", 0.0, catalog.signature.public, catalog.codec, time.time(),
            catalog.index_spec, (),
        )  # fmt: skip
        self._sending = SegmentWriter(objects, options.grace)

    def run(self, progress: Progress) -> Report:
        sending = self._sending
        newest = Published.newest(self._objects)
        old = self._admitted(newest)
        entries = self._send(old, progress)

        def next_manifest(now: Published | None) -> tuple[Manifest, Change] | None:
            if self._admitted(now) != old:
                raise _Changed
            if now is not None and not entries:
                return None
            if not sending.lasts():
                raise _Changed
            return self._first if now is None else now.manifest, Change(entries)

        published = commit(self._objects, next_manifest)
        assert published is not None
        there = [d.name for d in self._documents if d.name not in entries]
        return Report(
            published.manifest.number, list(entries), there, len(sending.sent), sum(sending.sent)
        )

    def ahead(self) -> tuple[Manifest, list[Entry]]:
        """As send_ahead."""
        entries = self._send(self._admitted(Published.newest(self._objects)), _silent)
        if not self._sending.lasts():
            raise _Changed
        return self._first, [entries[name] for name in sorted(entries)]

    def _send(self, old: Mapping[str, Entry], progress: Progress) -> dict[str, Entry]:
        """Upload missing pieces of new and changed documents; return the entries of these. old:
        what is published of the documents.
        """
        whole = self._whole(old)
        wanted = [
            document
            for document in self._documents
            if (entry := old.get(document.name)) is None
            or whole[document.name] != entry
            or not self._is_there(document, entry)
        ]
        sending = self._sending
        sending.runs.learn(whole[d.name] for d in wanted if d.name in whole)
        documents = DocumentPublisher(
            self._catalog,
            self._objects,
            sending,
            keep=self._options.keep,
            others=list(whole.values()),
        )
        for done, document in enumerate(wanted):
            progress(done, len(wanted))
            documents.add(document, whole.get(document.name))
        sending.flush()
        progress(len(wanted), len(wanted))
        return {d.name: self._entry(d, sending.pieces(d.name)) for d in wanted}

    def _entry(self, document: Document, pieces: Sequence[Piece]) -> Entry:
        """The entry of a document in the manifest."""
        if self._options.keep == "text":
            document = replace(document, bytes=0)
        return Entry.of(document, pieces)

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
        check_form(self._first, newest, self._objects.url)
        old = newest.entries([document.name for document in self._documents])
        for document in self._documents:
            entry = old.get(document.name)
            if entry is None or self._options.replace:
                continue
            if entry.row.write != document.write:
                raise DocumentExists(
                    f"document {document.name!r} is published at {self._objects.url} with other "
                    "content; give --replace to put this in its place, or publish it under "
                    "another name"
                )
        return old

    def _whole(self, old: Mapping[str, Entry]) -> dict[str, Entry]:
        """The undamaged pieces of published documents, where that is to be checked; else all."""
        if not self._options.check:
            return {**old}
        names = sorted({piece.segment for entry in old.values() for piece in entry.pieces})
        whole: set[str] = set()
        for at in range(0, len(names), _READS):
            some = names[at : at + _READS]
            found = at_once(partial(is_whole, self._objects), some)
            whole |= {name for name, good in zip(some, found) if good}
        return {
            name: entry._replace(pieces=tuple(p for p in entry.pieces if p.segment in whole))
            for name, entry in old.items()
        }
