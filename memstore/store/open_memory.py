"""A memory as it is open in this process: its tables at once, its index and its tiers when they are
first used, and nothing of torch before.
"""

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Self, Unpack

from memstore.closing import Closing
from memstore.disk.format.index_spec import IndexSpec
from memstore.disk.format.signature import Signature
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.run_table import RunTable
from memstore.errors import DocumentNotFound, InvalidConfig, MemoryClosed, ReadOnlyMemory
from memstore.paths import expanded
from memstore.paused_collection import paused_collection
from memstore.share.publication_options import is_url, take_share_options
from memstore.store.open_options import OpenOptions, check_open_options
from memstore.store.refresh import Committed

if TYPE_CHECKING:
    from memstore.store.retrieve.retrieval import Retrieval
    from memstore.tiers.lease import UnitSource


class OpenMemory(Closing):
    """What MemoryStore's verbs work on: see there."""

    def __init__(
        self,
        catalog: Catalog | None,
        signature: Signature,
        *,
        read_only: bool = False,
        wait_for_writer: bool = False,
        source: "UnitSource | None" = None,
        selector: IndexSpec | None = None,
        **options: Unpack[OpenOptions],
    ) -> None:
        """Use MemoryStore.create, open or in_memory."""
        self.signature = signature
        self._committed = None if catalog is None else Committed(catalog)
        self._read_only, self._wait_for_writer = read_only, wait_for_writer
        self._source, self._options = source, options
        self._selector = None if catalog is None else catalog.selector
        if selector is not None:
            self._selector = RunTable(signature.geometry, selector)
        self._retrieval: Retrieval | None = None
        self._building = threading.RLock()
        self._closed = False

    # Opening

    @classmethod
    def create(
        cls,
        path: Path | str,
        signature: Signature,
        *,
        codec: str = "zstd",
        quota: int | None = None,
        kv_budget: int | None = None,
        selector: IndexSpec | None = None,
        **options: Unpack[OpenOptions],
    ) -> Self:
        """Make a new memory in a directory that is absent or empty, for the model with this
        signature.

        codec: "zstd" or "raw" (lossless), "int8" or "int4" (see disk/format/codec.py). quota: bytes
        that the memory's file may reach. kv_budget: see set_kv_budget. selector: what blocks are
        found by, if not by landmark keys of the model's own layers. options: see OpenOptions.

        Raises MemoryExists, InvalidInput, InvalidConfig, ReadOnlyMemory, StorageFull, MemoryLocked,
        BudgetExceeded.
        """
        check_open_options(options, signature, expanded(path))  # a bad option leaves nothing behind
        catalog = Catalog.create(
            path, signature, codec=codec, quota=quota, kv_budget=kv_budget, selector=selector
        )
        return cls(catalog, signature, **options)

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

        path: its directory, or the URL of a published memory (s3://, gs://, az://, file:///,
        memory://), which is only read, and whose blocks are read when they are asked for: see
        ShareOptions, and docs/sharing.md. wait_for_writer: writing waits while another process
        writes, instead of raising MemoryLocked. options: see OpenOptions.

        Raises MemoryNotFound, WrongModel (says what differs), NewerFormat, OlderFormat,
        CorruptMemory, MemoryLocked, BudgetExceeded, InvalidConfig, InvalidInput; of a URL also
        StoreUnavailable, StaleMemory, StorageFull (the local cache).
        """
        away = take_share_options(options)
        if is_url(path):
            from memstore.share.read.open_published import open_published

            with paused_collection():
                catalog: Catalog = open_published(str(path), away)
            read_only = True
        elif away:
            raise InvalidConfig(f"{min(away)} is of published memories; {path} is a directory")
        else:
            catalog = Catalog.open(path, read_only=read_only)
        try:
            if signature is not None:
                signature.check_same(
                    catalog.signature, str(path), "ask it with its own, or make a new memory"
                )
            check_open_options(options, catalog.signature)
        except BaseException:
            catalog.close()
            raise
        return cls(
            catalog,
            catalog.signature,
            read_only=read_only,
            wait_for_writer=wait_for_writer,
            **options,
        )

    @classmethod
    def in_memory(
        cls,
        signature: Signature,
        source: "UnitSource | None" = None,
        *,
        selector: IndexSpec | None = None,
        **options: Unpack[OpenOptions],
    ) -> Self:
        """A memory without a directory, that holds only its sessions' own blocks. Raises
        BudgetExceeded.

        source: read from below the host tier, as the disk would be: documents of it have positive
        numbers, and are found once `add_landmarks` has told their landmark keys; with a selector,
        `add_selected` what it finds them by.
        """
        check_open_options(options, signature)
        return cls(None, signature, read_only=True, source=source, selector=selector, **options)

    def close(self) -> None:
        """Close; writers still open commit their whole chunks first. More than once is the same as
        once.
        """
        if self._closed:
            return
        try:
            for writer in [] if self._committed is None else list(self._committed.writers.values()):
                writer.close()
        finally:
            self._closed = True
            try:
                if self._retrieval is not None:
                    self._retrieval.close()
            finally:
                if self._committed is not None:
                    self._committed.catalog.close()

    @property
    def path(self) -> Path | None:
        """The memory's directory; None for one without."""
        if self._committed is None or self._committed.catalog.source is not None:
            return None
        return self._committed.catalog.database.path

    @property
    def place(self) -> str | None:
        """Where the memory is: its directory, or its URL; None for one that is nowhere."""
        return None if self._committed is None else str(self._committed.catalog.database.path)

    @property
    def manifest(self) -> int | None:
        """The number of the manifest that a published memory is read by; None for a directory."""
        return None if self._committed is None else self._committed.catalog.manifest

    @property
    def selector(self) -> IndexSpec | None:
        """What blocks are found by; None where it is landmark keys of the model's own layers."""
        return None if self._selector is None else self._selector.spec

    @property
    def read_only(self) -> bool:
        """Whether writing is refused: asked for at opening, or the directory cannot be written."""
        return self._committed is None or self._committed.catalog.database.read_only

    @property
    def quota(self) -> int | None:
        """Bytes that the memory's file may reach; None for no bound."""
        return None if self._committed is None else self._committed.catalog.quota

    @property
    def codec(self) -> str | None:
        """How blocks are stored from now on; None for a memory without a directory."""
        return None if self._committed is None else self._committed.catalog.codec

    def set_quota(self, quota: int | None) -> None:
        """Change the quota, for good. Raises InvalidInput, ReadOnlyMemory, MemoryLocked."""
        self._writable().catalog.set_quota(quota)

    @property
    def kv_budget(self) -> int | None:
        """Bytes that keys and values of passages may take; None for no bound."""
        return None if self._committed is None else self._on_disk().catalog.kv_budget

    def set_kv_budget(self, budget: int | None) -> None:
        """Change that, for good: what is beyond it is dropped now, those first that are least
        worth, and questions compute what they need of it. With a budget, what was computed is
        stored behind the answer, and uses are counted.

        Raises InvalidInput (also for a memory without passages), ReadOnlyMemory, MemoryLocked.
        """
        self._writable().catalog.set_kv_budget(budget, wait=self._wait_for_writer)

    # What the rest begins with

    def _refresh(self) -> None:
        """Notice what was committed. Raises MemoryClosed, CorruptMemory."""
        if self._closed:
            raise MemoryClosed(f"{self.place or 'this memory'} is closed; open it again")
        if self._committed is not None:
            self._committed.refresh()

    def _retrieve(self) -> "Retrieval":
        """The index and the tiers, up to date."""
        self._refresh()
        return self._built

    @property
    def _built(self) -> "Retrieval":
        return self._retrieval or self._build()

    def _build(self) -> "Retrieval":
        from memstore.store.retrieve.retrieval import Retrieval

        with self._building:
            if self._closed:
                raise MemoryClosed(f"{self.place or 'this memory'} is closed; open it again")
            if self._retrieval is None:
                catalog = None if self._committed is None else self._committed.catalog
                built = Retrieval(
                    self.signature, catalog, self._source, self._selector, self._options
                )
                try:
                    if self._committed is not None:
                        self._committed.attach(built)
                except BaseException:
                    built.close()
                    raise
                self._retrieval = built
            return self._retrieval

    def _on_disk(self) -> Committed:
        if self._closed:
            raise MemoryClosed(f"{self.place or 'this memory'} is closed; open it again")
        if self._committed is None:
            raise DocumentNotFound(
                "this memory has no directory and holds only its sessions' own blocks"
            )
        return self._committed

    def check_writable(self) -> None:
        """Raises ReadOnlyMemory where the memory can only be read."""
        self._writable()

    def _writable(self) -> Committed:
        if self.read_only and not self._closed:
            if self._committed is not None and self._committed.catalog.source is not None:
                raise ReadOnlyMemory(
                    f"{self.place} is a published memory, which is only read; write into a "
                    "directory and publish that"
                )
            raise ReadOnlyMemory(
                f"{self.place or 'this memory'} is open for reading only; open it for writing"
            )
        return self._on_disk()
