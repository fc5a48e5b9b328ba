"""Runs of many documents that have one run each, decoded together: as one run of all their blocks,
one document's behind the other's. What `RunForm.decode` would make of each of them, and of nothing
else.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import msgpack
import numpy as np

from memstore.disk.format.block_words import BlockWords
from memstore.disk.format.index_spec import IndexSpec
from memstore.disk.format.run_headers import key_header, token_header, word_header
from memstore.disk.format.runs import DTYPES, KeyRun, Kind, Run, RunForm, TokenRun, WordRun


class Size(NamedTuple):
    """Of what a run is to be."""

    blocks: int
    tokens: int


def decode_joined(form: RunForm, kind: Kind, values: Sequence[bytes], sizes: Sequence[Size]) -> Run:
    """One run of the blocks of all these values, each of them of all blocks of a document. sizes:
    of each document, at least one block. Raises ValueError where one of them is not such a run.
    """
    if kind == "landmark":
        return _keys(form, values, sizes)
    assert form.spec is not None
    return (_tokens if kind == "token" else _words)(form.spec, values, sizes)


def _keys(form: RunForm, values: Sequence[bytes], sizes: Sequence[Size]) -> KeyRun:
    of = form.geometry
    header = msgpack.packb(key_header(of))
    each = of.num_kv_heads * of.head_dim * of.itemsize
    bodies = [
        _body(value, header, size.blocks * each) for value, size in zip(values, sizes, strict=True)
    ]
    keys = np.frombuffer(_joined(bodies), f"<i{of.itemsize}")
    return KeyRun(0, keys.reshape(-1, of.num_kv_heads, of.head_dim))


def _tokens(spec: IndexSpec, values: Sequence[bytes], sizes: Sequence[Size]) -> TokenRun:
    @cache  # they differ by counts alone
    def header(blocks: int, tokens: int) -> bytes:
        packed: bytes = msgpack.packb(token_header(spec, blocks, tokens))
        return packed

    dtype = np.dtype(DTYPES[spec.dtype])
    each = spec.heads * spec.width * dtype.itemsize
    lengths, landmarks = list[bytes](), list[bytes]()
    for value, (blocks, tokens) in zip(values, sizes, strict=True):
        body = _body(value, header(blocks, tokens), 2 * blocks + tokens * each)
        lengths.append(body[: 2 * blocks])
        landmarks.append(body[2 * blocks :])
    of_blocks = np.frombuffer(_joined(lengths), "<u2").astype(np.int64)
    _check_sums(of_blocks, sizes, [size.tokens for size in sizes])
    flat = np.frombuffer(_joined(landmarks), dtype)
    if not of_blocks.all() or (dtype.kind == "f" and not np.isfinite(flat).all()):
        raise ValueError("a block has no token, or landmarks that are not finite")
    return TokenRun(0, flat.reshape(-1, spec.heads, spec.width), of_blocks)


def _words(spec: IndexSpec, values: Sequence[bytes], sizes: Sequence[Size]) -> WordRun:
    @cache
    def header(blocks: int, words: int) -> bytes:
        packed: bytes = msgpack.packb(word_header(spec, blocks, words))
        return packed

    parts, words = list[tuple[bytes, bytes, bytes]](), list[int]()
    for value, (blocks, _) in zip(values, sizes, strict=True):
        # a word takes 6 bytes; how many they are is told last in the header, in 1, 2, 3 or 5
        n = max(0, len(value) - len(header(blocks, 0)) + 1 - 4 * blocks) // 6
        body = _body(value, header(blocks, n), 4 * blocks + 6 * n)
        cut = 4 * blocks + 4 * n
        parts.append((body[: 4 * blocks], body[4 * blocks : cut], body[cut:]))
        words.append(n)
    columns = zip(("<u4", "<u4", "<u2"), zip(*parts))
    found = BlockWords(*(np.frombuffer(_joined(column), dtype) for dtype, column in columns))
    _check_sums(found.sizes, sizes, words)
    if not found.in_order or not found.counts.all():
        raise ValueError("words are not in order, or told to be there no times")
    return WordRun(0, found)


def _joined(parts: Sequence[bytes]) -> bytearray:
    return bytearray().join(parts)  # which a tensor may share, unlike bytes


def _body(value: bytes, header: bytes, size: int) -> bytes:
    """What stands behind a header, of so many bytes."""
    if len(value) != len(header) + size or not value.startswith(header):
        raise ValueError("a value is of another length, or says that it is something else")
    return value[len(header) :]


def _check_sums(of_blocks: np.ndarray, sizes: Sequence[Size], expected: Sequence[int]) -> None:
    """Do the numbers of each document's blocks add up?"""
    first = np.cumsum([0, *(size.blocks for size in sizes[:-1])])
    if np.add.reduceat(of_blocks, first, dtype=np.int64).tolist() != list(expected):
        raise ValueError("what blocks have is not what there is")
