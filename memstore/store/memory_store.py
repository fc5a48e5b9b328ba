"""A memory: documents, their landmark index and their blocks in tiers, behind one object that never
sees a model.
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, cast

import torch
from torch import Tensor

from memstore.block import BlockKey
from memstore.devices import usable_device
from memstore.disk.catalog import Catalog, Document, IngestSettings
from memstore.disk.database import Transaction
from memstore.disk.signature import Signature
from memstore.errors import (
    BudgetExceeded,
    CorruptMemory,
    DocumentExists,
    DocumentNotFound,
    InvalidInput,
    MemoryClosed,
    MemoryLocked,
    ReadOnlyMemory,
    WrongModel,
)
from memstore.index import FaissIndex, Hits, LandmarkIndex, Scope, make_index
from memstore.index.engines import Engines
from memstore.store.transfer import export_document, import_document, read_head
from memstore.store.verify import Problem, Report, verify_memory
from memstore.store.writer import COMMIT_BYTES, DocumentWriter, RecentBlocks, TokenSpan, read_tokens
from memstore.tiers.base import Lease, UnitSource
from memstore.tiers.cascade import HOST_BUDGET, Cascade, Predictor, TierOptions, check_options
from memstore.tiers.disk import DiskTier
from memstore.tiers.raw_bits import from_raw, torch_dtype
from memstore.tiers.stats import TierStats

__all__ = [
    "DocumentWriter",
    "MemoryStore",
    "Problem",
    "RecentBlocks",
    "Report",
    "ScratchDocument",
    "TokenSpan",
]

_PIN_BATCH = 256  # units read at once
_writing: set[Path] = set()  # directories that a DocumentWriter of this process is writing to
_writing_lock = threading.Lock()


class OpenOptions(TierOptions, total=False):
    """Settings of a store's index and tiers."""

    index: str  # a kind of memstore.index.INDEX_KINDS; default "auto"
    # share of the true top blocks that an approximate index shall find; default 0.95, or as built
    index_recall: float


