"""What blocks are found by, as it is stored: runs of consecutive blocks on a fixed grid, that say
what they are and whose.

A value is, in little-endian order, a header of the kind (u8), a digest of the landmarks' geometry
or of the selector (16 bytes), blocks (u32), and tokens or words (u32); then the numbers: of
landmark keys raw bits [blocks, num_kv_heads, head_dim]; of token landmarks the tokens of each block
(u16), then int8 [tokens, width]; of words the distinct words of each block (u32), their hashes
(u32) and their counts (u16).
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from memstore.block import Geometry
from memstore.disk.format.block_words import BlockWords
from memstore.disk.format.index_spec import IndexSpec

Kind = Literal["landmark", "token", "words"]
# blocks that share a value: few values to open, little to write again at a commit
RUN_BLOCKS: dict[Kind, int] = {"landmark": 256, "token": 32, "words": 256}
_KINDS: tuple[Kind, ...] = get_args(Kind)
_HEADER = struct.Struct("<B16sII")


class KeyRun(NamedTuple):
    """Landmark keys of consecutive blocks of one document and layer."""

    first_block: int
    keys: np.ndarray  # raw bits [blocks, num_kv_heads, head_dim]

    @property
    def end_block(self) -> int:
        """The block that follows."""
        return self.first_block + len(self.keys)

    def cut(self, first: int, end: int) -> "KeyRun":
        """The run of those of its blocks that are among first .. end of the document."""
        low = max(0, first - self.first_block)
        return KeyRun(self.first_block + low, self.keys[low : max(low, end - self.first_block)])


class TokenRun(NamedTuple):
    """Token landmarks of consecutive blocks of one document."""

    first_block: int
    landmarks: np.ndarray  # int8 [tokens, width]
    lengths: np.ndarray  # int64 [blocks]: tokens of each

    @property
    def end_block(self) -> int:
        """The block that follows."""
        return self.first_block + len(self.lengths)

    def cut(self, first: int, end: int) -> "TokenRun":
        """The run of those of its blocks that are among first .. end of the document."""
        low, high = self.lengths[: max(0, first - self.first_block)], self.lengths
        high = high[: max(0, end - self.first_block)]
        some = self.landmarks[low.sum() : high.sum()]
        return TokenRun(self.first_block + len(low), some, high[len(low) :])


class WordRun(NamedTuple):
    """Words of consecutive blocks of one document."""

    first_block: int
    words: BlockWords

    @property
    def end_block(self) -> int:
        """The block that follows."""
        return self.first_block + len(self.words.sizes)

    def cut(self, first: int, end: int) -> "WordRun":
        """The run of those of its blocks that are among first .. end of the document."""
        low = max(0, first - self.first_block)
        high = max(low, min(end, self.end_block) - self.first_block)
        return WordRun(self.first_block + low, self.words.cut(low, high))


Run = KeyRun | TokenRun | WordRun


def kind_of(run: Run) -> Kind:
    """What a run is of."""
    if isinstance(run, KeyRun):
        return "landmark"
    return "token" if isinstance(run, TokenRun) else "words"


def kinds_of(form: IndexSpec) -> list[Kind]:
    """What a form keeps."""
    kinds: list[tuple[Kind, bool]] = [("token", form.width > 0), ("words", form.words)]
    return [kind for kind, kept in kinds if kept]


def run_of(kind: Kind, block: int) -> int:
    """First block of the run that a block is of."""
    return block // RUN_BLOCKS[kind] * RUN_BLOCKS[kind]


def joined(first_block: int, parts: Sequence[Run]) -> Run:
    """One run of some of one kind, at least one, that follow each other from a block on."""
    keys = [part.keys for part in parts if isinstance(part, KeyRun)]
    if keys:
        return KeyRun(first_block, np.concatenate(keys))
    words = [part.words for part in parts if isinstance(part, WordRun)]
    if words:
        return WordRun(first_block, BlockWords.joined(words))
    tokens = [part for part in parts if isinstance(part, TokenRun)]
    return TokenRun(
        first_block,
        np.concatenate([part.landmarks for part in tokens]),
        np.concatenate([part.lengths for part in tokens]),
    )


def encode_run(run: Run, geometry: Geometry, spec: IndexSpec | None) -> bytes:
    """The value of a run; geometry: of landmark keys, spec: of the memory's selector."""
    numbers: tuple[np.ndarray, ...]
    if isinstance(run, KeyRun):
        counts, numbers = (len(run.keys), 0), (run.keys,)
    elif isinstance(run, TokenRun):
        counts = len(run.lengths), len(run.landmarks)
        numbers = run.lengths.astype("<u2"), run.landmarks
    else:
        sizes, hashes, of_words = run.words
        counts = len(sizes), len(hashes)
        numbers = sizes.astype("<u4"), hashes.astype("<u4"), of_words.astype("<u2")
    header = _HEADER.pack(*_identity(kind_of(run), geometry, spec), *counts)
    return header + b"".join(part.tobytes() for part in numbers)


