"""A memory without its model: documents, their landmark index and their blocks in tiers.

Its tables open at once. Its index and tiers open, and torch is imported, at the first lookup or
write.
"""

import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

from memstore.block import BlockKey
from memstore.closing import Closing
from memstore.decode import T
from memstore.disk.files import INDEX, WRITER, remove_index
from memstore.disk.format.document import Document, IngestSettings
from memstore.disk.format.signature import Signature
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.runs import IndexSpec
from memstore.disk.tables.texts import Passage, TokenSpan
from memstore.errors import (
    InvalidInput,
    MemoryClosed,
    MemoryExists,
    MemoryLocked,
    MemoryNotFound,
    MemstoreError,
    ReadOnlyMemory,
)
from memstore.share.publication_options import is_url
from memstore.store.committed import (
    Committed,
    Mode,
    check_metadata,
    check_name,
    check_settings,
    is_there,
    no_document,
)
from memstore.store.open_options import OpenOptions, check_open_options, open_catalog

if TYPE_CHECKING:  # imported where used: most commands need neither these modules nor torch
    from memstore.store.retrieve.retrieval import Retrieval
    from memstore.store.verify import Report
    from memstore.store.writer import DocumentWriter
    from memstore.tiers.cascade import Cascade
    from memstore.tiers.slots import Lease

Names = Sequence[str] | Callable[[], Sequence[str]] | None
"""Names of documents, or a function that returns them; None: every ready document."""


