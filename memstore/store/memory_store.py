"""A memory: documents, their landmark index and their blocks in tiers, behind one object that never
sees a model.

Its tables are open at once, its index and its tiers when something is first looked up or written,
and torch is not imported before.
"""

import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

from memstore.block import BlockKey
from memstore.closing import Closing
from memstore.decode import T
from memstore.disk.files import INDEX, remove_index
from memstore.disk.format.document import Document, IngestSettings
from memstore.disk.format.runs import IndexSpec
from memstore.disk.format.signature import Signature
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.texts import Passage, TokenSpan
from memstore.errors import InvalidInput, MemoryClosed, MemoryLocked, ReadOnlyMemory
from memstore.share.publication_options import is_url
from memstore.store.committed import Committed
from memstore.store.open_options import OpenOptions, check_open_options, open_catalog
from memstore.store.write import admission
from memstore.store.write.admission import Mode

if TYPE_CHECKING:  # imported where it is used: most commands need none of it, or torch
    from memstore.store.retrieve.retrieval import Retrieval
    from memstore.store.verify import Report
    from memstore.store.write.writer import DocumentWriter
    from memstore.tiers.cascade import Cascade
    from memstore.tiers.slots import Lease


class MemoryStore(Closing):
    """One memory, open in this process; a context manager. Usable from several threads.

    `create`, `open` and `in_memory` open one. Sessions look up in its `retrieval`. Documents that
    other processes add, change or forget are noticed at the next call.
    """

    def __init__(self, catalog: Catalog, **options: Unpack[OpenOptions]) -> None:
        """Use MemoryStore.create, open or in_memory."""
        self.signature = catalog.signature
        self.committed = Committed(catalog)
        self._catalog, self._options = catalog, options
        self._retrieval: Retrieval | None = None
        self._building = threading.RLock()
        self._closed = False
        self._removed: Callable[[], object] = lambda: None  # a temporary directory

    # Opening and closing

    @classmethod
    def create(
        cls,
        path: Path | str,
        signature: Signature,
        *,
        codec: str = "zstd",
        selector: IndexSpec | None = None,
        **options: Unpack[OpenOptions],
    ) -> Self:
        """Make a new memory in a directory that is absent or empty, for the model with this
        signature.

        codec: "zstd" or "raw" (lossless), or "int8" (see disk/format/codec.py). selector: what
        blocks are found by, if not by landmark keys of the model's own layers. options: see
        OpenOptions.

        Raises MemoryExists, InvalidInput, InvalidConfig, ReadOnlyMemory, StorageFull, MemoryLocked,
        BudgetExceeded.
        """
        check_open_options(options, signature)  # a bad option leaves nothing behind
        catalog = Catalog.create(path, signature, codec=codec, selector=selector)
        return cls(catalog, **options)

    @classmethod
    def open(
        cls,
        path: Path | str,
        signature: Signature | None = None,
        *,
        read_only: bool = False,
        **options: Unpack[OpenOptions],
    ) -> Self:
        """Open a memory; with a signature, only if it is of that model.

        path: its directory, or the URL of a published memory, which is only read (ShareOptions).
        options: see OpenOptions.

        Raises MemoryNotFound, WrongModel (says what differs), NewerFormat, OlderFormat,
        CorruptMemory, MemoryLocked, BudgetExceeded, InvalidConfig, InvalidInput; of a URL also
        StoreUnavailable, StaleMemory, StorageFull (the local cache).
        """
        catalog = open_catalog(path, options, read_only=read_only or is_url(path))
        try:
            if signature is not None:
                advice = "ask it with its own, or make a new memory"
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
        """A memory for the blocks of sessions, in a temporary directory. Raises as `create`."""
        place = tempfile.mkdtemp(prefix="memstore-")
        try:
            store = cls.create(place, signature, selector=selector, **options)
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
        store._removed = weakref.finalize(store, _remove, place, os.getpid())
        return store

    def close(self) -> None:
        """Close; writers still open commit their whole chunks first. Idempotent."""
        if self._closed:
            return
        try:
            for writer in list(self.committed.writers.values()):
                writer.close()
        finally:
            self._closed = True
            try:
                if self._retrieval is not None:
                    self._retrieval.close()
            finally:
                self._catalog.close()
                self._removed()

    # What it is

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
        """The number of the manifest that a published memory is read by; None for a directory."""
        return self._catalog.manifest

    @property
    def selector(self) -> IndexSpec | None:
        """What blocks are found by; None where it is landmark keys of the model's own layers."""
        return self._catalog.index_spec

    @property
    def read_only(self) -> bool:
        """Whether writing is refused: asked for at opening, or the directory cannot be written."""
        return self._catalog.database.read_only

    @property
    def codec(self) -> str:
        """How blocks are stored from now on."""
        return self._catalog.codec

    def stats(self) -> dict[str, Any]:
        """What the memory holds and what was looked up since it was opened, as plain values.

        "bytes": of the records. "passages": how many different ones there are, of how many keys and
        values are stored, their bytes, and how many sessions computed, among them damaged ones and
        those that a published memory could not be asked for ("away"). "landmarks": bytes of
        landmark keys in main memory. Where nothing was looked up yet there are no "tiers".
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
        """What sessions look up in, over the documents as they are now."""
        self._refresh()
        return self._opened_retrieval

    @property
    def tiers(self) -> "Cascade":
        """The tiers that leases come from."""
        return self._opened_retrieval.tiers

    def tier_stats(self) -> dict[str, dict[str, int | float]]:
        """Lookups by tier since the memory was opened, top first: the fields of TierStats; caches
        also have "held" and "budget", in bytes.
        """
        return self.tiers.stats()

    def lease(self, units: Sequence[BlockKey]) -> "Lease":
        """Slots of the top tier that hold these units (repeats allowed) until the lease is
        released; of blocks of documents under the numbers that `Retrieval.stored_at` returns.
        Raises BudgetExceeded (its `fits` says how many distinct units would fit), DocumentNotFound,
        CorruptBlock.
        """
        return self.retrieval.tiers.lease(units)

    def build_index(
        self, top_k: int = 4, progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Any]:
        """Build the index's engines again over every document, for the queries that
        `Retrieval.sampled_queries` kept, and save them; of a memory with a selector, the lists of a
        two-stage search. Return what was built.

        top_k: blocks wanted of a search. progress: called with (layers done, layers), or (tokens
        done, tokens).

        Raises InvalidInput for an index that builds nothing ("packed") or without FAISS,
        CorruptMemory, ReadOnlyMemory, StorageFull.
        """
        retrieval = self.retrieval
        if self._catalog.source is None:
            self.writable()
        return retrieval.build(top_k, progress)

    def update_index(self) -> bool:
        """Should `build_index` run, because many documents have changed since it last ran?

        Builds nothing itself; False for a small memory.
        """
        return self.retrieval.update_engines()

    # Reading documents

    def documents(self) -> list[Document]:
        """Every document, ready or still being read, oldest first."""
        self._refresh()
        return [*(self.committed.listed or self.committed.list_rows())]

    def ready(self, names: Sequence[str] | None = None, *, to: str | None = None) -> list[Document]:
        """The named documents, or every one that is read to its end, oldest first.

        to: what they are wanted for, where none at all is an error. Raises InvalidInput for a named
        one that is not read to its end, DocumentNotFound.
        """
        if names is None:
            found = [document for document in self.documents() if document.state == "ready"]
            if to is not None and not found:
                raise InvalidInput(
                    f"the memory holds no finished document to {to}; run ingest first"
                )
            return found
        if isinstance(names, str):  # or its letters would be looked for
            raise InvalidInput(f"documents is a string; give a list of names: [{names!r}]")
        found = [self.document(name) for name in names]
        for document in found:
            if document.state != "ready":
                raise InvalidInput(
                    f"document {document.name!r} is only partly read; run ingest again to finish it"
                )
        return found

    def has(self, name: str) -> bool:
        """Is there a document of this name, ready or still being read?"""
        return any(row.is_listed for row in self._named(name))

    def document(self, name: str | int) -> Document:
        """One document by name, or by id. Raises DocumentNotFound, which lists the names there are.

        An unpublished document is found by its id for some minutes: sessions that have begun to
        read it go on.
        """
        if isinstance(name, int):
            return self._read(name, lambda txn, row: row)
        for row in self._named(name):
            if row.is_listed:
                return row
        raise admission.no_document(name, self.documents(), self.place)

    def tokens(self, document: str | int, first: int = 0, end: int | None = None) -> TokenSpan:
        """Content tokens `first` to `end` of a document without passages (by name or id), and where
        their characters begin. Raises DocumentNotFound, CorruptMemory.
        """
        return self._read(document, self._catalog.texts.tokens, first, end)

    def passages(
        self, document: str | int, first: int = 0, end: int | None = None
    ) -> list[Passage]:
        """Passages `first` to `end` of a document (by name or id), a block each. Raises
        DocumentNotFound, CorruptMemory, InvalidInput for a document without passages.
        """
        return self._read(document, self._catalog.texts.passages, first, end)

    def _read(self, document: str | int, read: Callable[..., T], *span: int | None) -> T:
        """What is read of a document in one transaction. Raises DocumentNotFound."""
        self._check_open()
        catalog = self._catalog
        while True:  # a document that was replaced meanwhile has its name under another number
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
        """Begin a document, or continue an interrupted one with the same settings; None if the same
        content is there already.

        source_hash: of the content. mode: "new"; "replace" (the old content answers until the new
        one is whole). metadata: plain values of its row.
        commit_bytes: of a transaction, about; default writer.COMMIT_BYTES.

        Several documents may be written at once by one process, and no other process can write
        until the last is closed. Raises DocumentExists, InvalidInput, ReadOnlyMemory,
        MemoryLocked (also for a document that is being written), StorageFull.
        """
        admission.check_name(name)
        if mode not in ("new", "replace"):
            raise InvalidInput(f"mode {mode!r} is unknown; choose new or replace")
        admission.check_metadata(metadata or {})
        admission.check_settings(settings, self.signature, self.selector)
        # asked before taking a lock: it also holds for a memory that is read-only or being written
        if any(admission.is_there(row, source_hash, settings, mode) for row in self._named(name)):
            return None
        committed, codec = self.writable(), self.codec if settings.passage_tokens else ""
        wanted = Document(
            0, name, "ingesting", source_hash=source_hash, metadata=metadata or {},
            settings=settings, codec=codec,
        )  # fmt: skip
        return committed.begin(self.retrieval, wanted, mode, commit_bytes)

    def describe(self, name: str, metadata: dict[str, Any]) -> Document:
        """Change what the row of a document says of it (`Document.metadata`), and return it; equal
        metadata write nothing.

        Raises DocumentNotFound, InvalidInput (no plain values), ReadOnlyMemory, MemoryLocked,
        StorageFull.
        """
        admission.check_metadata(metadata)
        document = self.document(name)
        if document.metadata == metadata:
            return document
        committed = self.writable()
        with committed.writing(name):
            document = replace(self.document(name), metadata=metadata)
            catalog = committed.catalog
            catalog.database.write(lambda txn: catalog.put_document(txn, document))
        self._refresh()
        return document

    def forget(self, name: str, *, erase: bool = False) -> Document:
        """Delete a document's blocks, landmark keys and tokens; no later answer reads them. Return
        what it was.

        The file keeps its size, and bytes of the document on pages that are not used again yet,
        until `compact`. erase: rewrite the file without any byte of it, and remove the index files,
        which are built from all documents; all or nothing, and the memory is needed alone. Raises
        DocumentNotFound, ReadOnlyMemory, MemoryLocked, StorageFull (erase).
        """
        committed = self.writable()
        catalog = committed.catalog
        with committed.writing(name):
            document = self.document(name)
            numbers = [row.id for row in committed.named(name)]  # also what is half read

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
        """Rewrite the file without the room, and the bytes, that forgotten documents left; return
        its bytes before and after. Needs the memory to itself. Raises MemoryLocked, StorageFull,
        ReadOnlyMemory.
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
        """Check everything that is stored; with `repair`, drop damaged documents whole. See
        verify_memory, which also takes a memory that cannot be opened.
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

    # What the rest begins with

    def _refresh(self) -> None:
        """Notice what was committed. Raises MemoryClosed, CorruptMemory."""
        self._check_open()
        if self._catalog.database.version != self.committed.version:  # nearly free
            self.committed.follow()

    def _named(self, name: str) -> list[Document]:
        self._refresh()
        return self.committed.named(name)

    @property
    def _opened_retrieval(self) -> "Retrieval":
        """The index and the tiers, opened if need be, as they were last brought up to date."""
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
                    opened.close()
                    raise
                self._retrieval = opened
            return self._retrieval

    def writable(self) -> Committed:
        """The documents, to write to. Raises ReadOnlyMemory where the memory can only be read."""
        self._check_open()
        if self.read_only:
            if self._catalog.source is not None:
                raise ReadOnlyMemory(
                    f"{self.place} is a published memory, which is only read; write into a "
                    "directory and publish that"
                )
            raise ReadOnlyMemory(f"{self.place} is open for reading only; open it for writing")
        return self.committed

    def _check_open(self) -> None:
        if self._closed:
            raise MemoryClosed(f"{self.place} is closed; open it again")


def _remove(place: str, process: int) -> None:
    """Remove a temporary directory, unless this is a fork of the process that has it open."""
    if os.getpid() == process:
        shutil.rmtree(place, ignore_errors=True)
