"""What a memory with a selector finds its blocks by: runs of token landmarks and of words in the
table of landmarks, and the memory's own word on whose they are.

While landmarks of another selector take the place of the old ones, both are there, under keys of
two generations; `selector` tells which one is read, and `selector_next` that there is another.
"""

from collections.abc import Iterator
from typing import NamedTuple

import msgpack
import numpy as np

from memstore.decode import unpack
from memstore.disk.format.block_words import BlockWords
from memstore.disk.format.index_spec import SelectorForm, StoredForm
from memstore.disk.format.keys import (
    Range,
    document_range,
    read_selector_key,
    selector_key,
    selector_range,
)
from memstore.disk.format.runs import (
    RUN_BLOCKS,
    Coverage,
    Kind,
    Run,
    TokenRun,
    WordRun,
    decode,
    encode,
    kind_of,
    kinds_of,
)
from memstore.disk.lmdb.transaction import Transaction
from memstore.errors import CorruptMemory

_TABLE = "landmarks"
_KINDS: tuple[Kind, ...] = ("token", "words")
CURRENT, NEXT = b"selector", b"selector_next"  # in the table `meta`


class SelectorTable(NamedTuple):
    """The runs of one selector in one memory."""

    form: SelectorForm
    generation: int = 0

    @classmethod
    def read(cls, txn: Transaction, which: bytes = CURRENT) -> "SelectorTable | None":
        """What the memory says of its selector; None where it has none. Raises CorruptMemory."""
        value = txn.get_checked("meta", which)
        if value is None:
            return None
        try:
            stored = unpack(value, StoredForm)
            return cls(SelectorForm.decode(stored.form), stored.generation)
        except ValueError as error:
            raise CorruptMemory(
                f"what the memory says of its selector is damaged ({error}); restore it from a copy"
            ) from error

    def write(self, txn: Transaction, which: bytes = CURRENT) -> None:
        """Have the memory say that."""
        told = {"form": self.form.to_dict(), "generation": self.generation}
        txn.put_checked("meta", which, msgpack.packb(told))

    def put(self, txn: Transaction, document: int, run: Run) -> None:
        """Write a run, in place of the one that begins with the same block."""
        key = selector_key(document, self._part(kind_of(run)), run.first_block)
        txn.put_checked(_TABLE, key, encode(run, self.form))

    def runs(self, txn: Transaction, document: int, kind: Kind) -> Iterator[Run]:
        """A document's runs of one kind, in order of blocks; copies, safe to keep.

        The iterator lives in the transaction. Raises CorruptMemory, also for what is no run of this
        selector.
        """
        keys = self._range(document, kind)
        ahead = txn.ahead(_TABLE, *keys)
        next(ahead, None)
        for key, value in txn.scan_checked(_TABLE, *keys):
            yield self._decode(document, kind, read_selector_key(key)[2], value)
            next(ahead, None)

    def run(self, txn: Transaction, document: int, kind: Kind, first_block: int) -> Run | None:
        """The run that begins with a block; None if there is none. Raises CorruptMemory."""
        value = txn.get_checked(_TABLE, selector_key(document, self._part(kind), first_block))
        return None if value is None else self._decode(document, kind, first_block, value)

    def all_runs(self, txn: Transaction, document: int) -> Iterator[Run]:
        """A document's runs of every kind. Raises CorruptMemory."""
        for kind in kinds_of(self.form):
            yield from self.runs(txn, document, kind)

    def tokens(self, txn: Transaction, document: int) -> TokenRun:
        """A document's token landmarks. Raises CorruptMemory where some are missing."""
        none = np.zeros((0, self.form.heads, self.form.width), dtype=self.form.dtype)
        found = _joined(self.runs(txn, document, "token"), document)
        runs = [run for run in found if isinstance(run, TokenRun)]
        return TokenRun(
            0,
            np.concatenate([none, *(run.landmarks for run in runs)]),
            np.concatenate([np.zeros(0, np.int64), *(run.lengths for run in runs)]),
        )

    def words(self, txn: Transaction, document: int) -> BlockWords:
        """A document's words. Raises CorruptMemory where some are missing."""
        found = _joined(self.runs(txn, document, "words"), document)
        return BlockWords.joined([run.words for run in found if isinstance(run, WordRun)])

    def truncate(self, txn: Transaction, document: int, blocks: int) -> None:
        """Delete what is of the blocks from number `blocks` on."""
        for kind in _KINDS:
            for run in list(self.runs(txn, document, kind)):
                if run.end_block > blocks:
                    part = self._part(kind)
                    txn.delete(_TABLE, selector_key(document, part, run.first_block))
                    if run.first_block < blocks:
                        self.put(txn, document, run.cut(run.first_block, blocks))

    def delete(self, txn: Transaction, document: int) -> None:
        """Delete a document's runs of this generation."""
        for kind in _KINDS:
            txn.delete_range(_TABLE, *self._range(document, kind))

    def check(self, txn: Transaction, document: int, lengths: np.ndarray) -> None:
        """Read all of a document's runs; lengths: tokens of each of its blocks. Raises
        CorruptMemory where they are not all there, in the way from one to the next as in that by
        key.
        """
        coverage = Coverage(self.form, lengths)
        try:
            for run in self.all_runs(txn, document):
                coverage.add(run)
                key = selector_key(document, self._part(kind_of(run)), run.first_block)
                if txn.view(_TABLE, key) is None:
                    raise ValueError(f"block {run.first_block} is not found")
            coverage.end()
        except ValueError as error:
            raise CorruptMemory(f"document {document}: {error}") from error

    @property
    def parts(self) -> list[int]:
        """Under which the keys of its runs lie."""
        return [self._part(kind) for kind in kinds_of(self.form)]

    def _part(self, kind: Kind) -> int:
        return 2 * self.generation + _KINDS.index(kind)

    def _decode(self, document: int, kind: Kind, first_block: int, value: bytes) -> Run:
        try:
            return decode(kind, first_block, value, self.form)
        except ValueError as error:
            raise CorruptMemory(
                f"document {document}, block {first_block}: no {kind} landmarks of selector "
                f"{self.form.name} ({error}); run verify"
            ) from error

    def _range(self, document: int, kind: Kind) -> Range:
        return selector_range(document, self._part(kind))


def check_parts(txn: Transaction, document: int) -> None:
    """Raises CorruptMemory where a document has runs that are of no generation of a selector."""
    for key, _ in txn.scan(_TABLE, *document_range(document)):
        if read_selector_key(key)[1] >= 2 * len(_KINDS):
            raise CorruptMemory(
                f"document {document}: landmarks that no selector wrote ({key.hex()})"
            )


def _joined(runs: Iterator[Run], document: int) -> list[Run]:
    """The runs, if each begins where the last ended: where the grid has it."""
    found = list(runs)
    for number, run in enumerate(found):
        if run.first_block != number * RUN_BLOCKS[kind_of(run)]:
            raise CorruptMemory(
                f"document {document}: {kind_of(run)} landmarks before block {run.first_block} are "
                "missing; run verify"
            )
    return found