class MemoryStore(Closing):
    """One memory, open in this process; a context manager. Usable from several threads.

    `create`, `open` and `in_memory` open one. Sessions search its `retrieval`. The next call sees
    documents that other processes added, changed or forgot.
    """

    def __init__(self, catalog: Catalog, **options: Unpack[OpenOptions]) -> None:
        """Use MemoryStore.create, open or in_memory."""
        self.signature = catalog.signature
        self.committed = Committed(catalog)
        self._catalog, self._options = catalog, options
        self._retrieval: Retrieval | None = None
        self._building = threading.RLock()
        self._closed = False
        self._removed: Callable[[], object] = lambda: None  # removes a temporary directory

    # Opening and closing

    @classmethod
    def create(
        cls,
        path: Path | str,
        signature: Signature,
        *,
        codec: str = "zstd",
        selector: IndexSpec | None = None,
        exist_ok: bool = False,
        **options: Unpack[OpenOptions],
    ) -> Self:
        """Make a memory for the model with this signature, in a directory that is absent or empty.

        codec: "zstd" or "raw" (lossless), or "int8" (see disk/format/codec.py). selector: the data
        that a selector searches by; None for landmark keys of the model's own layers. exist_ok:
        open a memory of this model that another process made. options: see OpenOptions.

        Raises MemoryExists, InvalidInput, InvalidConfig, ReadOnlyMemory, StorageFull, MemoryLocked,
        BudgetExceeded.
        """
        check_open_options(options, signature)  # before anything is written
        until = time.monotonic() + 60  # for a process that is stopped while it makes one
        while True:
            try:
                catalog = Catalog.create(path, signature, codec=codec, selector=selector)
                return cls(catalog, **options)
            except (MemoryExists, MemoryLocked):
                if not exist_ok or time.monotonic() > until:
                    raise
            with suppress(MemoryNotFound):
                return cls.open(path, signature, **options)
            time.sleep(0.01)  # another process is making it

    @classmethod
    def open(
        cls,
        path: Path | str,
        signature: Signature | None = None,
        *,
        read_only: bool = False,
        **options: Unpack[OpenOptions],
    ) -> Self:
        """Open a memory; with a signature, only if it was made by that model.

        path: its directory, or the URL of a published memory, which opens read-only
        (ShareOptions). options: see OpenOptions.

        Raises MemoryNotFound, WrongModel (names the differences), NewerFormat, OlderFormat,
        CorruptMemory, MemoryLocked, BudgetExceeded, InvalidConfig, InvalidInput; for a URL also
        StoreUnavailable, StaleMemory, StorageFull (the local cache).
        """
        catalog = open_catalog(path, options, read_only=read_only or is_url(path))
        try:
            if signature is not None:
                advice = "ask it with its own model, or make a new memory"
                signature.check_same(catalog.signature, str(path), advice)
            check_open_options(options, catalog.signature)
        except BaseException:
            catalog.close()
            raise
        return cls(catalog, **options)

    @classmethod
    def in_memory(
        cls,
        signature: Signature,
        *,
        selector: IndexSpec | None = None,
        **options: Unpack[OpenOptions],
    ) -> Self:
        """Make a memory in a temporary directory, for blocks of sessions. Raises as `create`."""
        place = tempfile.mkdtemp(prefix="memstore-")
        try:
            store = cls.create(place, signature, selector=selector, **options)
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
        store._removed = weakref.finalize(store, _remove, place, os.getpid())
        return store

    def close(self) -> None:
        """Close; open writers commit their whole chunks first. Idempotent."""
        if self._closed:
            return
        try:
            for writer in list(self.committed.writers.values()):
                writer.close()
        finally:
            self._closed = True
            try:
                if self._retrieval is not None:
                    self._retrieval.tiers.close()
            finally:
                self._catalog.close()
                self._removed()

    # Properties

    @property
    def path(self) -> Path | None:
        """The memory's directory; None for a published memory."""
        return None if self._catalog.source else self._catalog.database.path

    @property
    def place(self) -> str:
        """Its directory, or its URL."""
        return str(self._catalog.database.path)

    @property
    def manifest(self) -> int | None:
        """The manifest's number of a published memory; None for a directory."""
        return self._catalog.manifest

    @property
    def selector(self) -> IndexSpec | None:
        """The data that the selector searches; None for a memory of landmark keys."""
        return self._catalog.index_spec

    @property
    def read_only(self) -> bool:
        """Whether writing is refused, by the caller or by the directory's permissions."""
        return self._catalog.database.read_only

    @property
    def codec(self) -> str:
        """The codec of newly written blocks."""
        return self._catalog.codec

    def stats(self) -> dict[str, Any]:
        """Sizes of the memory, and lookups since it was opened, as plain values.

        "bytes": record bytes. "passages": distinct passages, how many have stored keys and values,
        bytes of these, and how many passages sessions computed, of which "damaged" ones and those
        that an unavailable object store did not return ("away"). "landmarks": bytes of landmark
        keys in main memory. "tiers" is absent before the first lookup.
        """
        documents, held = self.documents(), self._catalog.counts()
        passages = {"different": held.passages, "stored": held.stored, "bytes": held.bytes}
        unused: dict[str, Any] = {"landmarks": 0, "tiers": {}, "index": {"searches": 0, "rows": 0}}
        looked_up = unused if self._retrieval is None else self._retrieval.describe()
        passages |= looked_up.pop("computed", {"computed": 0, "damaged": 0, "away": 0})
        return {
            "model": None if self.signature.model is None else self.signature.model.title,
            "documents": len(documents),
            "tokens": sum(document.tokens for document in documents),
            "blocks": sum(document.blocks for document in documents),
            "bytes": held.bytes + sum(one.bytes for one in documents if not one.of_passages),
            "passages": passages,
            "file_bytes": self._catalog.database.file_bytes,
            "codec": self.codec,
            "manifest": self.manifest,
            **looked_up,
        }

    # Lookups

    @property
    def retrieval(self) -> "Retrieval":
        """Search and leases for sessions, over the documents of the latest commit."""
        self._refresh()
        return self._opened_retrieval

    @property
    def tiers(self) -> "Cascade":
        """The tiers that leases are taken from."""
        return self._opened_retrieval.tiers

    def tier_stats(self) -> dict[str, dict[str, int | float]]:
        """Lookups by tier since the memory was opened, top first: the fields of TierStats; caches
        also have "held" and "budget", in bytes.
        """
        return self.tiers.stats()

    def lease(self, units: Sequence[BlockKey]) -> "Lease":
        """Pin these units (repeats allowed) in slots of the top tier until the lease is released.

        Units carry the document and block numbers that `Retrieval.stored_at` returns. Raises
        BudgetExceeded (its `fits`: how many distinct units would fit), DocumentNotFound,
        CorruptBlock.
        """
        return self.retrieval.tiers.top.lease(units)

    def build_index(
        self, top_k: int = 4, progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Any]:
        """Rebuild and save the index's engines over every document, trained with the queries of
        `Retrieval.sampled_queries`; with a selector, the lists of a two-stage search. Return a
        description of what was built.

        top_k: blocks that a search returns. progress: called with (layers done, layers), or
        (tokens done, tokens).

        Raises InvalidInput for an index that builds nothing ("packed") or without FAISS,
        CorruptMemory, ReadOnlyMemory, StorageFull.
        """
        retrieval = self.retrieval
        if self._catalog.source is None:
            self.writable()
        return retrieval.build(top_k, progress)

    def update_index(self) -> bool:
        """Whether `build_index` should run: the memory is large and many documents changed."""
        return self.retrieval.update_engines()

    # Reading documents

    def documents(self) -> list[Document]:
        """Every document, ready or still being ingested, oldest first."""
        self._refresh()
        return [*(self.committed.listed or self.committed.list_rows())]

    def ready(self, names: Names = None, *, to: str | None = None) -> list[Document]:
        """The named documents, each once, or every ready one, oldest first.

        to: a verb for the error message; with it, an empty result is an error. Raises InvalidInput
        for a named document that is not ready, DocumentNotFound.
        """
        names = names() if callable(names) else names
        if names is None:
            found = [document for document in self.documents() if document.state == "ready"]
            if to is not None and not found:
                raise InvalidInput(
                    f"the memory holds no finished document to {to}; run ingest first"
                )
            return found
        if isinstance(names, str | bytes) or not isinstance(names, Iterable):
            raise InvalidInput(f"documents is {names!r}; give a list of names: ['{names}']")
        found = [self.document(name) for name in dict.fromkeys(names)]
        for document in found:
            if document.state != "ready":
                raise InvalidInput(
                    f"document {document.name!r} is partly ingested; run ingest again to finish it"
                )
        return found

    def has(self, name: str) -> bool:
        """Whether a document of this name exists, ready or still being ingested."""
        return any(row.is_listed for row in self._named(name))

    def interrupted(self, document: Document) -> bool:
        """Whether a document is partly ingested, and no process is writing it. False if that cannot
        be found out.
        """
        database = self._catalog.database
        if document.state != "ingesting" or document.name in database.names_written:
            return False
        lock = database.path / WRITER  # a writer that ends in order empties it
        held = lock.exists() and lock.stat().st_size
        with suppress(MemstoreError), database.writer() if held else nullcontext():
            return document in self._named(document.name)
        return False

    def document(self, name: str | int) -> Document:
        """One document by name or id. Raises DocumentNotFound, which lists the memory's names.

        An unpublished document is found by its id for some minutes, so that sessions which use it
        can finish.
        """
        if isinstance(name, int):
            return self._read(name, lambda txn, row: row)
        for row in self._named(name):
            if row.is_listed:
                return row
        raise no_document(name, self.documents(), self.place)

    def tokens(self, document: str | int, first: int = 0, end: int | None = None) -> TokenSpan:
        """Content tokens `first` to `end` of a document without passages (by name or id), and the
        offset of their first character. Raises DocumentNotFound, CorruptMemory.
        """
        return self._read(document, self._catalog.texts.tokens, first, end)

    def passages(
        self, document: str | int, first: int = 0, end: int | None = None
    ) -> list[Passage]:
        """Passages `first` to `end` of a document (by name or id), one a block. Raises
        DocumentNotFound, CorruptMemory, InvalidInput for a document without passages.
        """
        return self._read(document, self._catalog.texts.passages, first, end)

    def _read(self, document: str | int, read: Callable[..., T], *span: int | None) -> T:
        """Call `read` for a document, in one transaction. Raises DocumentNotFound."""
        self._check_open()
        catalog = self._catalog
        while True:  # again where the document was replaced concurrently: its number has changed
            number = self.document(document).id if isinstance(document, str) else document
            with catalog.database.read() as txn:
                named = isinstance(document, str)
                row = catalog.row(txn, number) if named else catalog.document(txn, number)
                if row is not None:
                    return read(txn, row, *span)

    # Writing documents

    def write_document(
        self,
        name: str,
        *,
        source_hash: str,
        settings: IngestSettings,
        mode: Mode = "new",
        metadata: dict[str, Any] | None = None,
        commit_bytes: int | None = None,
    ) -> "DocumentWriter | None":
        """Begin a document, or resume an interrupted one with the same settings; None if the memory
        has the same content already.

        source_hash: hash of the content. mode: "new", or "replace" (the old content answers until
        the new content is complete). metadata: plain values for its row. commit_bytes: approximate
        size of a transaction; default writer.COMMIT_BYTES.

        One process may write several documents at once; no other process can write until the last
        writer is closed. Raises DocumentExists, InvalidInput, ReadOnlyMemory, MemoryLocked (also
        for a document that is being written), StorageFull.
        """
        check_name(name)
        check_metadata(metadata or {})
        check_settings(settings, mode, self.signature, self.selector)
        # before any lock: the answer also holds for a memory that is read-only or being written
        if any(is_there(row, source_hash, settings, mode) for row in self._named(name)):
            return None
        committed, codec = self.writable(), self.codec if settings.passage_tokens else ""
        wanted = Document(
            0, name, "ingesting", source_hash=source_hash, metadata=metadata or {},
            settings=settings, codec=codec,
        )  # fmt: skip
        return committed.begin(self.retrieval, wanted, mode, commit_bytes)

    def describe(self, name: str, metadata: dict[str, Any]) -> Document:
        """Replace a document's metadata, and return the document; equal metadata write nothing.

        Raises DocumentNotFound, InvalidInput (values that are not plain), ReadOnlyMemory,
        MemoryLocked, StorageFull.
        """
        check_metadata(metadata)
        document = self.document(name)
        if document.stored_as(replace(document, metadata=metadata)):
            return document
        committed = self.writable()
        with committed.writing(name):
            document = replace(self.document(name), metadata=metadata)
            catalog = committed.catalog
            catalog.database.write(lambda txn: catalog.put_document(txn, document))
        self._refresh()
        return document

    def forget(self, name: str, *, erase: bool = False) -> Document:
        """Delete a document's blocks, landmark keys and tokens; no later answer uses them. Return
        its last row.

        Until `compact`, the file keeps its size and, on pages not yet reused, bytes of the
        document. erase: also rewrite the file without any byte of it, and remove the index files,
        which were built from all documents; all or nothing, and no other process may have the
        memory open. Raises DocumentNotFound, ReadOnlyMemory, MemoryLocked, StorageFull (erase).
        """
        committed = self.writable()
        catalog = committed.catalog
        with committed.writing(name):
            document = self.document(name)
            numbers = [row.id for row in self._named(name)]  # unfinished rows, too

            def work(txn: Transaction) -> None:
                for number in numbers:
                    catalog.delete_document(txn, number)

            if erase:
                path = catalog.database.path
                catalog.database.rewrite(work, before_switch=lambda: remove_index(path))
            else:
                catalog.database.write(work)
        self._refresh()
        return document

    # Maintenance

    def compact(self) -> tuple[int, int]:
        """Rewrite the file without the free pages and bytes of forgotten documents; return its
        bytes before and after. No other process may have the memory open. Raises MemoryLocked,
        StorageFull, ReadOnlyMemory.
        """
        committed = self.writable()
        database = committed.catalog.database
        with database.writer():
            before = database.file_bytes
            committed.follow()
            if (database.path / INDEX).exists() and self.retrieval.tells_of_gone():
                remove_index(database.path)
            database.rewrite()
        committed.follow()
        return before, database.file_bytes

    def verify(self, *, repair: bool = False) -> "Report":
        """Check all stored data; with `repair`, drop damaged documents whole. See `verify_memory`,
        which also checks a memory that cannot be opened.
        """
        from memstore.store.verify import verify_memory

        self._check_open()
        if repair and not is_url(self.place) and self.writable().catalog.database.names_written:
            raise MemoryLocked(
                f"{self.place} is being written by this process; finish that document first"
            )
        report = verify_memory(self.place, repair=repair)
        self._refresh()
        return report

    # Shared by the methods above

    def _refresh(self) -> None:
        """Take in what any process committed. Raises MemoryClosed, CorruptMemory."""
        self._check_open()
        if self._catalog.database.version != self.committed.version:  # nearly free
            self.committed.follow()

    def _named(self, name: str) -> list[Document]:
        if not isinstance(name, str):
            raise InvalidInput(f"a document's name is a str, not {name!r:.50}")
        self._refresh()
        return self.committed.named(name)

    @property
    def _opened_retrieval(self) -> "Retrieval":
        """The index and the tiers, opened at the first call, as of the last refresh."""
        if self._retrieval is not None:
            return self._retrieval
        from memstore.store.retrieve.retrieval import Retrieval

        with self._building:
            self._check_open()
            if self._retrieval is None:
                opened = Retrieval(self._catalog, self._options)
                try:
                    self.committed.attach(opened)
                except BaseException:
                    opened.tiers.close()
                    raise
                self._retrieval = opened
            return self._retrieval

    def writable(self) -> Committed:
        """The committed documents, for writing. Raises ReadOnlyMemory for a read-only memory."""
        self._check_open()
        if self.read_only:
            if self._catalog.source is not None:
                raise ReadOnlyMemory(
                    f"{self.place} is a published memory, which is read-only; write into a "
                    "directory and publish that"
                )
            raise ReadOnlyMemory(f"{self.place} is open for reading only; open it for writing")
        return self.committed

    def _check_open(self) -> None:
        if self._closed:
            raise MemoryClosed(f"{self.place} is closed; open it again")


def _remove(place: str, process: int) -> None:
    """Remove a temporary directory, unless this is a fork of the process that made it."""
    if os.getpid() == process:
        shutil.rmtree(place, ignore_errors=True)
