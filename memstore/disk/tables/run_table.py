"""What a memory finds its blocks by: runs of landmark keys, a part for each layer, or of what its
selector keeps, a part for each kind.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from memstore.block import Geometry
from memstore.disk.format.block_words import BlockWords
from memstore.disk.format.index_spec import IndexSpec
from memstore.disk.format.keys import document_range, read_run_key, run_key, run_range
from memstore.disk.format.runs import RUN_BLOCKS, Kind, Run, RunForm, joined, kinds_of
from memstore.disk.lmdb.transaction import Transaction, ValuePart
from memstore.errors import CorruptMemory

_TABLE = "landmarks"
_KINDS: tuple[Kind, ...] = ("token", "words")


class RunTable:
    """The runs of one memory, of one selector or of landmark keys."""

    def __init__(self, geometry: Geometry, spec: IndexSpec | None = None) -> None:
        """spec: None: landmark keys of layers."""
        self.form, self.spec = RunForm(geometry, spec), spec

    def parts(self, layers: Iterable[int]) -> dict[int, Kind]:
        """Of a document that has these layers, the parts of its runs, in order."""
        if self.spec is None:
            return dict.fromkeys(layers, "landmark")
        return {self.part(kind): kind for kind in kinds_of(self.spec)}

    def part(self, kind: Kind) -> int:
        """The part of a kind that a selector keeps."""
        return _KINDS.index(kind)

    def kind(self, part: int) -> Kind:
        """The kind of a part's runs."""
        return "landmark" if self.spec is None else _KINDS[part]

    def decode(self, part: int, first_block: int, value: bytes) -> Run:
        """The run of a value. Raises ValueError."""
        return self.form.decode(self.kind(part), first_block, value)

    # Runs of a document

    def put(self, txn: Transaction, document: int, part: int, run: Run) -> None:
        """Write a run, in place of the one that begins with the same block."""
        self.put_value(txn, document, part, run.first_block, self.form.encode(run))

    def put_value(
        self, txn: Transaction, document: int, part: int, first_block: int, value: bytes
    ) -> None:
        """The same, of one that is encoded."""
        txn.put_checked(_TABLE, run_key(document, part, first_block), value)

    def run(self, txn: Transaction, document: int, part: int, first_block: int) -> Run | None:
        """The run that begins with a block; None if there is none. Raises CorruptMemory."""
        value = txn.get_checked(_TABLE, run_key(document, part, first_block))
        return None if value is None else self._decode(document, part, first_block, value)

    def runs(self, txn: Transaction, document: int) -> Iterator[tuple[int, Run]]:
        """Every run of a document, and its part, in order of part and block; copies, safe to keep.

        The iterator lives in the transaction. Raises CorruptMemory, also for what is no run of this
        memory.
        """
        for key, value in txn.scan_checked(_TABLE, *document_range(document)):
            _, part, first = read_run_key(key)
            yield part, self._decode(document, part, first, value)

    def tokens(self, txn: Transaction, document: int) -> Run:
        """A document's token landmarks. Raises CorruptMemory where some are missing."""
        assert self.spec is not None
        none = Run.of_tokens(0, np.zeros((0, self.spec.width), np.int8), np.zeros(0, np.int64))
        return joined(0, [none, *self._of_kind(txn, document, "token")])

    def token_landmarks(self, txn: Transaction, places: "TokenPlaces") -> np.ndarray | None:
        """Token landmarks int8 [tokens, width] of single blocks, read from where they lie. None
        where a block's are not there, or not those that are told.
        """
        assert self.spec is not None
        part, each, size = self.part("token"), RUN_BLOCKS["token"], self.spec.width
        wholes = np.asarray(self.form.value_bytes("token", places.run_blocks, places.run_tokens))
        columns = (
            places.documents, places.blocks // each * each, wholes,
            wholes - places.behind * size, places.lengths * size, places.digests,
        )  # fmt: skip
        wanted = [
            ValuePart(run_key(document, part, first), *told)
            for document, first, *told in zip(*(column.tolist() for column in columns))
        ]
        found = txn.parts(_TABLE, wanted)
        if found is None:
            return None
        out = np.frombuffer(bytearray().join(found), np.int8)  # which a tensor may share
        return out.reshape(-1, self.spec.width)

    def words(self, txn: Transaction, document: int) -> BlockWords:
        """A document's words. Raises CorruptMemory where some are missing."""
        none = Run.of_words(0, BlockWords.of([]))
        return joined(0, [none, *self._of_kind(txn, document, "words")]).words

    def delete_run(self, txn: Transaction, document: int, part: int, first_block: int) -> None:
        """Delete the run of a part that begins with a block, if there is one."""
        txn.delete(_TABLE, run_key(document, part, first_block))

    def covered(self, first_blocks: Mapping[int, int]) -> dict[int, tuple[Kind, int]]:
        """What runs of a document have to cover: see Coverage. first_blocks: of its layers."""
        parts = self.parts(first_blocks)
        return {
            part: (kind, first_blocks[part] if kind == "landmark" else 0)
            for part, kind in parts.items()
        }

    def _decode(self, document: int, part: int, first_block: int, value: bytes) -> Run:
        kind = self.kind(part)
        try:
            return self.decode(part, first_block, value)
        except ValueError as error:
            whose = f"layer {part}" if self.spec is None else f"selector {self.spec.name}"
            raise CorruptMemory(
                f"document {document}, {whose}, block {first_block}: no {kind} landmarks "
                f"({error}); run verify"
            ) from error

    def _of_kind(self, txn: Transaction, document: int, kind: Kind) -> Iterator[Run]:
        """A document's runs of one kind, if each begins where the last ended: where the grid has
        it.
        """
        found = txn.scan_checked(_TABLE, *run_range(document, self.part(kind)))
        for number, (key, value) in enumerate(found):
            _, part, first = read_run_key(key)
            if first != number * RUN_BLOCKS[kind]:
                raise CorruptMemory(
                    f"document {document}: {kind} landmarks before block {first} are missing; run "
                    "verify"
                )
            yield self._decode(document, part, first, value)


class TokenPlaces(NamedTuple):
    """Where single blocks' token landmarks lie, int64 [n] each."""

    documents: np.ndarray
    blocks: np.ndarray
    lengths: np.ndarray  # tokens of the block
    digests: np.ndarray  # uint64: XXH3-64 of its landmarks
    behind: np.ndarray  # tokens from its first to the end of its run
    run_blocks: np.ndarray  # of its run
    run_tokens: np.ndarray
