"""The table of search data: runs of landmark keys, one part for each layer, or of a selector's
data, one part for each kind.

A value is, in little-endian order, a header of the kind (u8), a digest of the landmarks' geometry
or of the selector (16 bytes), blocks (u32) and rows (u32); the rows of each block (u32); then the
columns of the rows. A landmark key is a row of raw bits [num_kv_heads, head_dim]; a token's
landmark a row of int8 [width]; a distinct word of a block a row of its hash (u32) and count (u16).
"""

import hashlib
import struct
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from memstore.block import Geometry
from memstore.disk.format.document import Document
from memstore.disk.format.runs import RUN_BLOCKS, IndexSpec, Kind, Run, joined, kinds_of
from memstore.disk.lmdb.transaction import Transaction, ValuePart, read_run_key, run_key, run_range
from memstore.errors import CorruptMemory

_TABLE = "landmarks"
_SELECTED: tuple[Kind, ...] = ("token", "words")  # kinds of a selector, by part
_NUMBERS: tuple[Kind, ...] = ("landmark", *_SELECTED)  # kinds by their number in headers
_HEADER = struct.Struct("<B16sII")


class RunTable:
    """The runs of one memory: of landmark keys or of one selector."""

    def __init__(self, geometry: Geometry, spec: IndexSpec | None = None) -> None:
        """spec: of the selector; None for landmark keys of layers."""
        self.geometry, self.spec = geometry, spec

    def parts(self, layers: Iterable[int]) -> dict[int, Kind]:
        """part -> kind for a document with these layers, in order."""
        if self.spec is None:
            return dict.fromkeys(layers, "landmark")
        return {self.part(kind): kind for kind in kinds_of(self.spec)}

    def part(self, kind: Kind) -> int:
        """The part of a selector's kind."""
        return _SELECTED.index(kind)

    def kind(self, part: int) -> Kind:
        """The kind of a part's runs."""
        return "landmark" if self.spec is None else _SELECTED[part]

    # Values

    def encode(self, run: Run) -> bytes:
        """The value of a run."""
        counts = len(run.sizes), len(run.columns[0])
        numbers = [run.sizes.astype("<u4"), *run.columns]
        return _HEADER.pack(*self._identity(run.kind), *counts) + b"".join(
            part.tobytes() for part in numbers
        )

    def decode(self, part: int, first_block: int, value: bytes) -> Run:
        """The run of a value, whose arrays are views of it. Raises ValueError for an invalid value
        or one of another part.
        """
        kind = self.kind(part)
        if len(value) < _HEADER.size:
            raise ValueError(f"it is truncated to {len(value)} bytes")
        *identity, blocks, rows = _HEADER.unpack_from(value)
        if tuple(identity) != self._identity(kind):
            raise ValueError("they are of another kind, model or selector")
        size = _HEADER.size + 4 * blocks + rows * sum(row.itemsize for row in self._row(kind))
        if not blocks or len(value) != size:
            raise ValueError(f"{blocks} blocks in {len(value)} bytes instead of {size}")
        sizes = np.frombuffer(value, "<u4", blocks, _HEADER.size).astype(np.int64)
        at, columns = _HEADER.size + 4 * blocks, list[np.ndarray]()
        for row in self._row(kind):
            columns.append(np.frombuffer(value, row, rows, at))
            at += columns[-1].nbytes
        run = Run(kind, first_block, sizes, tuple(columns))
        wrong = {
            "landmark": (sizes != 1).any(),
            "token": not sizes.all(),
            "words": kind == "words" and not (run.words.in_order and run.columns[1].all()),
        }
        if int(sizes.sum()) != rows or wrong[kind]:
            raise ValueError("its numbers are not those of its blocks")
        return run

    def _row(self, kind: Kind) -> list[np.dtype[Any]]:
        """The columns of a row."""
        heads, _, dim = self.geometry.shape
        if kind == "landmark":
            return [np.dtype((f"<i{self.geometry.itemsize}", (heads, dim)))]
        if kind == "token":
            return [np.dtype((np.int8, (0 if self.spec is None else self.spec.width,)))]
        return [np.dtype("<u4"), np.dtype("<u2")]

    def _identity(self, kind: Kind) -> tuple[int, bytes]:
        """The number of a kind, and the digest in its headers."""
        geometry, spec = self.geometry, self.spec
        of = f"{geometry.dtype} {geometry.num_kv_heads} {geometry.head_dim}"
        if kind != "landmark" and spec is not None:
            of = f"{spec.width} {spec.digest}"
        return _NUMBERS.index(kind), hashlib.blake2b(of.encode(), digest_size=16).digest()

    # Runs of a document

    def put(self, txn: Transaction, document: int, part: int, run: Run) -> None:
        """Write a run, replacing the one that begins with the same block."""
        self.put_value(txn, document, part, run.first_block, self.encode(run))

    def put_value(
        self, txn: Transaction, document: int, part: int, first_block: int, value: bytes
    ) -> None:
        """As `put`, for an encoded run."""
        txn.put_checked(_TABLE, run_key(document, part, first_block), value)

    def run(self, txn: Transaction, document: int, part: int, first_block: int) -> Run | None:
        """The run that begins with a block; None if there is none. Raises CorruptMemory."""
        value = txn.get_checked(_TABLE, run_key(document, part, first_block))
        return None if value is None else self._decode(document, part, first_block, value)

    def whole(self, txn: Transaction, document: Document, part: int) -> Run:
        """A document's runs of one part, joined. Raises CorruptMemory if some are missing."""
        kind = self.kind(part)
        columns = tuple(np.zeros(0, row) for row in self._row(kind))
        runs = [Run(kind, 0, np.zeros(0, np.int64), columns)]
        for key, value in txn.scan_checked(_TABLE, *run_range(document.id, part)):
            runs.append(self._decode(*read_run_key(key), value))
        follow = all(run.end_block == after.first_block for run, after in pairwise(runs))
        if not follow or runs[-1].end_block != document.blocks:
            raise CorruptMemory(
                f"{kind} landmarks of document {document.name!r}, part {part}, are missing; run "
                "verify"
            )
        return joined(0, runs)

    def token_landmarks(
        self,
        txn: Transaction,
        documents: np.ndarray,
        blocks: np.ndarray,
        run_blocks: np.ndarray,
        before: np.ndarray,
        lengths: np.ndarray,
        digests: np.ndarray,
    ) -> np.ndarray | None:
        """Token landmarks int8 [tokens, width] of single blocks [n], read without their whole runs.
        None if some are missing or do not match their digest.

        All int64 [n]: run_blocks: blocks of the run that holds each block; before: tokens before
        it in that run; lengths: its tokens; digests (uint64): XXH3-64 of its landmarks.
        """
        assert self.spec is not None
        part, each, width = self.part("token"), RUN_BLOCKS["token"], self.spec.width
        starts = _HEADER.size + 4 * run_blocks + before * width
        columns = documents, blocks // each * each, starts, lengths * width, digests
        wanted = [
            ValuePart(run_key(document, part, first), *told)
            for document, first, *told in zip(*(column.tolist() for column in columns))
        ]
        found = txn.parts(_TABLE, wanted)
        if found is None:
            return None
        out = np.frombuffer(bytearray().join(found), np.int8)  # writable, for tensors
        return out.reshape(-1, width)

    def delete_run(self, txn: Transaction, document: int, part: int, first_block: int) -> None:
        """Delete the run of a part that begins with a block, if there is one."""
        txn.delete(_TABLE, run_key(document, part, first_block))

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