def decode_run(
    kind: Kind, first_block: int, value: bytes, geometry: Geometry, spec: IndexSpec | None
) -> Run:
    """The inverse of encode_run; the numbers lie in the value. Raises ValueError for a value that
    is no such run.
    """
    if len(value) < _HEADER.size:
        raise ValueError(f"it is truncated to {len(value)} bytes")
    *identity, blocks, count = _HEADER.unpack_from(value)
    if tuple(identity) != _identity(kind, geometry, spec):
        raise ValueError("they are of another kind, model or selector")
    heads, _, dim = geometry.shape
    width = 0 if spec is None else spec.width
    size = (
        _HEADER.size
        + {
            "landmark": blocks * heads * dim * geometry.itemsize,
            "token": 2 * blocks + count * width,
            "words": 4 * blocks + 6 * count,
        }[kind]
    )
    if not blocks or len(value) != size:
        raise ValueError(f"{blocks} blocks in {len(value)} bytes instead of {size}")
    at = _HEADER.size
    if kind == "landmark":
        keys = np.frombuffer(value, f"<i{geometry.itemsize}", offset=at)
        return KeyRun(first_block, keys.reshape(blocks, heads, dim))
    if kind == "token":
        lengths = np.frombuffer(value, "<u2", blocks, at).astype(np.int64)
        if not lengths.all() or int(lengths.sum()) != count:
            raise ValueError("its token landmarks are not those of its blocks")
        flat = np.frombuffer(value, np.int8, offset=at + 2 * blocks)
        return TokenRun(first_block, flat.reshape(count, width), lengths)
    sizes = np.frombuffer(value, "<u4", blocks, at)
    hashes = np.frombuffer(value, "<u4", count, at + 4 * blocks)
    counts = np.frombuffer(value, "<u2", offset=at + 4 * blocks + 4 * count)
    words = BlockWords(sizes, hashes, counts)
    if int(sizes.sum(dtype=np.int64)) != count or not words.in_order or not counts.all():
        raise ValueError("its words are not in order, of other blocks, or have a count of 0")
    return WordRun(first_block, words)


def token_run_bytes(spec: IndexSpec, blocks: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Bytes of the values of token runs of so many blocks and tokens [n], int64 [n]."""
    return _HEADER.size + 2 * blocks + tokens * spec.width


def _identity(kind: Kind, geometry: Geometry, spec: IndexSpec | None) -> tuple[int, bytes]:
    """The number of a kind, and a digest of all that its numbers depend on."""
    if kind == "landmark":
        of = f"{geometry.dtype} {geometry.num_kv_heads} {geometry.head_dim}"
    else:
        assert spec is not None
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
        self._parts, self._lengths, self._blocks = parts, lengths, len(lengths)
        self._ends = dict.fromkeys(parts, 0)

    def add(self, part: int, run: Run) -> None:
        """The next run of a part."""
        kind, least = self._parts.get(part, (None, 0))
        at, first = self._ends.get(part, 0), run.first_block
        if kind != kind_of(run):
            raise ValueError(f"it has {kind_of(run)} landmarks of a part {part}")
        if first != at and (at or first > least or first != run_of(kind, first)):
            raise ValueError(
                f"its {kind} landmarks of part {part}, blocks {at}..{first}, are missing, or extra"
            )
        end = min(first + RUN_BLOCKS[kind], self._blocks)
        right = run.end_block == end
        if isinstance(run, TokenRun):
            right = right and np.array_equal(run.lengths, self._lengths[first:end])
        if not right or first >= end:
            raise ValueError(
                f"its {kind} landmarks of part {part} from block {first} on are not one run"
            )
        self._ends[part] = end

    def end(self) -> None:
        """Nothing follows."""
        for part, end in self._ends.items():
            nothing = not end and self._parts[part][1] >= self._blocks  # has to be there
            if end != self._blocks and not nothing:
                raise ValueError(
                    f"its {self._parts[part][0]} landmarks of part {part} end at block {end} of "
                    f"{self._blocks}"
                )
