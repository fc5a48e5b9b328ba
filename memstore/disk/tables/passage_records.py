"""The records of passages: a cache of what their tokens say, which a budget may bound.

Worth is what keeps them there, as in greedy-dual caching with frequencies (GDSF): a use adds one to
the worth, or to that of the passage that would be dropped first where that is more, so that uses
long ago count less and less. A passage's cost of computing, its tokens, is left out, as it is
nearly in proportion to its bytes. Table `worth` has the passages with records in order of worth;
row `kv` of `meta` has their bytes, and the budget.
"""

from collections.abc import Iterator, Mapping

import msgpack
import msgspec

from memstore.block import RecordKey
from memstore.decode import Count, unpack
from memstore.disk.format.keys import read_worth_key, worth_key
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.block_table import BlockTable
from memstore.disk.tables.passage_rows import PassageRows, StoredPassage
from memstore.errors import CorruptMemory

_KV = b"kv"  # in the table `meta`


class KeptBytes(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Bytes of all records of passages, and what they may be at most; None: as many as come."""

    bytes: Count = 0
    budget: Count | None = None


class PassageRecords:
    """The records of one memory's passages. Every method takes the transaction it works in."""

    def __init__(self, rows: PassageRows, blocks: BlockTable) -> None:
        self._rows, self._blocks = rows, blocks

    def kept(self, txn: Transaction) -> KeptBytes:
        """Bytes of all records, and what they may be at most. Raises CorruptMemory."""
        value = txn.get_checked("meta", _KV)
        try:
            return KeptBytes() if value is None else unpack(value, KeptBytes)
        except ValueError as error:
            raise CorruptMemory(
                f"the count of keys and values is damaged ({error}); run verify --repair"
            ) from error

    @staticmethod
    def begin(txn: Transaction, budget: int) -> None:
        """Give a new memory its budget."""
        txn.put_checked("meta", _KV, msgpack.packb([0, budget]))

    def set_budget(self, txn: Transaction, budget: int | None) -> None:
        """Have records take no more than so many bytes; the least worth are dropped now. Raises
        CorruptMemory.
        """
        self._put_kept(txn, self.kept(txn).bytes, budget)
        over = 0 if budget is None else self.kept(txn).bytes - budget
        for row in self._least(txn, over) if over > 0 else []:
            self.drop(txn, row.number)

    def use(self, txn: Transaction, number: int, times: int) -> None:
        """Count uses of a passage, if there is one of that number. Raises CorruptMemory."""
        row = self._rows.row(txn, number)
        if row is not None:
            least = next((worth for worth, _ in self.by_worth(txn)), 0)
            self._change(txn, row, row._replace(worth=max(row.worth, least) + times))

    def store(
        self, txn: Transaction, row: StoredPassage, records: Mapping[int, bytes]
    ) -> StoredPassage:
        """Store the records of a passage that has none, by layer, and what is told of it then; not
        where the budget has no room but in the place of what is worth as much. Raises
        CorruptMemory.
        """
        size, kept = sum(map(len, records.values())), self.kept(txn)
        over = 0 if kept.budget is None else kept.bytes + size - kept.budget
        if over > 0:
            least = self._least(txn, over, below=row.worth)
            if sum(one.bytes for one in least) < over:
                return row
            for one in least:
                self.drop(txn, one.number)
        for layer in sorted(records):
            self._blocks.put(txn, RecordKey(row.number, 0, layer), records[layer])
        stored = row._replace(bytes=size)
        self._change(txn, row, stored)
        return stored

    def drop(self, txn: Transaction, number: int) -> bool:
        """Delete the records of a passage, which stays by its tokens; whether there is one. Raises
        CorruptMemory.
        """
        row = self._rows.row(txn, number)
        if row is not None:
            self._change(txn, row, row._replace(bytes=0))
        return row is not None

    def by_worth(self, txn: Transaction) -> Iterator[tuple[int, int]]:
        """Worth and number of the passages with records, the least first. Raises CorruptMemory."""
        for key, _ in txn.scan_checked("worth"):
            yield read_worth_key(key)

    def _least(
        self, txn: Transaction, size: int, *, below: int | None = None
    ) -> list[StoredPassage]:
        """Passages that are worth least, with so many bytes or as many as there are; below: that
        are worth less.
        """
        found: list[StoredPassage] = []
        for worth, number in self.by_worth(txn):
            if size <= 0 or (below is not None and worth >= below):
                break
            row = self._rows.row(txn, number)
            if row is not None:
                found.append(row)
                size -= row.bytes
        return found

    def _change(self, txn: Transaction, before: StoredPassage, after: StoredPassage) -> None:
        """Write what is told of a passage with another worth, or other records; of none left, they
        are deleted.
        """
        if not after.bytes:
            self._blocks.delete(txn, after.number)
        if before.bytes:
            txn.delete("worth", worth_key(before.worth, before.number))
        if after.bytes:
            txn.put_checked("worth", worth_key(after.worth, after.number), b"")
        if before.bytes != after.bytes:
            kept = self.kept(txn)
            size = max(0, kept.bytes + after.bytes - before.bytes)
            self._put_kept(txn, size, kept.budget)
        self._rows.put(txn, after)

    def _put_kept(self, txn: Transaction, size: int, budget: int | None) -> None:
        txn.put_checked("meta", _KV, msgpack.packb([size, budget]))

    def recount(self, txn: Transaction) -> None:
        """Order all passages by worth anew, and count their bytes. Raises CorruptMemory."""
        txn.delete_range("worth", b"", None)
        size = 0
        for row in list(self._rows.all(txn)):
            if row.bytes:
                txn.put_checked("worth", worth_key(row.worth, row.number), b"")
                size += row.bytes
        try:
            budget = self.kept(txn).budget
        except CorruptMemory:  # nobody knows it any more
            budget = None
        self._put_kept(txn, size, budget)
        self.set_budget(txn, budget)
