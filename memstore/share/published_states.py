"""A publication as one manifest after another has it: numbers for its documents and passages, which
documents changed, and those that were unpublished and stay a while for answers that are under way.
"""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import msgpack

from memstore.block import RecordKey
from memstore.disk.format.record import WriteId
from memstore.disk.tables.catalog import FORMAT
from memstore.disk.tables.changes import Changes
from memstore.disk.tables.passage_table import Digest
from memstore.errors import DocumentNotFound
from memstore.share.manifest import Entry, Manifest, plain_row

LEAVING = 300.0  # seconds: as long as a server's answer may take
_CHANGES = 4096  # that are remembered
_FIRST_PASSAGE = 1 << 40  # number of the first passage, above all numbers of documents
_PASSAGES = 1 << 17  # that are remembered, those that were asked for last


@dataclass(frozen=True)
class State:
    """The publication as one manifest has it, and unpublished documents that stay a while."""

    manifest: Manifest
    entries: Mapping[int, Entry]  # by number, also unpublished documents that stay
    rows: Mapping[int, bytes]
    leaving: Mapping[int, float]  # until when unpublished documents stay (time.monotonic)
    serial: int  # among the states of this process
    changes: Changes

    @cached_property
    def meta(self) -> dict[bytes, bytes]:
        """The description of the memory, as the tables of a directory have it."""
        selector = self.manifest.selector
        described = {
            "format": FORMAT,
            "signature": self.manifest.signature.to_dict(),
            "codec": self.manifest.codec,
            "created": self.manifest.created,
            "quota": None,
            "selector": selector is not None,
        }
        meta = {b"memory": msgpack.packb(described)}
        if selector is not None:
            meta[b"selector"] = msgpack.packb(selector.to_dict())
        return meta

    @property
    def published(self) -> dict[int, Entry]:
        """The published documents by number."""
        return {n: entry for n, entry in self.entries.items() if n not in self.leaving}

    @property
    def has_left(self) -> bool:
        """Has an unpublished document stayed long enough?"""
        return min(self.leaving.values(), default=float("inf")) <= time.monotonic()


class States:
    """Makes the states of one publication in this process. A document keeps its number until it is
    replaced, and no number is used twice. Used by one thread at a time.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, WriteId], int] = {}
        self._last = 0

    def first(self, manifest: Manifest, entries: Sequence[Entry]) -> State:
        """The first state."""
        there = self._numbered(entries)
        return State(manifest, there, _rows(there, {}, {}), {}, 1, Changes(os.urandom(8), 1))

    def next(self, before: State, manifest: Manifest, entries: Sequence[Entry]) -> State:
        """The state of a manifest with these documents; it may be the same manifest."""
        now, old, there = time.monotonic(), before.published, self._numbered(entries)
        leaving = {n: until for n, until in before.leaving.items() if until > now}
        leaving = {
            n: until
            for n, until in (leaving | dict.fromkeys(old, now + LEAVING)).items()
            if n not in there
        }
        every = {**{n: before.entries[n] for n in leaving}, **there}
        self._numbers = {which: n for which, n in self._numbers.items() if n in every}
        rows = _rows(every, before.entries, before.rows)
        changed = [n for n in there if n not in old or rows[n] != before.rows[n]]
        changed += old.keys() - there.keys()
        series, last, known = before.changes
        changes = Changes(series, last + len(changed), (*known, *changed)[-_CHANGES:])
        return State(manifest, every, rows, leaving, before.serial + 1, changes)

    def without_leaving(self, before: State) -> State:
        """The same without unpublished documents, whose objects are gone."""
        return self.next(replace(before, leaving=dict.fromkeys(before.leaving, 0.0)),
                         before.manifest, [*before.published.values()])  # fmt: skip

    def _numbered(self, entries: Sequence[Entry]) -> dict[int, Entry]:
        """Documents by number, the oldest first."""
        numbered = {}
        for entry in sorted(entries, key=lambda entry: (entry.row.created, entry.row.name)):
            row = entry.row
            which = row.name, row.write
            if which not in self._numbers:
                self._last += 1
                self._numbers[which] = self._last
            numbered[self._numbers[which]] = entry
        return numbered


def _rows(
    entries: Mapping[int, Entry], before: Mapping[int, Entry], rows: Mapping[int, bytes]
) -> dict[int, bytes]:
    """The packed rows of documents; unchanged ones are taken from before."""

    def packed(number: int, entry: Entry) -> bytes:
        old = before.get(number)
        if old is not None and (old is entry or old.row == entry.row):
            return rows[number]
        return bytes(msgpack.packb(plain_row(entry.row)))

    return {number: packed(number, entry) for number, entry in entries.items()}


class _Known(NamedTuple):
    digest: Digest
    document: int  # and block, where it was seen last
    block: int


class PassagePlaces:
    """Numbers for passages in this process, one for equal content. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[Digest, int] = {}
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._next = _FIRST_PASSAGE

    def number(self, digest: Digest, document: int, block: int) -> int:
        """The number of a passage that is in a block of a document."""
        with self._lock:
            number = self._numbers.setdefault(digest, self._next)
            if number == self._next:
                self._next += 1
            self._known[number] = _Known(digest, document, block)
            self._known.move_to_end(number)
            if len(self._known) > _PASSAGES:
                _, gone = self._known.popitem(last=False)
                del self._numbers[gone.digest]
            return number

    def row(self, number: int) -> bytes | None:
        """The row that PassageTable reads of a passage; None for an unknown number."""
        known = self._known.get(number)
        if known is None:
            return None
        row: bytes = msgpack.packb([known.digest, 1, 1, known.document, known.block])
        return row

    def in_documents(self, wanted: Sequence[tuple[int, RecordKey]]) -> list[tuple[int, RecordKey]]:
        """Records by document and key, with passages replaced by a document that has them. Raises
        DocumentNotFound for a passage that was asked for too long ago.
        """
        found = []
        for document, key in wanted:
            if document >= _FIRST_PASSAGE:
                known = self._known.get(document)
                if known is None:
                    raise DocumentNotFound(f"passage {document} is not known any more; ask again")
                document, key = known.document, RecordKey(known.document, known.block, key.layer)
            found.append((document, key))
        return found