class MemoryStore:
    """One memory, open in this process; a context manager. Usable from several threads.

    Documents that other processes add, change or forget are noticed at the next call.
    """

    def __init__(
        self,
        catalog: Catalog | None,
        signature: Signature,
        *,
        read_only: bool,
        **options: Unpack[OpenOptions],
    ) -> None:
        """Use MemoryStore.create, open or in_memory."""
        self.signature = signature
        self._catalog = catalog
        self._read_only = read_only
        # Searched in float32, or in float64 where keys are stored so (to check the mathematics).
        precision = torch.promote_types(torch_dtype(signature.kv_dtype), torch.float32)
        kind, recall = options.pop("index", "auto"), options.pop("index_recall", None)
        self._index: LandmarkIndex = make_index(
            kind,
            signature.num_kv_heads,
            signature.head_dim,
            precision,
            recall=recall,
            device=usable_device(options.get("device") or "cpu"),
        )
        self._engines: Engines | None = None
        self._tiers = Cascade(
            None if catalog is None else DiskTier(catalog),
            block_size=signature.block_size,
            head_dim=signature.head_dim,
            dtype=torch_dtype(signature.kv_dtype),
            **cast(TierOptions, options),
        )
        self._scratch_ids = itertools.count(-1, -1)
        self._refreshing = threading.RLock()
        self._seen = -1  # number of the last transaction whose documents are loaded
        self._rows: dict[int, Document] = {}  # every visible document, as last seen
        # ready documents whose landmark keys are in the index
        self._loaded: dict[int, Document] = {}
        self._writers: dict[int, DocumentWriter] = {}  # documents being written by this store
        self._closed = False
        self._wait_for_writer = False

    # Opening

    @classmethod
    def create(
        cls,
        path: Path | str,
        signature: Signature,
        *,
        codec: str = "zstd",
        quota: int | None = None,
        **options: Unpack[OpenOptions],
    ) -> Self:
        """Make a new memory in a directory that is absent or empty, for the model with this
        signature.

        codec: "zstd" or "raw" (lossless), "int8", "int4", "int8+zstd" or "int4+zstd" (see
        memstore.disk.codec). quota: bytes that the memory's file may reach. options: see
        OpenOptions.

        Raises MemoryExists, InvalidInput, InvalidConfig, ReadOnlyMemory, StorageFull, MemoryLocked,
        BudgetExceeded.
        """
        check_options(options)
        _refuse_small_budget(signature, options)
        # a bad option leaves nothing behind
        store = cls(None, signature, read_only=False, **options)
        try:
            store._catalog = Catalog.create(path, signature, codec=codec, quota=quota)
            store._tiers.replace_disk(DiskTier(store._catalog))
            store._find_engines()
            store._refresh()
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def open(
        cls,
        path: Path | str,
        signature: Signature | None = None,
        *,
        read_only: bool = False,
        wait_for_writer: bool = False,
        **options: Unpack[OpenOptions],
    ) -> Self:
        """Open a memory; with a signature, only if it is of that model.

        wait_for_writer: writing waits while another process writes, instead of raising
        MemoryLocked. options: see OpenOptions.

        Raises MemoryNotFound, WrongModel (says what differs), NewerFormat, CorruptMemory,
        MemoryLocked, BudgetExceeded, InvalidConfig.
        """
        catalog = Catalog.open(path, read_only=read_only)
        try:
            differences = [] if signature is None else signature.difference(catalog.signature)
            if differences:
                raise WrongModel(
                    f"{path} was written by another model: this one has {'; '.join(differences)}; "
                    "open it with its own model, or make a new memory"
                )
            _refuse_small_budget(catalog.signature, options)
        except BaseException:
            catalog.close()
            raise
        try:
            store = cls(catalog, catalog.signature, read_only=read_only, **options)
            store._find_engines()
            store._refresh()
        except BaseException:
            catalog.close()
            raise
        store._wait_for_writer = wait_for_writer
        return store

    @classmethod
    def in_memory(
        cls, signature: Signature, source: UnitSource | None = None, **options: Unpack[OpenOptions]
    ) -> Self:
        """A memory without a directory, that holds only its sessions' own blocks. Raises
        BudgetExceeded.

        source: read from below the host tier, as the disk would be: documents of it have positive
        numbers, and are found once `add_landmarks` has told their landmark keys.
        """
        store = cls(None, signature, read_only=True, **options)
        if source is not None:
            store._tiers.host.source = source
        store._find_engines()
        return store

    def close(self) -> None:
        """Close; writers still open commit their whole chunks first. More than once is the same as
        once.
        """
        if not self._closed:
            try:
                for writer in list(self._writers.values()):
                    writer.close()
            finally:
                self._closed = True
                try:
                    self._tiers.close()
                finally:
                    if self._catalog is not None:
                        self._catalog.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def path(self) -> Path | None:
        """The memory's directory; None for one without."""
        return None if self._catalog is None else self._catalog.database.path

    @property
    def read_only(self) -> bool:
        """Whether writing is refused: asked for at opening, or the directory cannot be written."""
        return self._catalog is None or self._catalog.database.read_only

    @property
    def quota(self) -> int | None:
        """Bytes that the memory's file may reach; None for no bound."""
        return None if self._catalog is None else self._catalog.quota

    @property
    def codec(self) -> str | None:
        """How blocks are stored from now on; None for a memory without a directory."""
        return None if self._catalog is None else self._catalog.codec

    def set_quota(self, quota: int | None) -> None:
        """Change the quota, for good. Raises ReadOnlyMemory, MemoryLocked."""
        self._on_disk().set_quota(quota)

    # Documents

    def documents(self) -> list[Document]:
        """Every document, ready or still being read, oldest first."""
        self._refresh()
        return [self._rows[number] for number in sorted(self._rows)]

    def document(self, name: str) -> Document:
        """One document by name. Raises DocumentNotFound, which lists the names there are."""
        documents = self.documents()
        for document in documents:
            if document.name == name:
                return document
        where = "this memory" if self.path is None else str(self.path)
        names = ", ".join(repr(d.name) for d in documents[:20]) + (
            ", ..." if len(documents) > 20 else ""
        )
        raise DocumentNotFound(
            f"no document {name!r} in {where}; "
            + (f"there are {names}" if names else "it holds none")
        )

    def tokens(self, document: str | int, first: int = 0, end: int | None = None) -> TokenSpan:
        """Content tokens `first` to `end` of a document (by name or id), and where their characters
        begin.

        Raises DocumentNotFound, CorruptMemory.
        """
        catalog = self._on_disk()
        with catalog.database.read() as txn:
            return read_tokens(catalog, txn, catalog.document(txn, document), first, end)

    def forget(self, name: str) -> Document:
        """Delete a document's blocks, landmark keys and tokens; no later answer reads them. Return
        what it was.

        The file keeps its size until `compact`; its pages are used again. Raises DocumentNotFound,
        ReadOnlyMemory, MemoryLocked.
        """
        catalog = self._writable()
        with catalog.database.writer(wait=self._wait_for_writer):
            document = self.document(name)
            if document.id in self._writers:
                raise MemoryLocked(
                    f"document {name!r} is being written by this process; finish that first"
                )

            def work(txn: Transaction) -> None:
                for row in catalog.documents(txn):
                    if row.id == document.id or (
                        row.name == name
                        and row.state == "replacing"
                        and row.id not in self._writers
                    ):
                        catalog.delete_document(txn, row.id)

            catalog.database.write(work, beyond_limit=True)
        self._refresh()
        return document

    def pin_document(self, name: str) -> int:
        """Read a ready document into the host tier and keep it there until `unpin_document`,
        `forget` or `close`.

        Returns the bytes that are pinned. Raises BudgetExceeded (nothing stays pinned) if they do
        not fit, DocumentNotFound, CorruptBlock, InvalidInput for a document that is not read to its
        end.
        """
        units = self._units_of(name)
        try:
            for start in range(0, len(units), _PIN_BATCH):
                self._tiers.keep(units[start : start + _PIN_BATCH])
        except BaseException:
            self._tiers.unpin(units)
            raise
        return len(units) * self._tiers.host.unit_bytes

    def unpin_document(self, name: str) -> None:
        """The document's blocks are cached like any other again. Raises DocumentNotFound,
        InvalidInput.
        """
        self._tiers.unpin(self._units_of(name))

    def _units_of(self, name: str) -> list[BlockKey]:
        document, signature = self.document(name), self.signature
        if document.state != "ready":
            raise InvalidInput(f"document {name!r} is not read to its end; finish reading it first")
        return [
            BlockKey(document.id, layer, block, head)
            for block in range(document.blocks)
            for layer in signature.memory_layers
            for head in range(signature.num_kv_heads)
        ]

    def write_document(
        self,
        name: str,
        *,
        source_hash: str,
        settings: IngestSettings,
        metadata: dict[str, Any] | None = None,
        mode: str = "new",
        commit_bytes: int = COMMIT_BYTES,
    ) -> DocumentWriter | None:
        """Begin a document, or continue one that was interrupted; None if the same content is there
        already.

        source_hash: of the content; the same name with another hash is another content. An
        interrupted ingest continues only with the same settings. mode: "new"; "append" (continue a
        ready document from its last full chunk: see DocumentWriter.base_tokens); "replace" (the old
        content answers until the new one is whole).

        The writer lock is held until the writer is closed. Raises DocumentExists, DocumentNotFound
        (append), InvalidInput, ReadOnlyMemory, MemoryLocked, StorageFull.
        """
        if mode not in ("new", "append", "replace"):
            raise InvalidInput(f"mode {mode!r} is unknown; choose new, append or replace")
        if not name or "\0" in name:
            raise InvalidInput("a document needs a name, without zero characters")
        for setting, least in (("chunk_blocks", 1), ("top_k", 0)):
            if getattr(settings, setting) < least:
                raise InvalidInput(
                    f"ingest settings need {setting}, a whole number of at least {least}"
                )
        self._refresh()
        known = next((row for row in self._rows.values() if row.name == name), None)
        if known is not None and _is_done(known, source_hash, settings, mode):
            # asked before taking the lock: it also holds for a memory that is read-only or being
            # written
            return None
        catalog = self._writable()
        with ExitStack() as locks:
            self._lock_for_writing(catalog, locks)
            self._refresh()
            with catalog.database.read() as txn:
                rows = {
                    row.state == "replacing": row
                    for row in catalog.documents(txn)
                    if row.name == name
                }
            found, hidden = rows.get(False), rows.get(True)
            if found is not None and _is_done(found, source_hash, settings, mode):
                return None
            fresh = Document(
                0,
                name,
                "ingesting",
                source_hash=source_hash,
                metadata=metadata or {},
                settings=settings,
            )
            replaces = None
            if mode == "append":
                document = _appendable(found, fresh, self.document)
            elif mode == "replace" and found is not None and not _continues(found, fresh):
                replaces = found
                document = (
                    hidden
                    if hidden is not None and _continues(hidden, fresh)
                    else self._begin(replace(fresh, state="replacing"), hidden)
                )
            elif found is None or (
                not found.tokens and found.state == "ingesting" and not _continues(found, fresh)
            ):
                document = self._begin(fresh, found)
            else:
                document = _resumable(found, fresh)
            return self._make_writer(document, replaces, commit_bytes, locks.pop_all())

    def _lock_for_writing(self, catalog: Catalog, locks: ExitStack) -> None:
        """One writer at a time: the file lock keeps other processes away, the set other threads of
        this one.
        """
        locks.enter_context(catalog.database.writer(wait=self._wait_for_writer))
        path = catalog.database.path.resolve()
        with _writing_lock:
            if path in _writing:
                raise MemoryLocked(
                    f"{path} is being written by this process; finish that document first"
                )
            _writing.add(path)
        locks.callback(_writing.discard, path)
        self._remove_leftovers(catalog)

    def _remove_leftovers(self, catalog: Catalog) -> None:
        """What an interrupted import left; the caller holds the writer lock."""
        with catalog.database.read() as txn:
            leftovers = [row.id for row in catalog.documents(txn) if row.state == "importing"]
        for number in leftovers:
            catalog.database.write(
                partial(catalog.delete_document, document=number), beyond_limit=True
            )

    def _begin(self, document: Document, instead_of: Document | None) -> Document:
        """Write the row of a new document; a row of the same name that never got further goes."""
        catalog = self._on_disk()

        def work(txn: Transaction) -> Document:
            if instead_of is not None:
                catalog.delete_document(txn, instead_of.id)
            row = replace(document, id=catalog.new_document_id(txn), created=time.time())
            catalog.put_document(txn, row)
            return row

        return catalog.database.write(work)

    def _make_writer(
        self, document: Document, replaces: Document | None, commit_bytes: int, locks: ExitStack
    ) -> DocumentWriter:
        catalog = self._on_disk()
        blocks = document.blocks
        held = ExitStack()  # by the writer, once there is one
        with locks:
            if document.state == "ready":  # appended to: back to the last boundary of chunks
                chunk_tokens = document.settings.chunk_blocks * self.signature.block_size
                blocks = document.tokens // chunk_tokens * document.settings.chunk_blocks
            elif document.id not in self._loaded:
                with catalog.database.read() as txn:
                    self._load(txn, document)
            writer = DocumentWriter(
                catalog,
                self._tiers,
                self._index,
                document,
                blocks=blocks,
                replaces=replaces,
                commit_bytes=commit_bytes,
                locks=held,
                on_close=self._writer_closed,
            )
            held.callback(locks.pop_all().close)
        self._writers[document.id] = writer
        return writer

    def _writer_closed(self, writer: DocumentWriter) -> None:
        catalog = self._on_disk()
        number = writer.document.id
        with self._refreshing:
            with catalog.database.read() as txn:
                row = catalog.document(txn, number)
            self._writers.pop(number, None)
            if row.state == "ready":
                self._index.truncate(number, row.blocks)  # staged and not committed
                self._tiers.drop_document(number, row.blocks)
                self._loaded[number] = row
            else:
                self._unload(number)
            self._seen = -1
            self._refresh()

    # Transfer and care

    def export_document(self, name: str, file: Path | str) -> int:
        """Write one ready document to a file that `import_document` reads; return its bytes.

        Raises DocumentNotFound, InvalidInput, StorageFull, CorruptMemory.
        """
        catalog = self._on_disk()
        return export_document(catalog, self.document(name), Path(file))

    def import_document(self, file: Path | str, name: str | None = None) -> Document:
        """Read an exported document, under another name if one is given; the same content under the
        same name is left as it is.

        Raises InvalidInput (no export, damaged, truncated), WrongModel, NewerFormat,
        DocumentExists, StorageFull, ReadOnlyMemory, MemoryLocked; the memory is as it was.
        """
        file = Path(file)
        _, original = read_head(file)
        name = name or original.name
        if "\0" in name:
            raise InvalidInput("a document needs a name without zero characters")
        catalog = self._writable()
        with ExitStack() as locks:
            self._lock_for_writing(catalog, locks)
            found = next((row for row in self.documents() if row.name == name), None)
            if (
                found is not None
                and found.state == "ready"
                and found.source_hash == original.source_hash
            ):
                return found
            if found is not None:
                raise DocumentExists(
                    f"{self.path} has a document {name!r} of other content; import it under "
                    "another name"
                )
            number = import_document(catalog, file, name).id
        self._refresh()
        return self._rows[number]

    def compact(self) -> tuple[int, int]:
        """Rewrite the file without the room that forgotten documents left; return its bytes before
        and after.

        Needs the memory to itself. Raises MemoryLocked, StorageFull, ReadOnlyMemory.
        """
        catalog = self._writable()
        sizes = catalog.database.compact()
        self._seen = -1
        self._refresh()
        return sizes

    def verify(self, *, repair: bool = False) -> Report:
        """Check everything that is stored, in a child process; with `repair`, drop damaged
        documents whole.

        For a memory that cannot be opened, use memstore.store.verify.verify_memory. Raises what
        that raises.
        """
        catalog = self._on_disk()
        path = catalog.database.path
        if not repair:
            return verify_memory(path)
        self._writable()
        if self._writers:
            raise MemoryLocked(
                f"{path} is being written by this process; finish that document first"
            )
        self._tiers.settle()
        catalog.close()  # a repair of damaged pages needs the memory to itself
        try:
            return verify_memory(path, repair=True)
        finally:
            self._catalog = Catalog.open(path, read_only=self._read_only)
            self._tiers.replace_disk(DiskTier(self._catalog))
            self._seen = -1
            self._refresh()

    def stats(self) -> dict[str, Any]:
        """What the memory holds and what was looked up since it was opened, as plain values."""
        documents = self.documents()
        return {
            "documents": len(documents),
            "tokens": sum(document.tokens for document in documents),
            "blocks": sum(document.blocks for document in documents),
            "bytes": sum(document.bytes for document in documents),
            "file_bytes": 0 if self._catalog is None else self._catalog.database.file_bytes,
            "quota": self.quota,
            "codec": self.codec,
            "landmarks": self._index.bytes,
            "tiers": self.tier_stats(),
            "prefetch": {
                "predictor": self._tiers.predictor,
                **self._tiers.prefetcher.stats.to_dict(),
            },
            "index": {
                "searches": self._index.searches,
                "rows": self._index.rows,
                "file_bytes": 0 if self._engines is None else self._engines.file_bytes,
                **self._index.describe(),
            },
        }

    def tier_stats(self) -> dict[str, dict[str, int | float]]:
        """Lookups by tier since the memory was opened, top first: the fields of TierStats by name.

        Caches also have "held" and "budget", in bytes.
        """
        return self._tiers.stats()

    def layer_stats(self) -> dict[str, dict[int, TierStats]]:
        """Lookups by tier and layer since the memory was opened."""
        return self._tiers.layers()

    # Reading

    def search(
        self,
        layer: int,
        q: Tensor,
        scope: Scope,
        top_k: int,
        *,
        return_lse: bool = False,
        open_rows: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Hits:
        """The top_k blocks of a scope for each row of q [H, T, D] (rotated, scaled): see
        LandmarkIndex.search.

        Raises DocumentNotFound for a document that was forgotten, here or by another process.
        """
        self._refresh()
        if self._engines is not None:
            self._engines.open(layer, self._seen)
        return self._index.search(
            layer, q, scope, top_k, return_lse=return_lse, open_rows=open_rows, bias=bias
        )

    def sampled_queries(self) -> AbstractContextManager[None]:
        """Keep the queries of the searches made meanwhile, all of them exact: what `build_index`
        trains with.

        Raises InvalidInput for a packed index.
        """
        return self._built_index().sampled()

    def build_index(
        self, top_k: int = 4, progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Any]:
        """Build the index's engines anew over every document, and save them; return what was built.

        Queries that were kept by `sampled_queries`, or saved before, tell what to optimise for; a
        head without any looks at everything it has, which is right and slow. top_k: blocks wanted
        of a search. progress: called with (layers done, layers).

        Raises InvalidInput for an index that builds nothing ("packed") or without FAISS,
        ReadOnlyMemory, StorageFull.
        """
        engines = self._built_index()
        if self._catalog is not None:
            self._writable()
        self._refresh()
        return engines.build(top_k, self._seen, progress)

    def lease(self, units: Sequence[BlockKey]) -> Lease:
        """Slots of the top tier that hold these units (repeats allowed) until the lease is
        released.

        Raises BudgetExceeded (its `fits` says how many distinct units would fit), DocumentNotFound,
        CorruptBlock.
        """
        self._refresh()
        return self._tiers.lease(units)

    def expect(self, units: Sequence[BlockKey]) -> int:
        """Units that will probably be leased soon: what is missing is read ahead.

        Returns at once, how many are missing; raises nothing.
        """
        return self._tiers.expect([unit for unit in units if unit.document >= 0])

    @property
    def predictor(self) -> Predictor:
        """How sessions shall predict what to `expect`: "off" or "speculative"."""
        return self._tiers.predictor

    @property
    def capacity(self) -> int:
        """How many units one lease can hold at most: what the top tier's budget admits."""
        return self._tiers.capacity

    @property
    def top_tier(self) -> str:
        """The name of the tier that leases come from: "device", or "host" where there is none."""
        return self._tiers.top.name

    @property
    def own_capacity(self) -> int:
        """How many units of sessions' own blocks there can be at most: what the host tier's budget
        admits.
        """
        return self._tiers.host.capacity

    @property
    def slot_lengths(self) -> Tensor:
        """int64 [S]: valid content tokens of the unit in each slot of the leases' slabs."""
        return self._tiers.lengths

    def holds(self, unit: BlockKey) -> bool:
        """Would leasing this unit be a hit? Counts nothing."""
        return self._tiers.holds(unit)

    def landmark_keys(self, layer: int, scope: Scope, candidates: Tensor | None = None) -> Tensor:
        """Landmark keys of candidates of a scope, in float32.

        candidates: [H, ...] int64 as search returns them (-1 gives some key) -> [H, ..., D], each
        query head from its KV head; None -> [Hkv, N, D], the keys of the whole scope (do not write
        to it). Raises DocumentNotFound.
        """
        self._refresh()
        return (
            self._index.keys(layer, scope)
            if candidates is None
            else self._index.gather(layer, scope, candidates)
        )

    def scratch(self) -> "ScratchDocument":
        """A document for a session's own blocks, that lives in memory only and under a negative
        id.
        """
        if self._closed:
            raise MemoryClosed("this memory is closed; open it again")
        return ScratchDocument(next(self._scratch_ids), self._tiers, self._index)

    def add_landmarks(self, document: int, layer: int, keys: Tensor) -> None:
        """Make the next blocks of a document of `in_memory`'s source known in a layer; best all of
        them at once.

        keys: [n, Hkv, D]. Raises InvalidInput for a memory with a directory, whose documents are
        written, or a number below 1.
        """
        if self._catalog is not None or document < 1:
            raise InvalidInput(
                "landmark keys are added to documents above 0 of a memory without a directory"
            )
        self._index.reserve(layer, len(keys))
        self._index.add(document, layer, self._index.span(document, layer)[1], keys)

    def update_index(self) -> bool:
        """Bring the index's files up to the documents that came since they were built; is it time
        to build them anew?

        Commands that write documents end with this. Raises StorageFull, ReadOnlyMemory.
        """
        self._refresh()
        return self._engines is not None and self._engines.update(self._seen)

    def _find_engines(self) -> None:
        """Once it is known where the memory is."""
        if isinstance(self._index, FaissIndex):
            directory = None if self.path is None else self.path / "index"
            self._engines = Engines(
                self._index, self.signature.memory_layers, directory, read_only=self.read_only
            )

    def _built_index(self) -> Engines:
        if self._engines is None:
            raise InvalidInput(
                "a packed index builds nothing; open the memory with index auto or one of FAISS"
            )
        return self._engines

    # Keeping up with what is committed, by whichever process

    def _refresh(self) -> None:
        if self._closed:
            raise MemoryClosed(f"{self.path or 'this memory'} is closed; open it again")
        if self._catalog is None or self._catalog.database.last_transaction == self._seen:
            return
        with self._refreshing:
            catalog = self._catalog
            # before reading: too old a number only costs another look
            last = catalog.database.last_transaction
            with catalog.database.read() as txn:
                rows = {
                    row.id: row
                    for row in catalog.documents(txn)
                    if row.state in ("ready", "ingesting")
                }
                for number, loaded in list(self._loaded.items()):
                    if rows.get(number) != loaded and number not in self._writers:
                        self._unload(number)
                new = [
                    row for number, row in rows.items()
                    if row.state == "ready"
                    and number not in self._loaded
                    and number not in self._writers
                ]  # fmt: skip
                if len(new) > 1:
                    for layer in self.signature.memory_layers:
                        self._index.reserve(layer, sum(row.blocks for row in new))
                for row in new:
                    self._load(txn, row)
                    self._loaded[row.id] = row
            self._rows = rows
            self._seen = last

    def _unload(self, number: int) -> None:
        self._loaded.pop(number, None)
        self._index.remove(number)
        self._tiers.drop_document(number)

    def _load(self, txn: Transaction, document: Document) -> None:
        """Put a document's landmark keys into the index."""
        catalog = self._on_disk()
        self._index.remove(document.id)
        ends = dict.fromkeys(self.signature.memory_layers, 0)
        for layer, runs in groupby(catalog.landmarks(txn, document.id), key=attrgetter("layer")):
            if layer in ends:
                keys = []
                for run in runs:
                    if run.first_block == ends[layer]:
                        keys.append(from_raw(run.keys, self.signature.kv_dtype))
                        ends[layer] += len(run.keys)
                if keys:
                    # one piece: the index grows once
                    self._index.add(document.id, layer, 0, torch.cat(keys))
        for layer, end in ends.items():
            if end != document.blocks:
                self._index.remove(document.id)
                raise CorruptMemory(
                    f"{self.path}: landmark keys of document {document.name!r}, layer {layer} are "
                    "missing; run verify"
                )

    def _on_disk(self) -> Catalog:
        if self._closed:
            raise MemoryClosed(f"{self.path or 'this memory'} is closed; open it again")
        if self._catalog is None:
            raise DocumentNotFound(
                "this memory has no directory and holds only its sessions' own blocks"
            )
        return self._catalog

    def _writable(self) -> Catalog:
        if self.read_only and not self._closed:
            raise ReadOnlyMemory(
                f"{self.path or 'this memory'} is open for reading only; open it for writing"
            )
        return self._on_disk()


class ScratchDocument:
    """A session's own blocks: pinned in the host tier and searchable, gone when closed. A context
    manager.

    document: the negative number under which they are leased and searched.
    """

    def __init__(self, number: int, tiers: Cascade, index: LandmarkIndex) -> None:
        """Use MemoryStore.scratch."""
        self.document = number
        self._tiers, self._index = tiers, index
        # layer -> units of each block held, oldest first
        self._units: dict[int, list[list[BlockKey]]] = {}
        self._ends: dict[int, int] = {}

    def add(self, layer: int, k: Tensor, v: Tensor, landmarks: Tensor) -> int:
        """Add the next n blocks of a layer; return the number of the first.

        k, v: [n, Hkv, block_size, D] in the KV dtype, K rotated by the offset in the block only;
        landmarks: [n, Hkv, D]. Raises BudgetExceeded, with nothing added.
        """
        n, heads = k.shape[:2]
        first = self._ends.get(layer, 0)
        units = self._tiers.pin(self.document, layer, first, k, v)
        self._index.add(self.document, layer, first, landmarks)
        self._units.setdefault(layer, []).extend(
            units[at : at + heads] for at in range(0, n * heads, heads)
        )
        self._ends[layer] = first + n
        return first

    def blocks(self, layer: int) -> tuple[int, int]:
        """The blocks [first, end) that are held in a layer."""
        end = self._ends.get(layer, 0)
        return end - len(self._units.get(layer, [])), end

    def trim(self, first_block: int, layers: Sequence[int] | None = None) -> None:
        """Drop blocks before first_block, in every layer or in some."""
        for layer in list(self._units) if layers is None else layers:
            held = self._units.get(layer, [])
            gone = max(0, min(first_block - self.blocks(layer)[0], len(held)))
            if gone:
                self._tiers.drop([unit for units in held[:gone] for unit in units])
                self._units[layer] = held[gone:]
                self._index.trim(self.document, first_block, layer)

    def close(self) -> None:
        """Drop everything; more than once is the same as once."""
        units, self._units, self._ends = self._units, {}, {}
        self._tiers.drop([unit for blocks in units.values() for block in blocks for unit in block])
        self._index.remove(self.document)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _refuse_small_budget(signature: Signature, options: OpenOptions) -> None:
    """A budget must hold what one row of one step needs at least: one block of each KV head."""
    host_budget = options.get("host_budget", HOST_BUDGET)
    least = signature.geometry.record_bytes
    if host_budget < least:
        raise BudgetExceeded(
            f"a host budget of {host_budget} bytes is too small; one block takes {least} bytes, so "
            "raise it"
        )


def _is_done(found: Document, source_hash: str, settings: IngestSettings, mode: str) -> bool:
    """Is the same content there already? A replacement may also want other settings."""
    if mode != "append" and found.appended_to:
        return False  # its hash is that of what was appended last
    same = found.state == "ready" and found.source_hash == source_hash
    return same and (mode != "replace" or found.settings == settings)


def _continues(found: Document, wanted: Document) -> bool:
    """Is this the same ingest, interrupted?"""
    same = found.state != "ready" and found.source_hash == wanted.source_hash
    return same and found.settings == wanted.settings


def _resumable(found: Document, wanted: Document) -> Document:
    if found.state == "ready":
        raise DocumentExists(
            f"document {found.name!r} is there with other content; choose another name, append to "
            "it, or replace it"
        )
    if found.source_hash != wanted.source_hash:
        raise DocumentExists(
            f"document {found.name!r} is partly read, from other content; continue with that, "
            "replace it, or forget it"
        )
    if not _continues(found, wanted):
        other = _others(found.settings, wanted.settings)
        raise InvalidInput(
            f"document {found.name!r} was begun with {other}; "
            "continue with the same, replace it, or forget it"
        )
    return found


def _appendable(
    found: Document | None, wanted: Document, look_up: Callable[[str], Document]
) -> Document:
    if found is None:
        return look_up(wanted.name)  # raises DocumentNotFound
    if found.state == "ingesting" and (
        not found.appended_to or found.source_hash != wanted.source_hash
    ):
        raise DocumentExists(
            f"document {found.name!r} is only partly read; continue that before appending to it"
        )
    if found.settings != wanted.settings:
        other = _others(found.settings, wanted.settings)
        raise InvalidInput(f"document {found.name!r} was read with {other}; append with the same")
    if found.state == "ingesting":
        return found
    return replace(
        found,
        source_hash=wanted.source_hash,
        metadata={**found.metadata, **wanted.metadata},
        appended_to=found.tokens,
    )


def _others(found: IngestSettings, wanted: IngestSettings) -> str:
    """The settings of one that the other does not have, in words."""
    there, here = asdict(found), asdict(wanted)
    return ", ".join(f"{k}={v}" for k, v in sorted(there.items()) if here[k] != v)
