"""What selectors find blocks by, as it is stored: runs of consecutive blocks, that say what they
are and whose.

A value is a header (msgpack: kind, digest of the selector, and what follows), then the numbers,
little-endian: of token landmarks the tokens of each block (u16), then [tokens, heads, width]; of
words the distinct words of each block (u32), their hashes (u32) and their counts (u16).
"""

from typing import Any, Literal, NamedTuple

import msgpack
import msgspec
import numpy as np

from memstore.decode import Count, Positive, typed
from memstore.disk.format.block_words import BlockWords
from memstore.disk.format.index_spec import SelectorForm

Kind = Literal["token", "words"]
# blocks that share a value: few values to open, little to write again at a commit
RUN_BLOCKS: dict[Kind, int] = {"token": 32, "words": 256}

_MOST_HEADER = 1024  # bytes
_DTYPES = {"int8": "<i1", "float16": "<f2", "float32": "<f4"}


class TokenRun(NamedTuple):
    """Token landmarks of consecutive blocks of one document."""

    first_block: int
    landmarks: np.ndarray  # [tokens, heads, width]
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


Run = TokenRun | WordRun


def kind_of(run: Run) -> Kind:
    """What a run is of."""
    return "token" if isinstance(run, TokenRun) else "words"


def numpy_dtype(form: SelectorForm) -> np.dtype:
    """Of the form's token landmarks."""
    return np.dtype(_DTYPES[form.dtype])


def encode(run: Run, form: SelectorForm) -> bytes:
    """The value of a run. Landmarks are of the form's shape and dtype."""
    if isinstance(run, TokenRun):
        header = _token_header(form, len(run.lengths), len(run.landmarks))
        numbers = run.lengths.astype("<u2"), run.landmarks.astype(numpy_dtype(form))
        return msgpack.packb(header) + b"".join(part.tobytes() for part in numbers)
    sizes, hashes, counts = run.words
    header = _word_header(form, len(sizes), len(hashes))
    parts = sizes.astype("<u4"), hashes.astype("<u4"), counts.astype("<u2")
    return msgpack.packb(header) + b"".join(part.tobytes() for part in parts)


def decode(kind: Kind, first_block: int, value: bytes, form: SelectorForm) -> Run:
    """The run of a value, whose numbers lie in it. Raises ValueError for what is no run of this
    form.
    """
    try:
        unpacker = msgpack.Unpacker(max_buffer_size=_MOST_HEADER, max_array_len=8, max_map_len=8)
        unpacker.feed(value[:_MOST_HEADER])
        told, start = unpacker.unpack(), unpacker.tell()
    except msgpack.UnpackException as error:
        raise ValueError(f"its header is not understood: {error}") from error
    if kind == "token":
        of_tokens = typed(told, _TokenHeader)
        blocks, n = of_tokens.blocks, of_tokens.tokens
        dtype = numpy_dtype(form)
        _expect(told, _token_header(form, blocks, n))
        _expect_bytes(value, start, 2 * blocks + n * form.heads * form.width * dtype.itemsize)
        lengths = np.frombuffer(value, "<u2", blocks, start).astype(np.int64)
        if not lengths.all() or int(lengths.sum()) != n:
            raise ValueError("its token landmarks are not those of its blocks")
        flat = np.frombuffer(value, dtype, offset=start + 2 * blocks)
        if dtype.kind == "f" and not np.isfinite(flat).all():
            raise ValueError("it has token landmarks that are not finite")
        return TokenRun(first_block, flat.reshape(n, form.heads, form.width), lengths)
    header = typed(told, _WordHeader)
    _expect(told, _word_header(form, header.blocks, header.words))
    _expect_bytes(value, start, 4 * header.blocks + 6 * header.words)
    sizes = np.frombuffer(value, "<u4", header.blocks, start)
    hashes = np.frombuffer(value, "<u4", header.words, start + 4 * header.blocks)
    counts = np.frombuffer(value, "<u2", offset=start + 4 * header.blocks + 4 * header.words)
    if int(sizes.sum(dtype=np.int64)) != header.words:
        raise ValueError("its words are not those of its blocks")
    words = BlockWords(sizes, hashes, counts)
    if not words.in_order or not words.counts.all():
        raise ValueError("its words are not in order, or told to be there no times")
    return WordRun(first_block, words)


class _TokenHeader(msgspec.Struct):
    kind: str
    digest: str
    dtype: str
    shape: tuple[int, int]
    blocks: Positive
    tokens: Positive


class _WordHeader(msgspec.Struct):
    kind: str
    digest: str
    blocks: Positive
    words: Count


def _token_header(form: SelectorForm, blocks: int, tokens: int) -> dict[str, Any]:
    shape = [form.heads, form.width]
    told = {"kind": "token", "digest": form.digest, "dtype": form.dtype, "shape": shape}
    return {**told, "blocks": blocks, "tokens": tokens}


def _word_header(form: SelectorForm, blocks: int, words: int) -> dict[str, Any]:
    return {"kind": "words", "digest": form.digest, "blocks": blocks, "words": words}


def _expect(told: Any, expected: dict[str, Any]) -> None:
    if told != expected:
        raise ValueError(f"expected {expected}, found {told}; update memstore, or run verify")


def _expect_bytes(value: bytes, start: int, size: int) -> None:
    if len(value) - start != size:
        raise ValueError(f"it has {len(value) - start} bytes instead of {size}")


class Coverage:
    """Do runs cover a whole document, each where the grid has it? `add` and `end` raise ValueError
    where they do not.
    """

    def __init__(self, form: SelectorForm, lengths: np.ndarray) -> None:
        """lengths: tokens of each block of the document."""
        self._lengths, self._blocks = lengths, len(lengths)
        self._ends: dict[Kind, int] = dict.fromkeys(kinds_of(form), 0)

    def add(self, run: Run) -> None:
        """The next run of its kind."""
        kind, first = kind_of(run), run.first_block
        at = self._ends.get(kind)
        if at is None or first != at:
            raise ValueError(f"its {kind} landmarks of blocks {at}..{first} are missing, or extra")
        end = min(first + RUN_BLOCKS[kind], self._blocks)
        right = run.end_block == end
        if isinstance(run, TokenRun):
            right = right and np.array_equal(run.lengths, self._lengths[first:end])
        if not right or first >= end:
            raise ValueError(f"its {kind} landmarks from block {first} on are not one run")
        self._ends[kind] = end

    def end(self) -> None:
        """Nothing follows."""
        for kind, end in self._ends.items():
            if end != self._blocks:
                raise ValueError(f"its {kind} landmarks end at block {end} of {self._blocks}")


def kinds_of(form: SelectorForm) -> list[Kind]:
    """What a form keeps."""
    kinds: list[tuple[Kind, bool]] = [("token", form.heads > 0), ("words", form.words)]
    return [kind for kind, kept in kinds if kept]
