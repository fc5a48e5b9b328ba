"""A publication as a database that follows the newest manifest, with tables of search data and
tokens; memstore.share.published_catalog reads records.
"""

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from memstore.disk.lmdb.transaction import ValuePart, Version, read_run_key, run_key, tokens_key
from memstore.errors import MemoryClosed, MemstoreError, StaleMemory, StoreUnavailable
from memstore.share.cached_reads import CachedReads
from memstore.share.contents import Contents, Entry, Place, Value
from memstore.share.local_cache import LocalCache
from memstore.share.manifest import Manifest, newest_number, read_newest
from memstore.share.object_store import ObjectStore
from memstore.share.publication_options import REFRESH
from memstore.share.valkey import Valkey

_log = logging.getLogger("memstore")
LEAVING = 300.0  # seconds that an unpublished document stays readable, for running answers
_PATIENCE = 2.0  # seconds that a reader waits for a newer manifest after an idle time


@dataclass(frozen=True)
class State:
    """The documents of one manifest, and unpublished documents that stay readable for a while.

    A document keeps its number, its row's id, until it is replaced; numbers are never reused.
    """

    manifest: Manifest
    published: Mapping[int, Entry]  # by number
    leaving: Mapping[int, tuple[Entry, float]]  # with the end of each (time.monotonic)
    last: int  # the greatest number so far
    serial: int  # number of this state in this process

    def next(self, manifest: Manifest) -> "State":
        """The state after reading a manifest, which may be the same one."""
        now, last = time.monotonic(), self.last
        leaving = {n: stays for n, stays in self.leaving.items() if stays[1] > now}
        leaving |= {n: (entry, now + LEAVING) for n, entry in self.published.items()}
        numbers = {(entry.row.name, entry.row.write): n for n, (entry, _) in leaving.items()}
        there: dict[int, Entry] = {}
        for entry in sorted(manifest.entries.values(), key=lambda e: (e.row.created, e.row.name)):
            number = numbers.get((entry.row.name, entry.row.write))
            if number is None:
                number = last = last + 1
            there[number] = entry._replace(row=replace(entry.row, id=number))
        leaving = {n: stays for n, stays in leaving.items() if n not in there}
        return State(manifest, there, leaving, last, self.serial + 1)

    def entry(self, number: int) -> Entry | None:
        """A published document, or an unpublished one that is still readable, or None."""
        return self.published.get(number) or self.leaving.get(number, (None, 0.0))[0]


