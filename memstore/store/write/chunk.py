"""A chunk of a document, or a batch of its passages, on its way to disk: what a writer is given,
checked.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from memstore.block import BlockKey
from memstore.disk.format.block_words import Words
from memstore.disk.format.document import Document
from memstore.disk.format.passage_parts import Passage, encode_part
from memstore.disk.format.runs import KeyRun, Run
from memstore.disk.format.signature import Signature
from memstore.disk.format.token_parts import encode_tokens
from memstore.disk.tables.passage_rows import Digest
from memstore.disk.tables.run_table import RunTable
from memstore.errors import InvalidInput
from memstore.store.index_entries import IndexEntries
from memstore.tiers.raw_bits import raw_view, torch_dtype

LayerBlocks = tuple[Tensor, Tensor, Tensor]
"""K [n, Hkv, block_size, D], V likewise, landmark keys [n, Hkv, D] of a chunk's n blocks in one
layer, in the KV dtype.
"""


class RecentBlocks(NamedTuple):
    """The latest blocks of a document in one layer, as they are stored."""

    k: Tensor  # [n, Hkv, block_size, D]
    v: Tensor  # [n, Hkv, block_size, D]
    landmarks: Tensor  # [n, Hkv, D]
    blocks: range


@dataclass(eq=False)
class Chunk:
    """What was staged by one call: a chunk, or a batch of passages."""

    first_block: int
    first_token: int
    lengths: list[int]  # tokens of each block
    part: tuple[int, bytes]  # of the table of tokens: its number and value
    end: int  # of passages: characters of the document before what follows
    whole: bool  # more may follow
    # layer -> K, V; a memory layer's until they are encoded
    blocks: dict[int, tuple[Tensor, Tensor]]
    runs: dict[int, Run]  # what its blocks are found by, by part
    digests: Sequence[Digest] = ()  # of passages
    # of these, those with K and V here; the records of the others are stored already
    given: Sequence[int] = ()
    units: list[BlockKey] = field(default_factory=list)  # pinned ones that hold it
    # (block, or number of the passage in `digests`, and layer) -> record, once encoded
    records: dict[tuple[int, int], bytes] = field(default_factory=dict)
    encoding: Future[None] | None = None  # until it is done, blocks and records are the encoder's

    @classmethod
    def of(
        cls,
        first_block: int,
        ids: np.ndarray,
        char_start: int,
        layers: Mapping[int, LayerBlocks],
        length_of_last: int | None,
        *,
        document: Document,
        signature: Signature,
    ) -> "Chunk":
        """The chunk that begins at first_block: see DocumentWriter.add_chunk. Raises InvalidInput
        for what is no chunk of this memory.
        """
        size, chunk_blocks = signature.block_size, document.settings.chunk_blocks
        n = _check_layers(layers, first_block, document, signature, landmarks=True)
        last = size if length_of_last is None else length_of_last
        in_bounds = 1 <= n <= chunk_blocks and 1 <= last <= size
        if not in_bounds or len(ids) != (n - 1) * size + last:
            raise InvalidInput(
                f"{len(ids)} tokens in {n} blocks, the last of {last}, are no chunk of "
                f"{chunk_blocks} blocks"
            )
        lengths = [*[size] * (n - 1), last]
        return cls(
            first_block=first_block,
            first_token=first_block * size,
            lengths=lengths,
            part=(first_block * size, encode_tokens(char_start, ids)),
            end=0,
            whole=n == chunk_blocks and last == size,
            blocks={layer: (k, v) for layer, (k, v, _) in layers.items()},
            runs={
                layer: KeyRun(first_block, raw_view(keys.clone()))
                for layer, (_, _, keys) in layers.items()
            },
        )

    @classmethod
    def of_passages(
        cls,
        first_block: int,
        first_token: int,
        start: int,
        passages: Sequence[Passage],
        layers: Mapping[int, tuple[Tensor, Tensor]],
        digests: Sequence[Digest],
        given: Sequence[int],
        *,
        document: Document,
        signature: Signature,
        table: RunTable,
        token_landmarks: Tensor | None = None,
        words: Sequence[Words] | None = None,
    ) -> "Chunk":
        """The passages that begin at first_block; start: characters of the document before them;
        digests: of each; given: of which of them there are K and V. See
        DocumentWriter.add_passages. Raises InvalidInput for what are no passages of this memory.
        """
        lengths = _check_passages(first_block, start, passages, signature.block_size)
        n = 0
        if layers:
            n = _check_layers(layers, first_block, document, signature, landmarks=False)
        assert table.spec is not None
        entries = IndexEntries.of(token_landmarks, words, table.spec, lengths)
        if n != len(given):
            raise InvalidInput(f"expected keys and values of {len(given)} passages, got {n}")
        return cls(
            first_block=first_block,
            first_token=first_token,
            lengths=lengths,
            part=(first_block, encode_part(start, passages)),
            end=passages[-1].end,
            whole=True,
            blocks={layer: (k, v) for layer, (k, v) in layers.items()},
            runs={table.part(kind): run for kind, run in entries.runs(first_block).items()},
            digests=digests,
            given=given,
        )

    @property
    def end_block(self) -> int:
        """The number of the block after it."""
        return self.first_block + len(self.lengths)

    @property
    def end_token(self) -> int:
        """The number of the token after it."""
        return self.first_token + sum(self.lengths)

    @property
    def boundary(self) -> int:
        """Up to where the document could be continued from, in blocks, once this is there."""
        return self.end_block if self.whole else self.first_block


def _check_layers(
    layers: Mapping[int, tuple[Tensor, ...]],
    first_block: int,
    document: Document,
    signature: Signature,
    *,
    landmarks: bool,
) -> int:
    """How many blocks are given of every layer that is stored. Raises InvalidInput where it is not
    the same of each, or not what the memory keeps.
    """
    heads, size, dim = signature.geometry.shape
    dtype, stored = torch_dtype(signature.kv_dtype), document.layers_of(signature)
    if sorted(layers) != stored:
        raise InvalidInput(f"a chunk needs blocks of layers {stored}, not of {sorted(layers)}")
    n = layers[stored[0]][0].shape[0]
    blocks, keys = (n, heads, size, dim), (n, heads, dim)
    expected = (blocks, blocks, keys) if landmarks else (blocks, blocks)
    for layer, parts in layers.items():
        shapes = tuple(tuple(part.shape) for part in parts)
        if shapes != expected or {part.dtype for part in parts} != {dtype}:
            raise InvalidInput(
                f"layer {layer}: expected {expected} {dtype}, got {shapes} {parts[0].dtype}"
            )
    for layer, parts in layers.items():
        if not finite(parts):
            raise InvalidInput(
                f"layer {layer}: keys, values or landmark keys of blocks {first_block} to "
                f"{first_block + n} are not finite; the model cannot read this text in "
                f"{signature.kv_dtype}, use one that can"
            )
    return n


def _check_passages(
    first_block: int, start: int, passages: Sequence[Passage], block_size: int
) -> list[int]:
    """The tokens of each. Raises InvalidInput for what no part of a document can hold."""
    if not passages:
        raise InvalidInput("no passages are given; add one at least")
    for number, passage in enumerate(passages, first_block):
        ids = np.asarray(passage.ids)
        n, start = len(ids), start + len(passage.gap)
        if not 0 <= passage.lead < n <= block_size:
            raise InvalidInput(
                f"passage {number} has {n} tokens, {passage.lead} of them in front; it needs one "
                f"of its own, and {block_size} in all at most"
            )
        if passage.start != start or passage.characters < 0:
            raise InvalidInput(
                f"passage {number} begins at character {passage.start}, expected {start}: where "
                "the one before ends, and its gap"
            )
        if ids.min() < 0 or ids.max() >= 1 << 32:
            raise InvalidInput(f"passage {number} has a token that is none of 32 bits")
        start += passage.characters
    return [len(passage.ids) for passage in passages]


def finite(parts: Sequence[Tensor]) -> bool:
    """Are all numbers of these tensors finite?"""
    # A sum is finite only of numbers that are; it may overflow of some that are, too.
    if torch.stack([part.sum(dtype=torch.float32) for part in parts]).isfinite().all():
        return True
    return all(bool(part.isfinite().all()) for part in parts)
