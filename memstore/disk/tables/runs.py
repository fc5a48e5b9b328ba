"""Search data of blocks: landmark keys, token landmarks or words. It is stored in runs, which are
consecutive blocks of a document on a fixed grid. The table of runs has a part for each layer of
landmark keys, or for each kind of a selector's data.

A value is, in little-endian order, a header of the kind (u8), a digest of the landmarks' geometry
or of the selector (16 bytes), blocks (u32) and rows (u32); the rows of each block (u32); then the
columns of the rows. A landmark key is a row of raw bits [num_kv_heads, head_dim]; a token's
landmark a row of int8 [width]; a distinct word of a block a row of its hash (u32) and count (u16).
"""

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from msgspec import Meta

from memstore.block import Geometry
from memstore.disk.format.document import Document
from memstore.disk.lmdb.transaction import Transaction, ValuePart, read_run_key, run_key, run_range
from memstore.errors import CorruptMemory, InvalidInput

Kind = Literal["landmark", "token", "words"]
# blocks of a run: large enough for few values, small enough to rewrite at a commit
RUN_BLOCKS: dict[Kind, int] = {"landmark": 256, "token": 32, "words": 256}

_Name = Annotated[str, Meta(min_length=1, max_length=128)]


@dataclass(frozen=True)
class IndexSpec:
    """The search data that a selector needs of a memory."""

    name: _Name
    digest: _Name  # digest of all that its landmarks depend on, such as weights
    # numbers of a token's landmark, a unit vector times 127 in int8; 0: no token landmarks
    width: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    words: bool = False  # are the words of every block stored


Words = Iterable[tuple[int, int]]
"""The distinct words of a block: (32-bit hash, count)."""

_MAX_COUNT = 0xFFFF  # of one word in a block; counts are uint16


class BlockWords(NamedTuple):
    """Words of consecutive blocks, sorted by hash within each block."""

    sizes: np.ndarray  # uint32 [blocks]: distinct words per block
    hashes: np.ndarray  # uint32 [sum of sizes]
    counts: np.ndarray  # uint16 [sum of sizes]: at least 1

    @classmethod
    def of(cls, blocks: Sequence[Words]) -> Self:
        """Build from the words of each block. Raises InvalidInput for a hash or count out of range,
        and for a repeated word.
        """
        each = [sorted(words) for words in blocks]
        flat = np.array(list(chain.from_iterable(each)), dtype=np.int64).reshape(-1, 2)
        sizes = np.array([len(words) for words in each], dtype=np.uint32)
        hashes, counts = flat[:, 0], flat[:, 1]
        if len(flat) and not (
            0 <= hashes.min() <= hashes.max() < 1 << 32
            and 1 <= counts.min() <= counts.max() <= _MAX_COUNT
        ):
            raise InvalidInput(
                f"words of a block must be (32-bit hash, count from 1 to {_MAX_COUNT})"
            )
        words = cls(sizes, hashes.astype(np.uint32), counts.astype(np.uint16))
        if not words.in_order:
            raise InvalidInput("a word of a block is listed twice; list it once with its count")
        return words

    @property
    def in_order(self) -> bool:
        """Whether the hashes of every block are strictly ascending."""
        block = np.repeat(np.arange(len(self.sizes), dtype=np.uint64), self.sizes)
        key = block << np.uint64(32) | self.hashes
        return bool((key[1:] > key[:-1]).all())


class Run(NamedTuple):
    """Search data of one kind for consecutive blocks of one document."""

    kind: Kind
    first_block: int
    sizes: np.ndarray  # int64 [blocks]: rows of each block
    columns: tuple[np.ndarray, ...]  # each [rows, ...]

    @classmethod
    def of_keys(cls, first_block: int, keys: np.ndarray) -> "Run":
        """Landmark keys of a layer: raw bits [blocks, num_kv_heads, head_dim]."""
        return cls("landmark", first_block, np.ones(len(keys), np.int64), (keys,))

    @classmethod
    def of_tokens(cls, first_block: int, landmarks: np.ndarray, lengths: np.ndarray) -> "Run":
        """Token landmarks int8 [tokens, width]; lengths: int64 [blocks], tokens of each."""
        return cls("token", first_block, lengths, (landmarks,))

    @classmethod
    def of_words(cls, first_block: int, words: BlockWords) -> "Run":
        """The distinct words of blocks."""
        return cls("words", first_block, words.sizes.astype(np.int64), words[1:])

    @property
    def landmarks(self) -> np.ndarray:
        """The landmark keys or token landmarks."""
        return self.columns[0]

    @property
    def words(self) -> BlockWords:
        """The words."""
        hashes, counts = self.columns
        return BlockWords(self.sizes.astype(np.uint32), hashes, counts)

    @property
    def end_block(self) -> int:
        """The block after it."""
        return self.first_block + len(self.sizes)

    def cut(self, first: int, end: int) -> "Run":
        """The part of the run within blocks first .. end - 1 of the document."""
        low = max(0, first - self.first_block)
        sizes = self.sizes[low : max(low, end - self.first_block)]
        at = int(self.sizes[:low].sum())
        columns = tuple(column[at : at + int(sizes.sum())] for column in self.columns)
        return self._replace(first_block=self.first_block + low, sizes=sizes, columns=columns)


