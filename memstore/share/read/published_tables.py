"""A published memory seen as the tables of a directory: what a Catalog reads there, it reads here.

Blocks are not among them: they are read by memstore.share.read.published_source.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgpack

from memstore.block import RecordKey
from memstore.disk.format.document import Write
from memstore.disk.format.keys import document_key, read_passage_key, read_tokens_key
from memstore.disk.lmdb.environment import Version
from memstore.disk.tables.description import FORMAT
from memstore.errors import (
    CorruptMemory,
    DocumentNotFound,
    MemoryClosed,
    MemoryNotFound,
    ObjectNotFound,
    StoreUnavailable,
)
from memstore.share.caches.local_cache import LocalCache
from memstore.share.calls.failures import Failure
from memstore.share.format.document_pages import Entry, plain_row
from memstore.share.format.manifest import Manifest, Published, newest_number
from memstore.share.format.pieces import Piece, Value, piece_of
from memstore.share.format.read_pieces import Extent
from memstore.share.format.rollback import note_newest
from memstore.share.publication_options import REFRESH
from memstore.share.read.held_pieces import HeldPieces
from memstore.share.read.passage_numbers import PassagePlaces
from memstore.share.read.remote import Remote

_log = logging.getLogger("memstore")
_BLOCK = 8  # bytes of a document's number in a key

Parts = dict[bytes, bytes]  # values by key, of one document and table


@dataclass(frozen=True)
class State:
    """The memory as one manifest has it, with numbers for its documents."""

    manifest: Manifest
    entries: Mapping[int, Entry]  # by number, oldest first
    rows: Mapping[int, bytes]
    meta: Mapping[bytes, bytes]


class Numbers:
    """Numbers for documents that other machines published: a document keeps its number while it is
    only appended to, and none is given twice.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, Write | None], int] = {}

    def of(self, entries: Sequence[Entry]) -> dict[int, Entry]:
        """The numbers of these documents, the oldest first."""
        numbered = {}
        for entry in sorted(entries, key=lambda entry: (entry.row.created, entry.row.name)):
            row = entry.row
            which = row.name, row.writes[0] if row.writes else None
            numbered[self._known.setdefault(which, len(self._known) + 1)] = entry
        return numbered


