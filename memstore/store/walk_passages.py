"""Checking the passages of a memory: the records of each, once, and the counts of references; and
putting the counts right.
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from memstore.block import RecordKey
from memstore.disk.catalog import Catalog
from memstore.disk.database import Transaction
from memstore.disk.document import Document
from memstore.disk.keys import passage_key, read_passage_key, record_key
from memstore.disk.passage_table import Digest, StoredPassage
from memstore.errors import CorruptMemory


class PassageWalk:
    """What a walk over a memory has seen of its passages."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._whole: dict[int, tuple[int, int]] = {}  # number: tokens, records

    def check(self, txn: Transaction, document: Document, lengths: np.ndarray) -> tuple[int, int]:
        """Read the records of a document's passages, those that no other document had; the records
        and bytes that it refers to. Raises CorruptMemory with the first thing that is wrong.
        """
        records = size = 0
        for block, row in self._catalog.passages_of(txn, document):
            if row.number not in self._whole:
                self._whole[row.number] = self._read(txn, document, row)
            tokens, count = self._whole[row.number]
            if tokens != lengths[block]:
                raise CorruptMemory(
                    f"passage {block} of document {document.name!r} has {tokens} tokens instead of "
                    f"{lengths[block]}"
                )
            records, size = records + count, size + row.bytes
        return records, size

    def _read(self, txn: Transaction, document: Document, row: StoredPassage) -> tuple[int, int]:
        blocks, size = self._catalog.blocks, 0
        tokens = set()
        expected = iter(document.layers_of(self._catalog.signature))
        for key, data in blocks.walk(txn, row.number):
            if key != RecordKey(row.number, 0, next(expected, -1)):
                raise CorruptMemory(f"passage {row.number}: {key} is missing before it, or extra")
            found = txn.view("blocks", record_key(key))
            tokens.add(blocks.check(found or b"", key, row.digest))
            size += len(data)
        if next(expected, None) is not None or size != row.bytes or len(tokens) != 1:
            raise CorruptMemory(f"records of passage {row.number} are missing, or not its own")
        return tokens.pop(), len(document.layers_of(self._catalog.signature))

    def problems(self) -> Iterator[str]:
        """What is wrong with the counts, now that all documents were read."""
        with self._catalog.database.read() as txn:
            try:
                wanted = _references(txn, self._catalog)
                for row in self._catalog.passages.all(txn):
                    right = wanted.pop(row.digest, 0)
                    if row.references != right:
                        yield (
                            f"passage {row.number} counts {row.references} references instead of "
                            f"{right}"
                        )
                    if self._catalog.passages.number(txn, row.digest) != row.number:
                        yield f"passage {row.number} is not found by its digest"
            except CorruptMemory as error:
                yield str(error)
                return
            if wanted:
                yield f"{len(wanted)} passages that documents refer to are not told of"


def recount(txn: Transaction, catalog: Catalog) -> None:
    """Count references anew, and delete passages that nobody refers to. Raises CorruptMemory."""
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


def _references(txn: Transaction, catalog: Catalog) -> Counter[Digest]:
    """How often documents refer to each passage. Raises CorruptMemory."""
    wanted: Counter[Digest] = Counter()
    for document in catalog.documents(txn):
        if document.of_passages:
            for part in catalog.passage_parts(txn, document.id):
                wanted.update(catalog.digests(document, part.passages))
    return wanted
