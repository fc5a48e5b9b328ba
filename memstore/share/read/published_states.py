"""A published memory as one manifest after another has it: numbers for its documents, which of them
changed, and those that are published no more and stay a while for who has begun to read them.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgpack

from memstore.disk.format.document import Write
from memstore.disk.tables.catalog import FORMAT
from memstore.disk.tables.changes import Changes
from memstore.share.format.document_pages import Entry, plain_row
from memstore.share.format.manifest import Manifest

LEAVING = 300.0  # seconds: as long as a server's answer may take
_CHANGES = 4096  # that are told


@dataclass(frozen=True)
class State:
    """The memory as one manifest has it, and what is leaving."""

    manifest: Manifest
    entries: Mapping[int, Entry]  # by number, also of those that leave
    rows: Mapping[int, bytes]
    leaving: Mapping[int, float]  # until when (time.monotonic), by number
    serial: int  # among the states of this process
    changes: Changes

    @cached_property
    def meta(self) -> dict[bytes, bytes]:
        """What the memory says of itself, as a directory's tables would."""
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
        """The documents by number, without those that leave."""
        return {n: entry for n, entry in self.entries.items() if n not in self.leaving}

    @property
    def has_left(self) -> bool:
        """Has a document stayed for as long as it may?"""
        return min(self.leaving.values(), default=float("inf")) <= time.monotonic()


class States:
    """Makes the states of one memory in this process: a document keeps its number while it is only
    appended to, and none is given twice. Used by one thread at a time.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, Write | None], int] = {}
        self._last = 0

    def first(self, manifest: Manifest, entries: Sequence[Entry]) -> State:
        """The state that a memory is opened with."""
        there = self._numbered(entries)
        return State(manifest, there, _rows(there, {}, {}), {}, 1, Changes(os.urandom(8), 1))

    def next(self, before: State, manifest: Manifest, entries: Sequence[Entry]) -> State:
        """The state of a manifest with these documents, which may be the one before."""
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
        """The same, once nobody can read what leaves."""
        return self.next(replace(before, leaving=dict.fromkeys(before.leaving, 0.0)),
                         before.manifest, [*before.published.values()])  # fmt: skip

    def _numbered(self, entries: Sequence[Entry]) -> dict[int, Entry]:
        """The numbers of these documents, the oldest first."""
        numbered = {}
        for entry in sorted(entries, key=lambda entry: (entry.row.created, entry.row.name)):
            row = entry.row
            which = row.name, row.writes[0] if row.writes else None
            if which not in self._numbers:
                self._last += 1
                self._numbers[which] = self._last
            numbered[self._numbers[which]] = entry
        return numbered


def _rows(
    entries: Mapping[int, Entry], before: Mapping[int, Entry], rows: Mapping[int, bytes]
) -> dict[int, bytes]:
    """The rows of documents, packed, but for those that were before."""

    def packed(number: int, entry: Entry) -> bytes:
        old = before.get(number)
        if old is not None and (old is entry or old.row == entry.row):
            return rows[number]
        return bytes(msgpack.packb(plain_row(entry.row)))

    return {number: packed(number, entry) for number, entry in entries.items()}
