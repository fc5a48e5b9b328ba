"""Passages that sessions used, and those whose keys and values they computed, since these are not
stored or are damaged: held in the host tier for whoever asks next and, of a memory with a budget,
stored behind the answer, with the counts of use.
"""

import logging
import threading
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from memstore.block import BlockKey, RecordKey
from memstore.disk.format.codec import get_codec
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.document_passages import StoredAt
from memstore.disk.tables.passage_rows import Digest
from memstore.errors import CorruptMemory, DocumentNotFound, MemstoreError
from memstore.store.names_written import names_written
from memstore.tiers.cascade import Cascade
from memstore.tiers.raw_bits import from_raw, raw_view

_USES = 64  # that are counted together where nothing else is to be written
_MOST = 64  # computed passages that wait to be stored; more are only held

_log = logging.getLogger("memstore")


class Computed:
    """What one open memory knows of its sessions' passages. Safe for several threads."""

    def __init__(self, catalog: Catalog | None, tiers: Cascade) -> None:
        # that were computed, and how many since they are damaged, or could not be read
        self.passages = self.damaged = self.away = 0
        self._catalog, self._tiers = catalog, tiers
        self._lock = threading.Lock()
        self._uses: Counter[int] = Counter()  # by number of the passage
        self._records: dict[int, tuple[bytes, dict[int, bytes]]] = {}  # digest, and by layer

    def reopened(self, catalog: Catalog) -> None:
        """The memory was opened anew."""
        self._catalog = catalog

    def count(self, *, damaged: int = 0, passages: int = 0, away: int = 0) -> None:
        """Count passages that were computed, and how many of them since they are damaged, or could
        not be read.
        """
        with self._lock:
            self.passages += passages
            self.damaged += damaged
            self.away += away
        if damaged and self._catalog is not None:
            _log.warning(
                "%s: %d damaged passages were computed anew; run verify",
                self._catalog.database.path,
                damaged,
            )

    def used(self, numbers: Sequence[int]) -> None:
        """Count uses of passages, by number."""
        if self._caches:
            with self._lock:
                self._uses.update(numbers)

    def take(
        self, document: int, block: int, k: Tensor, v: Tensor, seconds: float
    ) -> tuple[Tensor, Tensor]:
        """Hold a passage's keys and values [memory layers, Hkv, n, D], on the CPU in the KV dtype;
        return them as they would be read if they were stored, of a memory with a budget: so an
        answer depends on what is kept by no more than rounding. seconds: that computing them took.
        Nothing is held of a document that is gone by now.
        """
        catalog = self._catalog
        layers = self._tiers.computed_in(k.shape[1], seconds)
        if catalog is None:
            return k, v
        try:
            with catalog.database.read() as txn:
                (at,) = catalog.stored_at(txn, [(document, block)])
                codec = catalog.document(txn, document).codec
                cached = catalog.passages.records.kept(txn).budget is not None
        except (DocumentNotFound, CorruptMemory):
            return k, v
        if at is None:
            return k, v
        catalog.share(at.digest, codec, k, v)
        n, size = k.shape[2], catalog.signature.block_size
        records = {}
        if cached:
            bits = raw_view(k), raw_view(v)
            records = catalog.blocks.encode_passage(layers, *bits, at.digest, codec)
            self._keep(at, records)
        if records and not get_codec(codec).lossless:
            k, v = _as_stored(catalog, records, at.digest)
        else:
            k, v = (pad(half, (0, 0, 0, size - n)) for half in (k, v))
        units = [
            BlockKey(at.number, layer, 0, head) for layer in layers for head in range(k.shape[1])
        ]
        self._tiers.admit(units, k.flatten(0, 1), v.flatten(0, 1), n)
        return k[:, :, :n], v[:, :, :n]

    def _keep(self, at: StoredAt, records: dict[int, bytes]) -> None:
        if not self._caches:
            return
        with self._lock:
            self._uses[at.number] += 1
            if not at.stored and len(self._records) < _MOST:
                self._records[at.number] = at.digest, records

    def store(self, *, all_uses: bool = False) -> None:
        """Store what was computed, and count what was used, unless somebody is writing: then that
        is let go of. all_uses: also few uses alone. Nothing is waited for, and nothing raised.
        """
        catalog = self._catalog
        with self._lock:
            if not self._records and self._uses.total() < (1 if all_uses else _USES):
                return
            uses, records = self._uses, self._records
            self._uses, self._records = Counter(), {}

        def work(txn: Transaction) -> None:
            assert catalog is not None
            passages = catalog.passages
            if passages.records.kept(txn).budget is None:
                return
            for number, times in uses.items():
                passages.records.use(txn, number, times)
            for number, (digest, by_layer) in records.items():
                row = passages.row(txn, number)
                if row is not None and row.digest == digest and not row.bytes:
                    passages.records.store(txn, row, by_layer)

        try:
            if catalog is not None and not names_written(catalog.database.path):
                catalog.database.write(work)
        except MemstoreError as error:
            _log.debug("what was computed is not stored: %s", error)

    @property
    def _caches(self) -> bool:
        """May what was computed be stored?"""
        catalog = self._catalog
        writable = catalog is not None and not catalog.database.read_only
        return writable and catalog is not None and catalog.kv_budget is not None


def _as_stored(
    catalog: Catalog, records: dict[int, bytes], digest: Digest
) -> tuple[Tensor, Tensor]:
    """K and V [layers, Hkv, block_size, D] that records of a passage, by layer, are read as."""
    dtype = catalog.signature.kv_dtype
    halves: tuple[list[Tensor], list[Tensor]] = [], []
    for layer, record in records.items():
        keys, values, _ = catalog.blocks.decode(record, RecordKey(0, 0, layer), digest)
        for half, bits in zip(halves, (keys, values)):
            half.append(from_raw(bits, dtype))
    return torch.stack(halves[0]), torch.stack(halves[1])