class PublishedDatabase:
    """Stands where Catalog has its Database; only read. May be used by several threads."""

    read_only = True
    limit: int | None = None

    def __init__(
        self,
        remote: Remote,
        local: LocalCache | None,
        *,
        refresh: float = REFRESH,
        at_least: int | None = None,
    ) -> None:
        """Read the newest manifest and its table of documents. refresh: seconds after which a newer
        one is looked for. at_least: its number, whatever was read before. Raises MemoryNotFound,
        CorruptMemory, StaleMemory, NewerFormat, StoreUnavailable.
        """
        self.path = remote.place.url
        self.remote, self.pieces = remote, HeldPieces(remote, local)
        self._local, self._at_least, self._told = local, at_least, False
        self._numbers = Numbers()
        self.places = PassagePlaces()
        self._lock = threading.RLock()
        self._closed, self._pid = False, os.getpid()
        self._looking = False
        self._published: Published | None = None  # whose pages the next need not be read for
        self._looked, self._refresh_after = time.monotonic(), refresh
        self.state: State = self._read(None)

    # The newest state

    def _read(self, number: int | None) -> State:
        place = self.remote.place

        def read() -> tuple[Published, list[Entry]]:
            before = self._published
            if number is None:
                found = Published.open(place, cache=self._local, at_least=self._at_least)
            else:
                found = Published.at(place, number, before)
                note_newest(place.identity, found.seen, self._local)
            return found, found.documents()

        self._published, entries = self.remote.call(read)
        manifest = self._published.manifest
        with self._lock:
            numbered = self._numbers.of(entries)
        rows = {n: msgpack.packb(plain_row(entry.row)) for n, entry in numbered.items()}
        return State(manifest, numbered, rows, _meta(manifest))

    @property
    def version(self) -> Version:
        """Which manifest is read; a newer one is looked for beside it, every few seconds. Raises
        MemoryClosed.
        """
        self._check()
        if time.monotonic() - self._looked > self._refresh_after:
            with self._lock:
                look = not self._looking
                self._looking, self._looked = True, time.monotonic()
            if look:
                threading.Thread(target=self._look, name="memstore-manifest", daemon=True).start()
        return Version(0, self.state.manifest.number)

    def _look(self) -> None:
        try:
            self.refresh()
        except (StoreUnavailable, MemoryNotFound, CorruptMemory, DocumentNotFound):
            pass  # what is there is read on
        finally:
            self._looked, self._looking = time.monotonic(), False

    def refresh(self) -> None:
        """Read the newest manifest now, if there is a newer one; an older one is told, once, and
        what was read is read on. Raises what opening raises.
        """
        held = self.state.manifest.number
        number = self.remote.call(lambda: newest_number(self.remote.place))
        if (number is None or number < held) and not self._told:
            self._told = True
            _log.warning(
                "%s: its newest manifest is %s, but %d was read before, so somebody has put back "
                "an older state; publish again",
                self.path,
                number or "gone",
                held,
            )
        if isinstance(number, int) and number > self.state.manifest.number:
            state = self._read(number)
            with self._lock:
                if state.manifest.number > self.state.manifest.number:
                    self.state = state

    @contextmanager
    def read(self) -> "Iterator[Snapshot]":
        """The tables as they are now, for as long as the block lasts."""
        self._check()
        yield Snapshot(self, self.state)

    @property
    def file_bytes(self) -> int:
        """Bytes of the records of its documents."""
        return sum(entry.row.bytes for entry in self.state.entries.values())

    def find(
        self, wanted: Sequence[tuple[int, RecordKey]], until: float
    ) -> list[Extent | Failure | None]:
        """Where records lie now, as HeldPieces.find."""
        return self.pieces.find(self.state.entries, self.places.in_documents(wanted), until)

    def close(self) -> None:
        """Close; more than once is the same as once."""
        self._closed = True

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise MemoryClosed(
                f"{self.path} was opened by process {self._pid}, not by this fork of it"
            )
        if self._closed:
            raise MemoryClosed(f"{self.path} is closed; open it again")


