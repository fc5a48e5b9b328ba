"""What blocks are found by, as it is stored: runs of consecutive blocks on a fixed grid, that say
what they are and whose.

A value is, in little-endian order, a header of the kind (u8), a digest of the landmarks' geometry
or of the selector (16 bytes), blocks (u32) and rows (u32); the rows of each block (u32); then the
columns of the rows. A landmark key is a row of raw bits [num_kv_heads, head_dim]; a token's
landmark a row of int8 [width]; a distinct word of a block a row of its hash (u32) and count (u16).
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from memstore.block import Geometry
from memstore.disk.format.block_words import BlockWords
from memstore.disk.format.index_spec import IndexSpec

Kind = Literal["landmark", "token", "words"]
# blocks that share a value: few values to open, little to write again at a commit
RUN_BLOCKS: dict[Kind, int] = {"landmark": 256, "token": 32, "words": 256}
_KINDS: tuple[Kind, ...] = get_args(Kind)
_HEADER = struct.Struct("<B16sII")


class Run(NamedTuple):
    """What consecutive blocks of one document are found by, of one kind."""

    kind: Kind
    first_block: int
    sizes: np.ndarray  # int64 [blocks]: rows of each
    columns: tuple[np.ndarray, ...]  # [rows, ...] each

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
        """Landmark keys, or token landmarks, as they were given."""
        return self.columns[0]

    @property
    def words(self) -> BlockWords:
        """The words, as they were given."""
        hashes, counts = self.columns
        return BlockWords(self.sizes.astype(np.uint32), hashes, counts)

    @property
    def end_block(self) -> int:
        """The block that follows."""
        return self.first_block + len(self.sizes)

    def cut(self, first: int, end: int) -> "Run":
        """The run of those of its blocks that are among first .. end of the document."""
        low = max(0, first - self.first_block)
        sizes = self.sizes[low : max(low, end - self.first_block)]
        at = int(self.sizes[:low].sum())
        columns = tuple(column[at : at + int(sizes.sum())] for column in self.columns)
        return self._replace(first_block=self.first_block + low, sizes=sizes, columns=columns)


def kinds_of(form: IndexSpec) -> list[Kind]:
    """What a form keeps."""
    kinds: list[tuple[Kind, bool]] = [("token", form.width > 0), ("words", form.words)]
    return [kind for kind, kept in kinds if kept]


def run_of(kind: Kind, block: int) -> int:
    """First block of the run that a block is of."""
    return block // RUN_BLOCKS[kind] * RUN_BLOCKS[kind]


def joined(first_block: int, parts: Sequence[Run]) -> Run:
    """One run of some of one kind, at least one, that follow each other from a block on."""
    columns = tuple(map(np.concatenate, zip(*(part.columns for part in parts))))
    return Run(parts[0].kind, first_block, np.concatenate([part.sizes for part in parts]), columns)


class RunForm(NamedTuple):
    """How runs of one memory are stored: of a selector, or landmark keys of the KV geometry."""

    geometry: Geometry
    spec: IndexSpec | None

    def encode(self, run: Run) -> bytes:
        """The value of a run."""
        counts = len(run.sizes), len(run.columns[0])
        numbers = [run.sizes.astype("<u4"), *run.columns]
        return _HEADER.pack(*self._identity(run.kind), *counts) + b"".join(
            part.tobytes() for part in numbers
        )

    def decode(self, kind: Kind, first_block: int, value: bytes) -> Run:
        """The inverse of `encode`; the numbers lie in the value. Raises ValueError for a value that
        is no such run.
        """
        if len(value) < _HEADER.size:
            raise ValueError(f"it is truncated to {len(value)} bytes")
        *identity, blocks, rows = _HEADER.unpack_from(value)
        if tuple(identity) != self._identity(kind):
            raise ValueError("they are of another kind, model or selector")
        size = int(self.value_bytes(kind, blocks, rows))
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

    def value_bytes(
        self, kind: Kind, blocks: int | np.ndarray, rows: int | np.ndarray
    ) -> int | np.ndarray:
        """Bytes of the values of runs of so many blocks and rows, numbers or int64 [n]."""
        return _HEADER.size + 4 * blocks + rows * sum(row.itemsize for row in self._row(kind))

    def _row(self, kind: Kind) -> list[np.dtype[Any]]:
        """The columns of a row."""
        heads, _, dim = self.geometry.shape
        if kind == "landmark":
            return [np.dtype((f"<i{self.geometry.itemsize}", (heads, dim)))]
        if kind == "token":
            return [np.dtype((np.int8, (0 if self.spec is None else self.spec.width,)))]
        return [np.dtype("<u4"), np.dtype("<u2")]

    def _identity(self, kind: Kind) -> tuple[int, bytes]:
        """The number of a kind, and a digest of all that its numbers depend on."""
        geometry, spec = self
        of = f"{geometry.dtype} {geometry.num_kv_heads} {geometry.head_dim}"
        if kind != "landmark" and spec is not None:
            of = f"{spec.width} {spec.digest}"
        return _KINDS.index(kind), hashlib.blake2b(of.encode(), digest_size=16).digest()


class Coverage:
    """Do runs cover a whole document, each where the grid has it? `add` and `end` raise ValueError
    where they do not.
    """

    def __init__(self, parts: Mapping[int, tuple[Kind, int]], lengths: np.ndarray) -> None:
        """parts: of each the kind of its runs, and the first block that has to be there; lengths:
        tokens of each block of the document.
        """
        self._parts, self._lengths = parts, lengths
        self._ends: dict[int, int] = {}

    def add(self, part: int, run: Run) -> None:
        """The next run of a part."""
        kind, least = self._parts[part]
        first, end = run.first_block, min(run.first_block + RUN_BLOCKS[kind], len(self._lengths))
        if part in self._ends:
            follows = first == self._ends[part]
        else:
            follows = first <= least and first == run_of(kind, first)
        same = kind != "token" or np.array_equal(run.sizes, self._lengths[first:end])
        if not follows or not same or run.end_block != end or first >= end:
            raise ValueError(
                f"its {kind} landmarks of part {part} from block {first} on are not one run, or "
                "some before are missing"
            )
        self._ends[part] = end

    def end(self) -> None:
        """Nothing follows."""
        blocks = len(self._lengths)
        for part, (kind, least) in self._parts.items():
            end = self._ends.get(part, blocks if least >= blocks else 0)
            if end != blocks:
                raise ValueError(
                    f"its {kind} landmarks of part {part} end at block {end} of {blocks}"
                )
