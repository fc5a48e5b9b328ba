"""Search data of blocks (landmark keys, token landmarks or words), in runs of consecutive blocks
of a document on a fixed grid.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Literal, NamedTuple, Self

import numpy as np
from msgspec import Meta

from memstore.errors import InvalidInput

Kind = Literal["landmark", "token", "words"]
# blocks of a run: large enough for few values, small enough to rewrite at a commit
RUN_BLOCKS: dict[Kind, int] = {"landmark": 256, "token": 32, "words": 256}

_Name = Annotated[str, Meta(min_length=1, max_length=128)]


@dataclass(frozen=True)
class IndexSpec:
    """The search data of a memory's selector."""

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
        """Are the hashes of every block strictly ascending?"""
        block = np.repeat(np.arange(len(self.sizes), dtype=np.uint64), self.sizes)
        key = block << np.uint64(32) | self.hashes
        return bool((key[1:] > key[:-1]).all())


class Run(NamedTuple):
    """Search data, of one kind, of consecutive blocks of one document."""

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
    """One run from at least one consecutive runs of one kind, which begin at a block."""
    columns = tuple(map(np.concatenate, zip(*(part.columns for part in parts))))
    return Run(parts[0].kind, first_block, np.concatenate([part.sizes for part in parts]), columns)


class Coverage:
    """Checks that runs cover a whole document and follow the grid: `add` and `end` raise ValueError
    if not.
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
                f"its {kind} landmarks of part {part} from block {first} on are not one run, or "
                "some before are missing"
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