def kinds_of(form: IndexSpec) -> list[Kind]:
    """The kinds of a selector's search data."""
    kinds: list[tuple[Kind, bool]] = [("token", form.width > 0), ("words", form.words)]
    return [kind for kind, kept in kinds if kept]


def run_of(kind: Kind, block: int) -> int:
    """The first block of the run that holds a block."""
    return block // RUN_BLOCKS[kind] * RUN_BLOCKS[kind]


def joined(first_block: int, parts: Sequence[Run]) -> Run:
    """Join at least one consecutive runs of one kind, which begin at first_block."""
    columns = tuple(map(np.concatenate, zip(*(part.columns for part in parts))))
    return Run(parts[0].kind, first_block, np.concatenate([part.sizes for part in parts]), columns)


class Coverage:
    """Checks that runs cover a whole document and follow the grid; if not, `add` and `end` raise
    ValueError.
    """

    def __init__(
        self, parts: Mapping[int, Kind], first_blocks: Mapping[int, int], lengths: np.ndarray
    ) -> None:
        """parts: part -> kind of its runs; first_blocks: layer -> first required block; lengths:
        tokens of each block of the document.
        """
        self._parts, self._lengths = parts, lengths
        self._least = first_blocks if "landmark" in parts.values() else dict.fromkeys(parts, 0)
        self._ends: dict[int, int] = {}

    def add(self, part: int, run: Run) -> None:
        """Check the next run of a part."""
        kind, least = self._parts[part], self._least[part]
        first, end = run.first_block, min(run.first_block + RUN_BLOCKS[kind], len(self._lengths))
        if part in self._ends:
            follows = first == self._ends[part]
        else:
            follows = first <= least and first == run_of(kind, first)
        same = kind != "token" or np.array_equal(run.sizes, self._lengths[first:end])
        if not follows or not same or run.end_block != end or first >= end:
            raise ValueError(
                f"its {kind} landmarks of part {part} from block {first} on are not one whole "
                "run, or some before are missing"
            )
        self._ends[part] = end

    def end(self) -> None:
        """Check that all runs were added."""
        blocks = len(self._lengths)
        for part, kind in self._parts.items():
            end = self._ends.get(part, blocks if self._least[part] >= blocks else 0)
            if end != blocks:
                raise ValueError(
                    f"its {kind} landmarks of part {part} end at block {end} of {blocks}"
                )


# The table

_TABLE = "landmarks"
_SELECTED: tuple[Kind, ...] = ("token", "words")  # kinds of a selector, by part
_NUMBERS: tuple[Kind, ...] = ("landmark", *_SELECTED)  # kinds by their number in headers
_HEADER = struct.Struct("<B16sII")


class RunTable:
    """Encodes, reads and writes the runs of one memory: of landmark keys or of one selector."""

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
        """Encode a run as a value."""
        counts = len(run.sizes), len(run.columns[0])
        numbers = [run.sizes.astype("<u4"), *run.columns]
        return _HEADER.pack(*self._identity(run.kind), *counts) + b"".join(
            part.tobytes() for part in numbers
        )

    def decode(self, part: int, first_block: int, value: bytes) -> Run:
        """Decode a run, whose arrays are views of the value. Raises ValueError for an invalid value
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
            raise ValueError("its rows do not match its blocks")
        return run

    def _row(self, kind: Kind) -> list[np.dtype[Any]]:
        """The dtypes of a row's columns."""
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
        """Same as `put`, for an encoded run."""
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

        All int64 [n]: run_blocks: number of blocks in the run of each block; before: tokens before
        the block in that run; lengths: tokens of the block; digests (uint64): XXH3-64 of its
        landmarks.
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
