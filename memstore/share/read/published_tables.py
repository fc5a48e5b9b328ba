"""A published memory seen as the tables of a directory: what a Catalog reads there, it reads here.

Blocks are not among them: they are read by memstore.share.read.published_source.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgpack

from memstore.block import RecordKey
from memstore.disk.format.document import Write
from memstore.disk.lmdb.environment import Version
from memstore.disk.tables.description import FORMAT
from memstore.errors import (
    CorruptMemory,
    DocumentNotFound,
    MemoryClosed,
    MemoryNotFound,
    StoreUnavailable,
)
from memstore.share.caches.local_cache import LocalCache
from memstore.share.calls.failures import Failure
from memstore.share.format.document_pages import Entry, plain_row
from memstore.share.format.manifest import Manifest, newest_number
from memstore.share.format.published import Published
from memstore.share.format.read_pieces import Extent
from memstore.share.format.rollback import note_newest
from memstore.share.publication_options import REFRESH
from memstore.share.read.held_pieces import HeldPieces
from memstore.share.read.passage_numbers import PassagePlaces
from memstore.share.read.published_snapshot import Snapshot, State
from memstore.share.read.remote import Remote

_log = logging.getLogger("memstore")


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
        self.path = remote.objects.url
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
        objects = self.remote.objects

        def read() -> tuple[Published, list[Entry]]:
            before = self._published
            if number is None:
                found = Published.open(objects, cache=self._local, at_least=self._at_least)
            else:
                found = Published.at(objects, number, before)
                note_newest(objects.identity, found.seen, self._local)
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
        number = self.remote.call(lambda: newest_number(self.remote.objects))
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

    def _newest(self) -> State:
        self.refresh()
        return self.state

    @contextmanager
    def read(self) -> "Iterator[Snapshot]":
        """The tables as they are now, for as long as the block lasts."""
        self._check()
        yield Snapshot(self.state, self.pieces, self.places, self._newest)

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
