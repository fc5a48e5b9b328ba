"""A publication as a database that follows the newest manifest."""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from memstore.disk.lmdb.environment import Version
from memstore.errors import MemoryClosed, MemstoreError
from memstore.share.cached_reads import CachedReads
from memstore.share.local_cache import LocalCache
from memstore.share.manifest import newest_number, read_manifest, read_newest
from memstore.share.newest_seen import note_newest
from memstore.share.object_store import ObjectStore
from memstore.share.piece_reader import PieceReader
from memstore.share.publication_options import REFRESH
from memstore.share.published_tables import Snapshot, State
from memstore.share.valkey import Valkey

_log = logging.getLogger("memstore")
_PATIENCE = 2.0  # seconds that an idle reader waits for a newer manifest


class PublishedDatabase:
    """The read-only Database of a PublishedCatalog. May be used by several threads."""

    read_only = True

    def __init__(
        self,
        objects: ObjectStore,
        local: LocalCache | None = None,
        shared: Valkey | None = None,
        *,
        refresh: float = REFRESH,
        at_least: int | None = None,
    ) -> None:
        """Read the newest manifest. local, shared: caches between the host tier and the object
        store; the local one also remembers the newest manifest. refresh: seconds after which a
        newer one is looked for. at_least: the lowest number to accept, whatever was read before.
        Raises MemoryNotFound, CorruptMemory, StaleMemory, NewerFormat, OlderFormat,
        StoreUnavailable.
        """
        self.path, self.objects = objects.url, objects
        self.reads = CachedReads(objects, local, shared)
        self.pieces = PieceReader(self.reads)
        self._folder = None if local is None else local.path
        self._lock, self._following = threading.Lock(), threading.Lock()
        self._closed, self._pid = False, os.getpid()
        self._warned = self._looking = False
        self._looked, self._refresh_after = time.monotonic(), refresh
        self.state = State.first(read_newest(objects, folder=self._folder, at_least=at_least))

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
        except MemstoreError:
            pass  # the state before is read on
        finally:
            with self._lock:
                self._looked, self._looking = time.monotonic(), False

    def refresh(self) -> None:
        """Read the newest manifest now, if it is newer. An older one is logged, once, and not read.
        Raises what opening raises.
        """
        held, number = self.state.manifest.number, newest_number(self.objects)
        if (number is None or number < held) and not self._warned:
            self._warned = True
            _log.warning(
                "%s: its newest manifest is %s, but %d was read before, so somebody has put back "
                "an older state; publish again",
                self.path,
                number or "gone",
                held,
            )
        newest = None
        if number is not None and number > held:
            newest = read_manifest(self.objects, number)
            note_newest(self.objects.identity, newest.seen, self._folder)
        with self._following:
            if newest is not None and newest.number > self.state.manifest.number:
                self.state = self.state.next(newest)
            elif self.state.has_left:
                self.state = self.state.next(self.state.manifest)

    def look_again(self) -> None:
        """Read the newest state because objects are missing: unpublished documents are dropped at
        once. Raises what refreshing raises.
        """
        self.refresh()
        with self._following:
            if self.state.leaving:
                self.state = self.state.without_leaving()

    @contextmanager
    def read(self) -> "Iterator[Snapshot]":
        """The tables of the current state, until the block ends."""
        self._check()
        yield Snapshot(self.state, self.pieces)

    @property
    def file_bytes(self) -> int:
        """Bytes of the records of its documents."""
        return sum(entry.row.bytes for entry in self.state.published.values())

    def close(self) -> None:
        """Write to the caches what was read, and close; idempotent."""
        self._closed = True
        self.reads.close()

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise MemoryClosed(
                f"{self.path} was opened by process {self._pid}, not by this fork of it"
            )
        if self._closed:
            raise MemoryClosed(f"{self.path} is closed; open it again")
