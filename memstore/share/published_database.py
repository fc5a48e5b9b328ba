"""A publication as a database that follows the newest manifest."""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from memstore.disk.lmdb.environment import Version
from memstore.errors import (
    CorruptMemory,
    DocumentNotFound,
    MemoryClosed,
    MemoryNotFound,
    StoreUnavailable,
)
from memstore.share.entries import Entry
from memstore.share.local_cache import LocalCache
from memstore.share.manifest import newest_number
from memstore.share.piece_reader import PieceReader
from memstore.share.publication_options import REFRESH
from memstore.share.published import Published, note_newest
from memstore.share.published_tables import Snapshot, State
from memstore.share.remote import Remote

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
        self.remote, self.pieces = remote, PieceReader(remote, local)
        self._folder = None if local is None else local.path
        self._lock, self._following = threading.Lock(), threading.Lock()
        self._closed, self._pid = False, os.getpid()
        self._warned = self._looking = False
        self._looked, self._refresh_after = time.monotonic(), refresh

        def newest() -> tuple[Published, list[Entry]]:
            found = Published.open(remote.objects, folder=self._folder, at_least=at_least)
            return found, found.documents()

        # Kept, so that its pages need not be read again for the next manifest.
        self._published, entries = remote.call(newest)
        self.state = State.first(self._published.manifest, entries)

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
        number = self.remote.call(partial(newest_number, self.remote.objects))
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
            read = self.remote.call(partial(self._read_manifest, number))
        with self._following:
            if read is not None and read[0].manifest.number > self.state.manifest.number:
                self._published, entries = read
                self.state = self.state.next(self._published.manifest, entries)
            elif self.state.has_left:
                self.state = self.state.again()

    def _read_manifest(self, number: int) -> tuple[Published, list[Entry]]:
        objects = self.remote.objects
        found = Published.at(objects, number, self._published)
        note_newest(objects.identity, found.seen, self._folder)
        return found, found.documents()

    def look_again(self) -> None:
        """Read the newest state because objects are missing: unpublished documents are dropped at
        once. Raises what refreshing raises.
        """
        self.refresh()
        with self._following:
            if self.state.leaving:
                self.state = self.state.again(drop=True)

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
        """Close; idempotent."""
        self._closed = True

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise MemoryClosed(
                f"{self.path} was opened by process {self._pid}, not by this fork of it"
            )
        if self._closed:
            raise MemoryClosed(f"{self.path} is closed; open it again")
