"""Passages by their content: the records of one are stored once, under a number, whatever documents
hold it; how many references there are to it is counted.

A passage is known by its digest, of all that its keys and values follow from: the memory's
signature, the codec of its records and its tokens, those of the context in front included. Of its
number (`passages`) the digest is told, the references, the bytes of its records (0: none is
stored), its worth, and the document and block that referred to it last; of its digest (`digests`)
the number.

Records are a cache of what the tokens say, and a budget may bound their bytes. Worth is what keeps
them there, as in greedy-dual caching with frequencies (GDSF): a use adds one to the worth, or to
that of the passage that would be dropped first where that is more, so that uses long ago count
less and less. A passage's cost of computing, its tokens, is left out, as it is nearly in
proportion to its bytes. Table `worth` has the passages with records in order of worth; row `kv` of
`meta` has their bytes, and the budget.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgpack
import msgspec
import numpy as np
from msgspec import Meta

from memstore.block import RecordKey
from memstore.decode import Block, Count, unpack
from memstore.disk.format.keys import passage_key, read_passage_key, read_worth_key, worth_key
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.block_table import BlockTable
from memstore.errors import CorruptMemory

DIGEST_BYTES = 16
_KV = b"kv"  # in the table `meta`
Digest = bytes


def digest_of(signature: bytes, codec: str, ids: np.ndarray) -> Digest:
    """The digest of a passage of these tokens; signature: Signature.digest."""
    content = b"".join((signature, codec.encode(), b"\0", np.asarray(ids).astype("<u4").tobytes()))
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


class StoredPassage(NamedTuple):
    """What is told of a passage."""

    number: int
    digest: Digest
    references: int  # of documents' lists; one that holds it twice counts twice
    bytes: int  # of its records; 0: none is stored
    worth: int  # the least are dropped first
    home: tuple[int, int]  # document and block that referred to it last


class PassageCounts(NamedTuple):
    """How many passages there are, of how many records are stored, and the bytes of these: all, and
    those of passages that are referred to more than once.
    """

    passages: int = 0
    stored: int = 0
    bytes: int = 0
    shared: int = 0


class KeptBytes(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Bytes of all records of passages, and what they may be at most; None: as many as come."""

    bytes: Count = 0
    budget: Count | None = None


class _Row(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    digest: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    references: Count
    bytes: Count
    worth: Count
    document: Count
    block: Block


class PassageTable:
    """The passages of one memory. Every method takes the transaction it works in, but `holding` and
    `take_left`.
    """

    def __init__(self, blocks: BlockTable) -> None:
        self._blocks = blocks
        self._lock = threading.Lock()
        self._held: Counter[Digest] = Counter()  # by writers of this process
        self._left: set[Digest] = set()  # that were kept for these alone

    def number(self, txn: Transaction, digest: Digest) -> int | None:
        """The number of a passage, or None. Raises CorruptMemory."""
        value = txn.get_checked("digests", digest)
        if value is None:
            return None
        try:
            return unpack(value, Count)
        except ValueError as error:
            raise _damaged(digest.hex(), error) from error

    def row(self, txn: Transaction, number: int) -> StoredPassage | None:
        """What is told of a passage, or None. Raises CorruptMemory."""
        value = txn.get_checked("passages", passage_key(number))
        return None if value is None else _decode(number, value)

    def find(self, txn: Transaction, digest: Digest) -> StoredPassage | None:
        """What is told of the passage of a digest, or None. Raises CorruptMemory."""
        number = self.number(txn, digest)
        if number is None:
            return None
        row = self.row(txn, number)
        if row is None or row.digest != digest:
            raise _damaged(digest.hex(), ValueError(f"number {number} is another's"))
        return row

    def all(self, txn: Transaction) -> Iterator[StoredPassage]:
        """Every passage, in order of number. Raises CorruptMemory."""
        for key, value in txn.scan_checked("passages"):
            yield _decode(read_passage_key(key), value)

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
                txn.put_checked("digests", digest, msgpack.packb(row.number))
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
        self._change(txn, row, row._replace(bytes=0))
        txn.delete("passages", passage_key(row.number))
        txn.delete("digests", row.digest)

    def put(self, txn: Transaction, row: StoredPassage) -> None:
        """Write what is told of a passage whose records and worth are as they were."""
        told = [row.digest, row.references, row.bytes, row.worth, *row.home]
        txn.put_checked("passages", passage_key(row.number), msgpack.packb(told))

    def holding(self) -> "Holding":
        """Passages that stay until it is closed, whoever forgets them."""
        return Holding(self._held, self._lock)

    # Records, and what they may take

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
            self.drop_records(txn, row.number)

    def use(self, txn: Transaction, number: int, times: int) -> None:
        """Count uses of a passage, if there is one of that number. Raises CorruptMemory."""
        row = self.row(txn, number)
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
                self.drop_records(txn, one.number)
        for layer in sorted(records):
            self._blocks.put(txn, RecordKey(row.number, 0, layer), records[layer])
        stored = row._replace(bytes=size)
        self._change(txn, row, stored)
        return stored

    def drop_records(self, txn: Transaction, number: int) -> bool:
        """Delete the records of a passage, which stays by its tokens; whether there is one. Raises
        CorruptMemory.
        """
        row = self.row(txn, number)
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
            row = self.row(txn, number)
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
        self.put(txn, after)

    def _put_kept(self, txn: Transaction, size: int, budget: int | None) -> None:
        txn.put_checked("meta", _KV, msgpack.packb([size, budget]))

    # Repair

    def correct(self, txn: Transaction, row: StoredPassage, references: int) -> None:
        """Have a passage be referred to so often, and be found by its digest."""
        self.put(txn, row._replace(references=references))
        txn.put_checked("digests", row.digest, msgpack.packb(row.number))

    def recount(self, txn: Transaction) -> None:
        """Order all passages by worth anew, and count their bytes. Raises CorruptMemory."""
        txn.delete_range("worth", b"", None)
        size = 0
        for row in list(self.all(txn)):
            if row.bytes:
                txn.put_checked("worth", worth_key(row.worth, row.number), b"")
                size += row.bytes
        try:
            budget = self.kept(txn).budget
        except CorruptMemory:  # nobody knows it any more
            budget = None
        self._put_kept(txn, size, budget)
        self.set_budget(txn, budget)


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


def _decode(number: int, value: bytes) -> StoredPassage:
    try:
        row = unpack(value, _Row)
    except ValueError as error:
        raise _damaged(str(number), error) from error
    home = row.document, row.block
    return StoredPassage(number, row.digest, row.references, row.bytes, row.worth, home)


def _damaged(which: str, error: ValueError) -> CorruptMemory:
    return CorruptMemory(
        f"what is told of passage {which} is damaged ({error}); run verify --repair"
    )