class Snapshot:
    """What a Catalog takes for a transaction: the tables of one State."""

    writable = False

    def __init__(self, database: PublishedDatabase, state: State) -> None:
        self._database, self._state = database, state
        self._parts: dict[tuple[str, int], Parts] = {}  # that were brought

    def get(self, table: str, key: bytes) -> bytes | None:
        """A row, or None."""
        if table == "documents":
            return self._state.rows.get(int.from_bytes(key, "big"))
        return self.get_checked(table, key)

    def get_checked(self, table: str, key: bytes) -> bytes | None:
        """A value, or None; what was read from afar was checked there."""
        if table == "meta":
            return self._state.meta.get(key)
        if table == "documents":
            return self.get(table, key)
        if table == "passages":
            return self._database.places.row(read_passage_key(key))
        return self._of(table, key, key).get(key)

    def view(self, table: str, key: bytes) -> memoryview | None:
        """The same."""
        value = self.get_checked(table, key)
        return None if value is None else memoryview(value)

    def scan_checked(
        self, table: str, start: bytes = b"", end: bytes | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values from key `start` to before `end`, in order; of documents' values, those
        of the document of `start`.
        """
        if table == "documents":
            for number in sorted(self._state.rows):
                key = document_key(number)
                if key >= start and (end is None or key < end):
                    yield key, self._state.rows[number]
            return
        parts = self._of(table, start, end)
        for key in sorted(parts):
            if key >= start and (end is None or key < end):
                yield key, parts[key]

    scan = scan_checked

    def key_at_or_before(self, table: str, key: bytes) -> bytes | None:
        """The greatest key of the same document that is not after `key`, or None."""
        return max((known for known in self._of(table, key, key) if known <= key), default=None)

    def ahead(self, table: str, start: bytes, end: bytes | None) -> Iterator[None]:
        """For a walk over values, which are all read when the first is."""
        return iter(())

    def has_records(self, document: int, block: int) -> bool:
        """Are keys and values published of a document's block?"""
        entry = self._state.entries.get(document)
        return entry is not None and piece_of(entry.pieces, block) is not None

    def bring(self, documents: Sequence[int], table: str) -> None:
        """Read all of some documents' values of a table, at the same time. Raises CorruptMemory,
        StoreUnavailable.
        """
        new = [n for n in documents if (table, n) not in self._parts and n in self._state.entries]
        values = self._values(new, lambda pieces: [p for p in pieces if p.kind == table])
        for number, found in zip(new, values):
            start = document_key(number)
            self._parts[table, number] = {start + v.key: v.value for v in found}

    def _of(self, table: str, start: bytes, end: bytes | None) -> Parts:
        number = int.from_bytes(start[:_BLOCK], "big")
        held = self._parts.get((table, number))
        entry = self._state.entries.get(number)
        if held is not None or entry is None:
            return held or {}
        if table != "tokens":
            self.bring([number], table)
            return self._parts[table, number]
        # Of tokens, of which some are wanted, the pieces that may hold them.
        first = read_tokens_key(start)[1] if len(start) > _BLOCK else 0
        last = read_tokens_key(end)[1] if end is not None and len(end) > _BLOCK else 1 << 64

        def passage(pieces: Iterable[Piece]) -> list[Piece]:
            tokens = [piece for piece in pieces if piece.kind == "tokens"]
            least = max((p.first for p in tokens if p.first <= first), default=0)
            return sorted(
                (p for p in tokens if least <= p.first <= last), key=lambda piece: piece.first
            )

        (values,) = self._values([number], passage)
        prefix = document_key(number)
        return {prefix + v.key: v.value for v in values}

    def _values(
        self, numbers: Sequence[int], choose: Callable[[Iterable[Piece]], Sequence[Piece]]
    ) -> list[list[Value]]:
        """The values of some of the pieces of each of these documents. Raises CorruptMemory,
        StoreUnavailable.
        """

        def read() -> list[list[Value]]:
            chosen = [choose(self._state.entries[number].pieces) for number in numbers]
            values = iter(
                self._database.pieces.values([piece for some in chosen for piece in some])
            )
            return [[v for _ in some for v in next(values)] for some in chosen]

        try:
            return read()
        except ObjectNotFound:
            if not self._found_elsewhere(numbers):
                raise
        return read()

    def _found_elsewhere(self, numbers: Sequence[int]) -> bool:
        """Look where the newest manifest has what is the same there, since objects are away: they
        were merged and pruned. Does it have these documents, as they were? Raises CorruptMemory,
        StoreUnavailable.
        """
        self._database.refresh()
        state, newest = self._state, self._database.state
        if newest.manifest.selector != state.manifest.selector:
            return False
        moved = {
            number: newest.entries[number]
            for number, entry in state.entries.items()
            if number in newest.entries and newest.entries[number].row == entry.row
        }
        before = [state.entries[number] for number in numbers]
        self._state = replace(state, entries={**state.entries, **moved})
        return all(n in moved for n in numbers) and any(
            entry != moved[number] for number, entry in zip(numbers, before)
        )


def _meta(manifest: Manifest) -> dict[bytes, bytes]:
    form = manifest.selector
    described = {
        "format": FORMAT,
        "signature": manifest.signature.to_dict(),
        "codec": manifest.codec,
        "created": manifest.created,
        "quota": None,
        "selector": form is not None,
    }
    meta = {b"memory": msgpack.packb(described)}
    if form is not None:
        meta[b"selector"] = msgpack.packb({"form": form.to_dict(), "generation": 0})
    return meta
