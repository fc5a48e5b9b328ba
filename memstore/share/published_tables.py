"""A publication as a database of tables, which a Catalog reads as it reads those of a directory.
Records are not among them: memstore.share.published_source reads those.
"""

import logging
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from memstore.block import RecordKey
from memstore.disk.format.keys import number_key, read_number_key, read_tokens_key
from memstore.disk.lmdb.environment import Version
from memstore.disk.lmdb.transaction import ValuePart
from memstore.disk.tables.changes import Changes
from memstore.errors import (
    CorruptMemory,
    DocumentNotFound,
    MemoryClosed,
    MemoryNotFound,
    StoreUnavailable,
)
from memstore.share.calls import Failure
from memstore.share.held_pieces import HeldPieces
from memstore.share.local_cache import LocalCache
from memstore.share.manifest import Entry, newest_number
from memstore.share.object_store import Extent
from memstore.share.pieces import Checked, Piece, Value, piece_of
from memstore.share.publication_options import REFRESH
from memstore.share.published import Published, note_newest
from memstore.share.published_states import PassagePlaces, State, States
from memstore.share.remote import Remote

_BLOCK = 8  # bytes of a document's number in a key

Parts = dict[bytes, bytes]  # values by key, of one document and table


class Snapshot:
    """A read transaction over the tables of one State. Unpublished documents that stay a while are
    found by their number alone.
    """

    writable = False

    def __init__(self, state: State, pieces: HeldPieces, places: PassagePlaces) -> None:
        self._state, self._pieces, self._places = state, pieces, places
        self._parts: dict[tuple[str, int], Parts] = {}  # that were read by `bring`

    def get(self, table: str, key: bytes) -> bytes | None:
        """A row, or None."""
        if table == "documents":
            return self._state.rows.get(int.from_bytes(key, "big"))
        return self.get_checked(table, key)

    def get_checked(self, table: str, key: bytes) -> bytes | None:
        """A value, or None; values from the object store are checked already."""
        if table == "meta":
            return self._state.meta.get(key)
        if table == "documents":
            return self.get(table, key)
        if table == "passages":
            return self._places.row(read_number_key(key))
        return self._of(table, key, key).get(key)

    def view(self, table: str, key: bytes) -> memoryview | None:
        """The same."""
        value = self.get_checked(table, key)
        return None if value is None else memoryview(value)

    def parts(self, table: str, wanted: Sequence[ValuePart]) -> list[bytes | memoryview] | None:
        """Parts of landmarks, all read at the same time; None where one has another size. Raises
        CorruptMemory, StoreUnavailable.
        """
        pieces = [self._piece(part.key) for part in wanted]
        there = [piece for piece in pieces if piece is not None]
        if len(there) < len(wanted):
            return None
        places = []
        for part, held in zip(wanted, self._pieces.tables(there, len(wanted[0].key) - _BLOCK)):
            offset, size = held.places.get(_first(part.key), (0, 0))
            if size != part.size:
                return None
            extent = Extent(held.segment, offset + part.start, part.length)
            places.append(Checked(extent, part.digest))
        return self._pieces.checked(places)

    def _piece(self, key: bytes) -> Piece | None:
        """The piece that holds landmarks."""
        entry = self._state.entries.get(int.from_bytes(key[:_BLOCK], "big"))
        if entry is None:
            return None
        part = int.from_bytes(key[_BLOCK : _BLOCK + 2], "big")
        at = bisect_left(entry.pieces, ("landmarks", part, _first(key) + 1)) - 1
        found = entry.pieces[at] if at >= 0 else None
        return found if found is None or found[:2] == ("landmarks", part) else None

    def scan_checked(
        self, table: str, start: bytes = b"", end: bytes | None = None, *, ahead: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values from key `start` to before `end`, in order; of documents' values, those
        of the document of `start`. ahead: of no use, since all values of a document are read with
        the first.
        """
        if table == "documents":
            for number in sorted(self._state.rows.keys() - self._state.leaving.keys()):
                key = number_key(number)
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

    @property
    def changes(self) -> Changes:
        """The documents whose rows changed last."""
        return self._state.changes

    @property
    def leaving(self) -> list[int]:
        """Unpublished documents that stay a while."""
        return list(self._state.leaving)

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
            start = number_key(number)
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
        # Only some tokens are wanted: read the pieces that may hold them.
        first = read_tokens_key(start)[1] if len(start) > _BLOCK else 0
        last = read_tokens_key(end)[1] if end is not None and len(end) > _BLOCK else 1 << 64

        def passage(pieces: Iterable[Piece]) -> list[Piece]:
            tokens = [piece for piece in pieces if piece.kind == "tokens"]
            least = max((p.first for p in tokens if p.first <= first), default=0)
            return sorted(
                (p for p in tokens if least <= p.first <= last), key=lambda piece: piece.first
            )

        (values,) = self._values([number], passage)
        prefix = number_key(number)
        return {prefix + v.key: v.value for v in values}

    def _values(
        self, numbers: Sequence[int], choose: Callable[[Iterable[Piece]], Sequence[Piece]]
    ) -> list[list[Value]]:
        """The values of some of the pieces of each of these documents. Raises CorruptMemory,
        StoreUnavailable.
        """
        chosen = [choose(self._state.entries[number].pieces) for number in numbers]
        values = iter(self._pieces.values([piece for some in chosen for piece in some]))
        return [[v for _ in some for v in next(values)] for some in chosen]


def _first(key: bytes) -> int:
    """The first block of landmarks, from their key."""
    return int.from_bytes(key[_BLOCK + 2 : _BLOCK + 6], "big")


_log = logging.getLogger("memstore")
_PATIENCE = 2.0  # seconds that an idle reader waits for a newer manifest


class PublishedDatabase:
    """The read-only Database of a PublishedCatalog. May be used by several threads."""

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
        """Read the newest manifest and its table of documents. local: caches pieces, and remembers
        the newest manifest. refresh: seconds after which a newer one is looked for. at_least: the
        lowest number to accept, whatever was read before. Raises MemoryNotFound, CorruptMemory,
        StaleMemory, NewerFormat, StoreUnavailable.
        """
        self.path = remote.objects.url
        self.remote, self.pieces = remote, HeldPieces(remote, local)
        self._folder = None if local is None else local.path
        self._at_least, self._warned = at_least, False
        self._states = States()
        self.places = PassagePlaces()
        self._lock, self._following = threading.Lock(), threading.Lock()
        self._closed, self._pid = False, os.getpid()
        self._looking = False
        self._looked, self._refresh_after = time.monotonic(), refresh
        # Kept, so that its pages need not be read again for the next manifest.
        self._published, entries = self.remote.call(self._newest_documents)
        self.state = self._states.first(self._published.manifest, entries)

    # The newest state

    def _newest_documents(self) -> tuple[Published, list[Entry]]:
        objects, folder = self.remote.objects, self._folder
        found = Published.open(objects, folder=folder, at_least=self._at_least)
        return found, found.documents()

    def _documents_of(self, number: int) -> tuple[Published, list[Entry]]:
        objects = self.remote.objects
        found = Published.at(objects, number, self._published)
        note_newest(objects.identity, found.seen, self._folder)
        return found, found.documents()

    @property
    def version(self) -> Version:
        """The version of the state that is read. A newer manifest is looked for every few seconds,
        in the background; a reader that was idle for longer waits for it, up to two seconds. Raises
        MemoryClosed.
        """
        self._check()
        waited = time.monotonic() - self._looked
        if waited > self._refresh_after:
            with self._lock:
                look = not self._looking
                self._looking, self._looked = True, time.monotonic()
            if look:
                looking = threading.Thread(target=self._look, name="memstore-manifest", daemon=True)
                looking.start()
                if waited > self._refresh_after + REFRESH:
                    looking.join(_PATIENCE)
        return Version(0, self.state.serial)

    def _look(self) -> None:
        try:
            self.refresh()
        except (StoreUnavailable, MemoryNotFound, CorruptMemory, DocumentNotFound):
            pass  # the state before is read on
        finally:
            self._looked, self._looking = time.monotonic(), False

    def refresh(self) -> None:
        """Read the newest manifest now, if it is newer. An older one is logged, once, and not read.
        Raises what opening raises.
        """
        held = self.state.manifest.number
        number = self.remote.call(lambda: newest_number(self.remote.objects))
        if (number is None or number < held) and not self._warned:
            self._warned = True
            _log.warning(
                "%s: its newest manifest is %s, but %d was read before, so somebody has put back "
                "an older state; publish again",
                self.path,
                number or "gone",
                held,
            )
        read = None
        if number is not None and number > held:
            read = self.remote.call(partial(self._documents_of, number))
        with self._following:
            state = self.state
            if read is not None and read[0].manifest.number > state.manifest.number:
                self._published, entries = read
                self.state = self._states.next(state, self._published.manifest, entries)
            elif state.has_left:
                self.state = self._states.next(state, state.manifest, [*state.published.values()])

    def look_again(self) -> State:
        """The newest state, read because objects are missing: unpublished documents are dropped at
        once. Raises what refreshing raises.
        """
        self.refresh()
        with self._following:
            if self.state.leaving:
                self.state = self._states.without_leaving(self.state)
            return self.state

    @contextmanager
    def read(self) -> "Iterator[Snapshot]":
        """The tables of the current state, until the block ends."""
        self._check()
        yield Snapshot(self.state, self.pieces, self.places)

    @property
    def file_bytes(self) -> int:
        """Bytes of the records of its documents."""
        return sum(entry.row.bytes for entry in self.state.published.values())

    def find(
        self, wanted: Sequence[tuple[int, RecordKey]], until: float
    ) -> list[Extent | Failure | None]:
        """Where records are now: see HeldPieces.find."""
        return self.pieces.find(self.state.entries, self.places.in_documents(wanted), until)

    def close(self) -> None:
        """Close; idempotent."""
        self._closed = True

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise MemoryClosed(
                f"{self.path} was opened by process {self._pid}, not by this fork of it"
            )
        if self._closed:
            raise MemoryClosed(f"{self.path} is closed; open it again")