class Snapshot:
    """A read transaction over the tables of search data and tokens of one State. Values were
    checked when they were read.
    """

    def __init__(self, state: State, reads: CachedReads) -> None:
        self.state, self._reads = state, reads
        self._held: dict[tuple[str, int], dict[bytes, bytes]] = {}  # values that `bring` read

    @property
    def sees(self) -> int:
        """As Transaction.sees."""
        return self.state.serial

    def get_checked(self, table: str, key: bytes) -> bytes | None:
        """A value, or None. Raises CorruptMemory, StoreUnavailable."""
        return None if table == "meta" else self._table(table, key).get(key)

    def scan_checked(
        self, table: str, start: bytes, end: bytes | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values of one document from key `start` to `end` (exclusive), in order; reads
        all values of the document at once. Raises CorruptMemory, StoreUnavailable.
        """
        values = self._table(table, start)
        for key in sorted(values):
            if key >= start and (end is None or key < end):
                yield key, values[key]

    def key_at_or_before(self, table: str, key: bytes) -> bytes | None:
        """The greatest key of the same document at or before `key`, or None."""
        return max((known for known in self._table(table, key) if known <= key), default=None)

    def parts(self, table: str, wanted: Sequence[ValuePart]) -> list[memoryview] | None:
        """Parts of values, read concurrently; None if one is missing. Raises CorruptMemory,
        StoreUnavailable.
        """
        keys = [read_run_key(part.key) for part in wanted]
        entries = {number: self.state.entry(number) for number, _, _ in keys}
        there = {number: entry for number, entry in entries.items() if entry is not None}
        contents = dict(zip(there, self._reads.contents([*there.values()])))
        places = []
        for (number, run, first), part in zip(keys, wanted):
            values = contents[number].values if number in contents else {}
            place = values.get(Value("landmarks", run, first))
            if place is None or place.length < part.start + part.length:
                return None
            start, length = place.offset + part.start, part.length
            places.append(Place(place.name, start, length, part.digest))
        return self._reads.places(places)

    def contents(self, number: int) -> Contents | None:
        """The contents of a document, or None. Raises CorruptMemory, StoreUnavailable."""
        entry = self.state.entry(number)
        return None if entry is None else self._reads.contents([entry])[0]

    def bring(self, documents: Sequence[int], table: str) -> None:
        """Read all values of these documents in a table, concurrently. Raises CorruptMemory,
        StoreUnavailable.
        """
        new = {n: self.state.entry(n) for n in documents if (table, n) not in self._held}
        there = {number: entry for number, entry in new.items() if entry is not None}
        every = self._reads.contents([*there.values()])
        wanted = [{v: p for v, p in each.values.items() if v.kind == table} for each in every]
        read = self._reads.tokens if table == "tokens" else self._reads.places
        data = iter(read([place for values in wanted for place in values.values()]))
        for number, values in zip(there, wanted):
            self._held[table, number] = {_key(number, one): bytes(next(data)) for one in values}

    def _table(self, table: str, key: bytes) -> dict[bytes, bytes]:
        """All values, by key, of a table for one document, which `key` names."""
        number = int.from_bytes(key[:8], "big")
        self.bring([number], table)
        return self._held.get((table, number), {})


def _key(number: int, value: Value) -> bytes:
    """The key of a value of a document."""
    if value.kind == "tokens":
        return tokens_key(number, value.first)
    return run_key(number, value.part, value.first)


class PublishedDatabase:
    """The read-only Database of a PublishedCatalog. Safe for several threads."""

    read_only = True

    def __init__(
        self,
        objects: ObjectStore,
        local: LocalCache | None = None,
        shared: Valkey | None = None,
        *,
        refresh: float = REFRESH,
    ) -> None:
        """Read the newest manifest. local, shared: caches between the host tier and the object
        store; the local one also remembers the newest manifest. refresh: seconds between checks
        for a newer one. Raises MemoryNotFound, CorruptMemory, StaleMemory, NewerFormat,
        OlderFormat, StoreUnavailable.
        """
        self.path, self.objects = objects.url, objects
        self.reads = CachedReads(objects, local, shared)
        self._folder = None if local is None else local.path
        self._looking, self._following = threading.Lock(), threading.Lock()
        self._closed = self._warned = False
        self._looked, self._refresh_after = time.monotonic(), refresh
        newest = read_newest(objects, self._folder)
        self.state = State(newest, {}, {}, 0, 0).next(newest)

    @property
    def version(self) -> Version:
        """The version of the current state. Looks for a newer manifest every `refresh` seconds, in
        the background; after a longer idle time, waits for it for up to two seconds. Raises
        MemoryClosed.
        """
        self._check()
        waited = time.monotonic() - self._looked
        if waited > self._refresh_after and self._looking.acquire(blocking=False):
            looking = threading.Thread(target=self._look, name="memstore-manifest", daemon=True)
            looking.start()
            if waited > self._refresh_after + REFRESH:
                looking.join(_PATIENCE)
        return Version(0, self.state.serial)

    def _look(self) -> None:
        """Refresh; after a failure, the previous state stays."""
        try:
            self.refresh()
            self._warned = False
        except MemstoreError as error:
            if not isinstance(error, StoreUnavailable) and not self._warned:
                self._warned = True
                _log.warning("%s", error)
        finally:
            self._looked = time.monotonic()
            self._looking.release()

    def refresh(self) -> None:
        """Read the newest manifest now, if it changed. Raises what opening raises, WrongModel."""
        newest = known = self.state.manifest
        if newest_number(self.objects) != known.number:
            newest = read_newest(self.objects, self._folder)
            known.check_same(newest, self.path, "open it again")
            if newest.number < known.number:
                raise StaleMemory(
                    f"{self.path}: an older manifest, {newest.number}, was restored; open it again"
                )
        with self._following:
            if newest.number > self.state.manifest.number:
                self.state = self.state.next(newest)
            elif any(until <= time.monotonic() for _, until in self.state.leaving.values()):
                self.state = self.state.next(self.state.manifest)

    @contextmanager
    def read(self) -> "Iterator[Snapshot]":
        """The tables of the current state."""
        self._check()
        yield Snapshot(self.state, self.reads)

    @property
    def file_bytes(self) -> int:
        """Bytes of the records of its documents."""
        return sum(entry.row.bytes for entry in self.state.published.values())

    def close(self) -> None:
        """Close; idempotent."""
        self._closed = True
        self.reads.close()

    def _check(self) -> None:
        if self._closed:
            raise MemoryClosed(f"{self.path} is closed; open it again")
