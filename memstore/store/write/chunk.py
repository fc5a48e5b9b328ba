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
from memstore.disk.format.runs import KeyRun, Run
from memstore.disk.format.text_parts import Passage, encode_part, encode_tokens
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.passage_table import Digest
from memstore.errors import InvalidInput
from memstore.store.retrieve.selector_index import IndexEntries
from memstore.tiers.raw_bits import raw_view, torch_dtype

LayerBlocks = tuple[Tensor, Tensor, Tensor]
"""K [n, Hkv, block_size, D], V likewise, landmark keys [n, Hkv, D] of a chunk's n blocks in one
layer, in the KV dtype.
"""

KeysValues = tuple[Tensor, Tensor]
"""K, V [memory layers, Hkv, tokens, D] of a passage, in the KV dtype."""


class Position(NamedTuple):
    """Where in a document something begins."""

    block: int
    token: int
    character: int = 0  # of a document of passages


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
    # of these, those with K and V; the records of the others are stored already
    given: Sequence[int] = ()
    kv: Sequence[KeysValues] = ()  # of the given, until they are encoded
    units: list[BlockKey] = field(default_factory=list)  # pinned ones that hold it
    # (block, or number of the passage in `digests`, and layer) -> record, once encoded
    records: dict[tuple[int, int], bytes] = field(default_factory=dict)
    encoding: Future[None] | None = None  # until it is done, blocks and records are the encoder's

    @property
    def end_block(self) -> int:
        """The number of the block after it."""
        return self.first_block + len(self.lengths)

    @property
    def end_token(self) -> int:
        """The number of the token after it."""
        return self.first_token + sum(self.lengths)


def finite(parts: Sequence[Tensor]) -> bool:
    """Are all numbers of these tensors finite?"""
    # where a number is none, the least and the largest are none
    ends = [end for part in parts if part.numel() for end in part.aminmax()]
    return not ends or bool(torch.stack(ends).isfinite().all())


class CheckedChunks:
    """The chunks of one document."""

    def __init__(self, catalog: Catalog, document: Document) -> None:
        self._catalog, self._signature, self._document = catalog, catalog.signature, document

    def of_blocks(
        self,
        first_block: int,
        ids: np.ndarray,
        char_start: int,
        layers: Mapping[int, LayerBlocks],
        length_of_last: int | None,
    ) -> Chunk:
        """The chunk that begins at first_block: see DocumentWriter.add_chunk. Raises InvalidInput
        for what is no chunk of this memory.
        """
        size = self._signature.block_size
        chunk_blocks = self._document.settings.chunk_blocks
        n = self._check_layers(layers, first_block)
        last = size if length_of_last is None else length_of_last
        in_bounds = 1 <= n <= chunk_blocks and 1 <= last <= size
        if not in_bounds or len(ids) != (n - 1) * size + last:
            raise InvalidInput(
                f"{len(ids)} tokens in {n} blocks, the last of {last}, are no chunk of "
                f"{chunk_blocks} blocks"
            )
        lengths = [*[size] * (n - 1), last]
        return Chunk(
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

    def of_passages(
        self,
        at: Position,
        passages: Sequence[Passage],
        kv: Sequence[KeysValues],
        given: Sequence[int],
        landmarks: Tensor | None,
        words: Sequence[Words] | None,
    ) -> Chunk:
        """The passages that begin at a position; given: of which of them there are K and V. See
        DocumentWriter.add_passages. Raises InvalidInput for what are no passages of this memory.
        """
        lengths = _check_passages(at, passages, self._signature.block_size)
        if len(kv) != len(given):
            raise InvalidInput(f"expected keys and values of {len(given)} passages, got {len(kv)}")
        self._check_passages(kv, [lengths[number] for number in given], at.block)
        table = self._catalog.runs
        if table.spec is None:
            raise InvalidInput("this memory has no selector, which finds passages")
        entries = IndexEntries.of(landmarks, words, table.spec, lengths)
        return Chunk(
            first_block=at.block,
            first_token=at.token,
            lengths=lengths,
            part=(at.block, encode_part(at.character, passages)),
            end=passages[-1].end,
            whole=True,
            blocks={},
            runs={table.part(kind): run for kind, run in entries.runs(at.block).items()},
            digests=self._catalog.digests(self._document, passages),
            given=given,
            kv=kv,
        )

    def _check_layers(self, layers: Mapping[int, LayerBlocks], first_block: int) -> int:
        """How many blocks are given of every layer that is stored. Raises InvalidInput where it is
        not the same of each, or not what the memory keeps.
        """
        signature, document = self._signature, self._document
        heads, size, dim = signature.geometry.shape
        stored = document.layers_of(signature)
        if sorted(layers) != stored:
            raise InvalidInput(f"a chunk needs blocks of layers {stored}, not of {sorted(layers)}")
        n = layers[stored[0]][0].shape[0]
        blocks, keys = (n, heads, size, dim), (n, heads, dim)
        for layer, parts in layers.items():
            self._check_parts(f"layer {layer}", parts, (blocks, blocks, keys))
        for layer, parts in layers.items():
            what = f"layer {layer}: keys, values or landmark keys of blocks {first_block} to "
            self._check_finite(what + f"{first_block + n}", parts)
        return n

    def _check_passages(
        self, kv: Sequence[KeysValues], lengths: Sequence[int], first_block: int
    ) -> None:
        """Raises InvalidInput for what the memory does not keep of passages of these lengths."""
        signature = self._signature
        layers, heads = len(self._document.layers_of(signature)), signature.num_kv_heads
        for both, length in zip(kv, lengths):
            shape = (layers, heads, length, signature.head_dim)
            self._check_parts("a passage", both, (shape, shape))
        what = f"keys or values of passages from {first_block} on"
        self._check_finite(what, [half for both in kv for half in both])

    def _check_parts(
        self, what: str, parts: Sequence[Tensor], expected: Sequence[tuple[int, ...]]
    ) -> None:
        dtype = torch_dtype(self._signature.kv_dtype)
        shapes = tuple(tuple(part.shape) for part in parts)
        if shapes != expected or {part.dtype for part in parts} != {dtype}:
            raise InvalidInput(
                f"{what}: expected {expected} {dtype}, got {shapes} {parts[0].dtype}"
            )

    def _check_finite(self, what: str, parts: Sequence[Tensor]) -> None:
        if not finite(parts):
            raise InvalidInput(
                f"{what} are not finite; the model cannot read this text in "
                f"{self._signature.kv_dtype}, use one that can"
            )


def _check_passages(at: Position, passages: Sequence[Passage], block_size: int) -> list[int]:
    """The tokens of each. Raises InvalidInput for what no part of a document can hold."""
    if not passages:
        raise InvalidInput("no passages are given; add one at least")
    start = at.character
    for number, passage in enumerate(passages, at.block):
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
