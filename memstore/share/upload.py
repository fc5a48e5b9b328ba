"""Uploading documents of a memory: what is missing of them becomes segments, which no manifest
names yet.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, get_args

from memstore.disk.format.document import Document
from memstore.disk.format.text_parts import Keep
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.passage_table import StoredPassage
from memstore.errors import DocumentExists, InvalidInput, WrongModel
from memstore.share.document_parts import Head
from memstore.share.garbage_collection import GRACE
from memstore.share.manifest import Manifest, find_newest, segments_of
from memstore.share.object_store import ObjectStore
from memstore.share.parallel import at_once
from memstore.share.piece_writer import PieceWriter
from memstore.share.pieces import Entry, Piece, index_of
from memstore.share.segments import SegmentWriter, is_whole
from memstore.share.stored_parts import stored_parts

_READS = 4  # segments that are read at once

Progress = Callable[[int, int], None]
"""Takes the number of documents that are done, and of all."""


class Sent(NamedTuple):
    """Documents that are uploaded, and that no manifest names yet."""

    first: Manifest  # of the memory, without documents
    entries: dict[str, Entry]  # of new and changed documents, by name
    before: Mapping[str, Entry]  # what was published under the names of all
    sizes: list[int]  # bytes of each segment that was uploaded


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


class Upload:
    """One upload of documents."""

    def __init__(
        self,
        catalog: Catalog,
        documents: Sequence[Document],
        objects: ObjectStore,
        options: PublishOptions,
    ) -> None:
        self._catalog, self._objects, self._options = catalog, objects, options
        self._documents = sorted(documents, key=lambda document: document.name)
        self._check_keep()
        spec = catalog.index_spec
        self._first = Manifest(catalog.signature.public, catalog.codec, time.time(), spec)
        self._segments = SegmentWriter(objects, options.grace)
        self._writer = PieceWriter(self._segments.append)
        self._unlearned: list[Entry] = []  # that may have passages of the documents

    def _check_keep(self) -> None:
        keep = self._options.keep
        if keep not in get_args(Keep):
            raise InvalidInput(f"keep is {' or '.join(get_args(Keep))}, not {keep!r}")
        for document in self._documents:
            if keep == "text" and not document.of_passages:
                raise InvalidInput(
                    f"document {document.name!r} is not made of passages, and its keys and values "
                    "cannot be computed; publish it without --keep text"
                )

    def send(self, progress: Progress = lambda done, documents: None) -> Sent:
        """Upload what is missing of the documents. Raises as `publish`."""
        before = self._admitted(find_newest(self._objects))
        whole = self._undamaged(before)
        rows = {document.name: self._row(document) for document in self._documents}
        usable = {
            name: entry
            for name, entry in whole.items()
            if entry == before[name] and self._has_content(entry, rows[name])
        }
        wanted = [
            document
            for document in self._documents
            if document.name not in usable or usable[document.name].row != rows[document.name]
        ]
        self._unlearned = [*usable.values()]
        self._learn(entry for name, entry in whole.items() if name not in usable)
        pieces: dict[str, Sequence[Piece]] = {}
        for done, document in enumerate(wanted):
            progress(done, len(wanted))
            old = usable.get(document.name)
            pieces[document.name] = self._write(document) if old is None else old.pieces
        self._segments.flush()
        progress(len(wanted), len(wanted))
        entries = {
            name: Entry.of(rows[name], self._segments.placed(found))
            for name, found in pieces.items()
        }
        return Sent(self._first, entries, before, self._segments.sent)

    def _row(self, document: Document) -> Document:
        """A document's row as it is published."""
        if self._options.keep == "text":
            document = replace(document, bytes=0)
        return Entry.of(document, ()).row

    def _has_content(self, entry: Entry, row: Document) -> bool:
        """Are these the pieces of a document with this row, whatever else the row says?"""
        if self._options.keep == "text" and entry.has_records:
            return False
        return (entry.row.write, entry.row.bytes) == (row.write, row.bytes)

    def _admitted(self, newest: Manifest | None) -> dict[str, Entry]:
        """The published documents of these names, which may be changed. Raises WrongModel,
        DocumentExists.
        """
        if newest is None:
            return {}
        check_same_memory(self._first, newest, self._objects.url)
        old = {}
        for document in self._documents:
            entry = newest.entries.get(document.name)
            if entry is None:
                continue
            if not self._options.replace and entry.row.write != document.write:
                raise DocumentExists(
                    f"document {document.name!r} is published at {self._objects.url} with other "
                    "content; give --replace to put this in its place, or publish it under "
                    "another name"
                )
            old[document.name] = entry
        return old

    def _undamaged(self, old: Mapping[str, Entry]) -> dict[str, Entry]:
        """The undamaged pieces of published documents, if that is to be checked; else all."""
        if not self._options.check:
            return {**old}
        names = sorted(segments_of(old.values()))
        good = at_once(partial(is_whole, self._objects), names, _READS)
        whole = {name for name, good in zip(names, good) if good}
        return {
            name: entry._replace(pieces=tuple(p for p in entry.pieces if p.segment in whole))
            for name, entry in old.items()
        }

    # Documents

    def _write(self, document: Document) -> list[Piece]:
        """Upload a document, without passages that are published already."""
        head = Head(self._first.signature, document, self._first.selector)
        if self._options.keep == "text":
            parts = stored_parts(self._catalog, document, lambda passage: False)
            return self._writer.write(head, parts, records=False)
        return self._writer.write(head, stored_parts(self._catalog, document, self._is_new))

    def _is_new(self, passage: StoredPassage) -> bool:
        """Is a passage neither published nor written now?"""
        if not self._writer.knows(passage.digest) and passage.references > 1:
            others, self._unlearned = self._unlearned, []
            self._learn(others)
        return not self._writer.knows(passage.digest)

    def _learn(self, entries: Iterable[Entry]) -> None:
        """Look up the passages of published documents. Raises CorruptMemory, StoreUnavailable."""
        runs = {
            (piece.segment, piece.offset): (entry.row, piece)
            for entry in entries
            if entry.row.of_passages
            for piece in entry.pieces
            if piece.kind == "records"
        }

        def digests(run: tuple[Document, Piece]) -> tuple[bytes, ...]:
            row, piece = run
            return index_of(
                self._objects, row, piece, self._objects.get_range(*piece.extent)
            ).writes

        found = [*runs.values()]
        for (_, piece), known in zip(found, at_once(digests, found)):
            self._writer.learn(piece, known)


def check_same_memory(first: Manifest, newest: Manifest, url: str) -> None:
    """Is a manifest of this model and selector? Raises WrongModel."""
    elsewhere = "publish to another prefix"
    first.signature.check_same(newest.signature, url, elsewhere)
    if newest.selector != first.selector:
        raise WrongModel(f"{url} holds documents that are found by another selector; {elsewhere}")
