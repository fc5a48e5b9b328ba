"""What blocks are found by, as it is stored: runs of consecutive blocks on a fixed grid, that say
what they are and whose.

A value is a header (msgpack: kind, of a selector's its digest, and what follows), then the numbers,
little-endian: of landmark keys raw bits [blocks, num_kv_heads, head_dim]; of token landmarks the
tokens of each block (u16), then int8 [tokens, width]; of words the distinct words of each block
(u32), their hashes (u32) and their counts (u16).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgpack
import numpy as np

from memstore.block import Geometry
from memstore.decode import Count, Positive, typed
from memstore.disk.format.block_words import BlockWords
from memstore.disk.format.index_spec import IndexSpec

_MOST_HEADER = 1024  # bytes


Kind = Literal["landmark", "token", "words"]
# blocks that share a value: few values to open, little to write again at a commit
RUN_BLOCKS: dict[Kind, int] = {"landmark": 256, "token": 32, "words": 256}

_LONGER = [128, 256, 65536, 65536]  # from where on msgpack tells a number in a byte more


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
        header, numbers = _key_header(geometry), (run.keys,)
    elif isinstance(run, TokenRun):
        header = _token_header(_some(spec), len(run.lengths), len(run.landmarks))
        numbers = run.lengths.astype("<u2"), run.landmarks
    else:
        sizes, hashes, counts = run.words
        header = _word_header(_some(spec), len(sizes), len(hashes))
        numbers = sizes.astype("<u4"), hashes.astype("<u4"), counts.astype("<u2")
    packed: bytes = msgpack.packb(header)
    return packed + b"".join(part.tobytes() for part in numbers)


def decode_run(
    kind: Kind, first_block: int, value: bytes, geometry: Geometry, spec: IndexSpec | None
) -> Run:
    """The inverse of encode_run; the numbers lie in the value. Raises ValueError for a value that
    is no such run.
    """
    header, start = _read_header(value)
    if kind == "landmark":
        _expect(header, _key_header(geometry))
        heads, _, dim = geometry.shape
        size = len(value) - start
        if not size or size % (heads * dim * geometry.itemsize):
            raise ValueError("its landmark keys have an impossible length")
        keys = np.frombuffer(value, f"<i{geometry.itemsize}", offset=start)
        return KeyRun(first_block, keys.reshape(-1, heads, dim))
    if kind == "token":
        return _decode_tokens(first_block, header, value, start, _some(spec))
    return _decode_words(first_block, header, value, start, _some(spec))


def _decode_tokens(
    first_block: int, header: dict[str, Any], value: bytes, start: int, spec: IndexSpec
) -> TokenRun:
    blocks, tokens = _counts(header, "blocks", "tokens")
    _expect(header, _token_header(spec, blocks, tokens))
    _expect_bytes(value, start, 2 * blocks + tokens * spec.width)
    lengths = np.frombuffer(value, "<u2", blocks, start).astype(np.int64)
    if not lengths.all() or int(lengths.sum()) != tokens:
        raise ValueError("its token landmarks are not those of its blocks")
    flat = np.frombuffer(value, np.int8, offset=start + 2 * blocks)
    return TokenRun(first_block, flat.reshape(tokens, spec.width), lengths)


def _decode_words(
    first_block: int, header: dict[str, Any], value: bytes, start: int, spec: IndexSpec
) -> WordRun:
    blocks, words = _counts(header, "blocks", "words")
    _expect(header, _word_header(spec, blocks, words))
    _expect_bytes(value, start, 4 * blocks + 6 * words)
    sizes = np.frombuffer(value, "<u4", blocks, start)
    hashes = np.frombuffer(value, "<u4", words, start + 4 * blocks)
    counts = np.frombuffer(value, "<u2", offset=start + 4 * blocks + 4 * words)
    if int(sizes.sum(dtype=np.int64)) != words:
        raise ValueError("its words are not those of its blocks")
    run = WordRun(first_block, BlockWords(sizes, hashes, counts))
    if not run.words.in_order or not counts.all():
        raise ValueError("its words are not in order, or have a count of 0")
    return run


def token_run_bytes(spec: IndexSpec, blocks: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Bytes of the values of token runs of so many blocks and tokens [n], int64 [n]."""
    least = len(msgpack.packb(_token_header(spec, 1, 1)))
    longer = sum(np.searchsorted(_LONGER, n, "right") for n in (blocks, tokens))
    size: np.ndarray = least + longer + 2 * blocks + tokens * spec.width
    return size


# Headers


def _key_header(geometry: Geometry) -> dict[str, Any]:
    shape = [geometry.num_kv_heads, geometry.head_dim]
    return {"kind": "landmark", "dtype": geometry.dtype, "shape": shape}


def _token_header(spec: IndexSpec, blocks: int, tokens: int) -> dict[str, Any]:
    header = {"kind": "token", "digest": spec.digest, "width": spec.width}
    return {**header, "blocks": blocks, "tokens": tokens}


def _word_header(spec: IndexSpec, blocks: int, words: int) -> dict[str, Any]:
    return {"kind": "words", "digest": spec.digest, "blocks": blocks, "words": words}


def _read_header(value: bytes) -> tuple[dict[str, Any], int]:
    """The header of a value, and where the numbers begin. Raises ValueError."""
    try:
        unpacker = msgpack.Unpacker(max_buffer_size=_MOST_HEADER, max_array_len=8, max_map_len=8)
        unpacker.feed(value[:_MOST_HEADER])
        return typed(unpacker.unpack(), dict[str, Any]), unpacker.tell()
    except msgpack.UnpackException as error:
        raise ValueError(f"its header is not understood: {error}") from error


def _counts(header: dict[str, Any], blocks: str, parts: str) -> tuple[int, int]:
    """Two counts of a header. Raises ValueError."""
    return typed(header.get(blocks), Positive), typed(header.get(parts), Count)


def _expect(header: dict[str, Any], expected: dict[str, Any]) -> None:
    if header != expected:
        raise ValueError(f"expected {expected}, found {header}; update memstore, or run verify")


def _expect_bytes(value: bytes, start: int, size: int) -> None:
    if len(value) - start != size:
        raise ValueError(f"it has {len(value) - start} bytes instead of {size}")


def _some(spec: IndexSpec | None) -> IndexSpec:
    assert spec is not None
    return spec


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
