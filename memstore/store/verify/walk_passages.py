"""Checking the passages of a memory: the records of each, once, and the counts of references; and
putting right what is wrong with them, which their tokens allow without a loss.
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from memstore.disk.format.document import Document
from memstore.disk.format.keys import passage_key, read_passage_key, record_key
from memstore.disk.lmdb.database import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.passage_table import Digest, StoredPassage
from memstore.errors import CorruptMemory


class PassageWalk:
    """What a walk over a memory has seen of its passages."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._whole: dict[Digest, tuple[int, int]] = {}  # records and their bytes
        self.damaged: dict[int, str] = {}  # by number, what is wrong

    def check(self, txn: Transaction, document: Document, lengths: np.ndarray) -> tuple[int, int]:
        """Read the records of a document's passages, those that no other document had; how many
        there are, and their bytes. What is wrong is told in `damaged`, and by `problems`.
        """
        records = size = 0
        for block, digest in self._catalog.digests_of(txn, document):
            if digest not in self._whole:
                self._whole[digest] = self._check(txn, document, block, digest, int(lengths[block]))
            count, its = self._whole[digest]
            records, size = records + count, size + its
        return records, size

    def _check(
        self, txn: Transaction, document: Document, block: int, digest: Digest, length: int
    ) -> tuple[int, int]:
        try:
            row = self._catalog.passages.find(txn, digest)
        except CorruptMemory:
            return 0, 0  # which `problems` meets
        if row is None:
            return 0, 0
        try:
            return self._read(txn, document, row, length)
        except CorruptMemory as error:
            what = str(error).partition(";")[0]
            self.damaged[row.number] = (
                f"passage {block} of document {document.name!r}: {what}; it is computed anew when "
                "it is needed"
            )
            return 0, 0

    def _read(
        self, txn: Transaction, document: Document, row: StoredPassage, length: int
    ) -> tuple[int, int]:
        """Raises CorruptMemory with the first thing that is wrong."""
        blocks, records, size = self._catalog.blocks, 0, 0
        layers = document.layers_of(self._catalog.signature) if row.bytes else []
        for key, data in blocks.walk(txn, row.number):
            if key[1:] != (0, *layers[records : records + 1]):
                raise CorruptMemory(f"a record before layer {key.layer} is missing, or extra")
            found = txn.view("blocks", record_key(key))
            tokens = blocks.check(found or b"", key, row.digest)
            if tokens != length:
                raise CorruptMemory(f"a record of {tokens} tokens instead of {length}")
            records, size = records + 1, size + len(data)
        if records != len(layers) or size != row.bytes:
            raise CorruptMemory(f"{records} records of {size} bytes instead of {row.bytes}")
        return records, size

    def problems(self) -> Iterator[str]:
        """What is wrong with the counts, now that all documents were read."""
        passages = self._catalog.passages
        with self._catalog.database.read() as txn:
            try:
                wanted = _references(txn, self._catalog)
                for row in passages.all(txn):
                    right = wanted.pop(row.digest, 0)
                    if row.references != right:
                        yield (
                            f"passage {row.number} counts {row.references} references instead of "
                            f"{right}"
                        )
                    if passages.number(txn, row.digest) != row.number:
                        yield f"passage {row.number} is not found by its digest"
            except CorruptMemory as error:
                yield str(error)
                return
            if wanted:
                yield f"{len(wanted)} passages that documents refer to are not told of"


def recount(txn: Transaction, catalog: Catalog) -> None:
    """Count references anew: what is not told is told, and passages that nobody refers to go.
    Raises CorruptMemory.
    """
    wanted = _references(txn, catalog)
    passages = catalog.passages
    there: set[Digest] = set()
    for key, _ in list(txn.scan("passages")):
        number = read_passage_key(key)
        try:
            row = passages.row(txn, number)
        except CorruptMemory:
            row = None
        if row is None or not wanted[row.digest] or row.digest in there:
            catalog.blocks.delete(txn, number)
            txn.delete("passages", passage_key(number))
            continue
        there.add(row.digest)
        passages.correct(txn, row, wanted[row.digest])
    for key, _ in list(txn.scan("digests")):
        if bytes(key) not in there:
            txn.delete("digests", bytes(key))
    numbers = catalog.new_numbers(txn)
    for digest in wanted.keys() - there:
        passages.correct(txn, StoredPassage(next(numbers), digest), wanted[digest])


def _references(txn: Transaction, catalog: Catalog) -> Counter[Digest]:
    """How often documents refer to each passage. Raises CorruptMemory."""
    wanted: Counter[Digest] = Counter()
    for document in catalog.documents(txn):
        if document.of_passages:
            for part in catalog.passage_parts(txn, document.id):
                wanted.update(catalog.digests(document, part.passages))
    return wanted
