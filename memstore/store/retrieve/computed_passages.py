"""Passages whose keys and values sessions computed, since these are not stored, are damaged or
cannot be read: counted, and held in the host tier for the next question.
"""

import logging
import threading

from torch import Tensor
from torch.nn.functional import pad

from memstore.block import BlockKey
from memstore.disk.tables.catalog import Catalog
from memstore.errors import CorruptMemory, DocumentNotFound
from memstore.tiers.cascade import Cascade

_log = logging.getLogger("memstore")


class Computed:
    """The computed passages of one open memory. Safe for several threads."""

    def __init__(self, catalog: Catalog, tiers: Cascade) -> None:
        # how many were computed, and of these how many are damaged, or could not be read
        self.passages = self.damaged = self.away = 0
        self._catalog, self._tiers = catalog, tiers
        self._lock = threading.Lock()

    def count(self, *, damaged: int = 0, passages: int = 0, away: int = 0) -> None:
        """Count passages that were computed, and how many of them since they are damaged, or could
        not be read.
        """
        with self._lock:
            self.passages += passages
            self.damaged += damaged
            self.away += away
        if damaged:
            _log.warning(
                "%s: %d damaged passages were computed again; run verify",
                self._catalog.database.path,
                damaged,
            )

    def take(self, document: int, block: int, k: Tensor, v: Tensor, seconds: float) -> None:
        """Hold a passage's keys and values [tokens, width], on the CPU in the KV dtype; seconds:
        that computing them took. Nothing is held of a document that is gone by now.
        """
        catalog = self._catalog
        self._tiers.count_computed(1, 2 * k.nbytes, seconds)
        try:
            with catalog.database.read() as txn:
                (at,) = catalog.stored_at(txn, [(document, block)])
                codec = catalog.document(txn, document).codec
        except (DocumentNotFound, CorruptMemory):
            return
        if at is None:
            return
        catalog.share(at.digest, codec, k, v)
        rest = (0, 0, 0, catalog.signature.block_size - len(k))
        unit = BlockKey(at.number, 0, 0, 0)
        self._tiers.admit([unit], pad(k, rest)[None], pad(v, rest)[None], len(k))
