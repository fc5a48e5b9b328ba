"""Passages by their content: each is stored once, under a number, whatever documents hold it; how
many references there are to it is counted.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.block_table import BlockTable
from memstore.disk.tables.passage_records import PassageRecords
from memstore.disk.tables.passage_rows import Digest, PassageRows, StoredPassage


class PassageCounts(NamedTuple):
    """How many passages there are, of how many records are stored, and the bytes of these: all, and
    those of passages that are referred to more than once.
    """

    passages: int = 0
    stored: int = 0
    bytes: int = 0
    shared: int = 0


class PassageTable(PassageRows):
    """The passages of one memory. Every method takes the transaction it works in, but `holding` and
    `take_left`.
    """

    def __init__(self, blocks: BlockTable) -> None:
        self.records = PassageRecords(self, blocks)
        self._lock = threading.Lock()
        self._held: Counter[Digest] = Counter()  # by writers of this process
        self._left: set[Digest] = set()  # that were kept for these alone

    def counts(self, txn: Transaction) -> PassageCounts:
        """All passages, counted. Raises CorruptMemory."""
        passages = stored = size = shared = 0
        for row in self.all(txn):
            passages, stored, size = passages + 1, stored + (row.bytes > 0), size + row.bytes
            shared += row.bytes if row.references > 1 else 0
        return PassageCounts(passages, stored, size, shared)

    def refer(
        self,
        txn: Transaction,
        document: int,
        first_block: int,
        digests: Sequence[Digest],
        numbers: Iterator[int],
    ) -> list[StoredPassage]:
        """Count a document's references from its blocks `first_block` on; numbers: for those that
        have none. Raises CorruptMemory.
        """
        rows = []
        for block, digest in enumerate(digests, first_block):
            row = self.find(txn, digest)
            if row is None:
                row = StoredPassage(next(numbers), digest, 0, 0, 0, (0, 0))
                self.put_number(txn, row)
            rows.append(row._replace(references=row.references + 1, home=(document, block)))
            self.put(txn, rows[-1])
        return rows

    def release(self, txn: Transaction, digest: Digest) -> int:
        """Count a reference less; return the bytes of the passage's records, which go with the last
        one, unless a writer of this process has need of them. Raises CorruptMemory.
        """
        row = self.find(txn, digest)
        if row is None:
            return 0
        left = row._replace(references=max(0, row.references - 1))
        if left.references or self._leaves(digest):
            self.put(txn, left)
        else:
            self.drop(txn, row)
        return row.bytes

    def _leaves(self, digest: Digest) -> bool:
        with self._lock:
            held = digest in self._held
            if held:
                self._left.add(digest)
            return held

    def take_left(self) -> set[Digest]:
        """Passages that were kept for writers alone, which have ended by now; each is told once."""
        with self._lock:
            left = {digest for digest in self._left if digest not in self._held}
            self._left -= left
            return left

    def sweep(self, txn: Transaction, left: Iterable[Digest]) -> None:
        """Delete those of these that nobody refers to. Raises CorruptMemory."""
        for digest in left:
            row = self.find(txn, digest)
            if row is not None and not row.references:
                self.drop(txn, row)

    def drop_unreferenced(self, txn: Transaction) -> None:
        """Delete what was kept for writers that were killed. The caller holds the writer lock, and
        no writer is at work. Raises CorruptMemory.
        """
        for row in list(self.all(txn)):
            if not row.references:
                self.drop(txn, row)

    def drop(self, txn: Transaction, row: StoredPassage) -> None:
        """Delete a passage, whoever refers to it. Raises CorruptMemory."""
        self.records.drop(txn, row.number)
        self.delete(txn, row)

    def correct(self, txn: Transaction, row: StoredPassage, references: int) -> None:
        """Have a passage be referred to so often, and be found by its digest."""
        self.put(txn, row._replace(references=references))
        self.put_number(txn, row)

    def holding(self) -> "Holding":
        """Passages that stay until it is closed, whoever forgets them."""
        return Holding(self._held, self._lock)


class Holding:
    """Digests of passages that a writer has need of. Safe for several threads."""

    def __init__(self, held: Counter[Digest], lock: threading.Lock) -> None:
        self._held, self._lock, self._own = held, lock, list[Digest]()

    def add(self, digests: Iterable[Digest]) -> None:
        """Hold these as well."""
        with self._lock:
            own = list(digests)
            self._own += own
            self._held.update(own)

    def close(self) -> None:
        """Hold none any longer; more than once is the same as once."""
        with self._lock:
            self._held.subtract(self._own)
            for digest in self._own:
                if self._held[digest] <= 0:
                    del self._held[digest]
            self._own = []
