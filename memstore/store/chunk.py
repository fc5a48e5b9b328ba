"""A chunk of a document on its way to disk: what a writer is given, checked against the grid of
chunks and blocks.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from memstore.block import BlockKey
from memstore.disk.block_words import Words
from memstore.disk.document import Document
from memstore.disk.selector_form import SelectorForm
from memstore.disk.signature import Signature
from memstore.errors import InvalidInput
from memstore.store.selector_runs import FoundBy
from memstore.tiers.raw_bits import torch_dtype

LayerBlocks = tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor]
"""K [n, Hkv, block_size, D], V likewise, landmark keys [n, Hkv, D] of a chunk's n blocks in one
layer, in the KV dtype; in a memory with a selector K and V alone.
"""


class StoredLayers(NamedTuple):
    """Layers of which a document's blocks are stored: those whose landmarks are searched, and
    those that only reading on needs.
    """

    memory: list[int]
    other: list[int]

    @classmethod
    def of(cls, document: Document, signature: Signature) -> "StoredLayers":
        """Those of a document of this model."""
        layers, memory = document.layers_of(signature), set(signature.memory_layers)
        return cls(
            [layer for layer in layers if layer in memory],
            [layer for layer in layers if layer not in memory],
        )


class RecentBlocks(NamedTuple):
    """The latest blocks of a document in one layer, as they are stored."""

    k: Tensor  # [n, Hkv, block_size, D]
    v: Tensor  # [n, Hkv, block_size, D]
    landmarks: Tensor  # [n, Hkv, D]; of a memory with a selector [0, Hkv, D]
    blocks: range


@dataclass(eq=False)
class Chunk:
    """A staged chunk."""

    first_block: int
    end_block: int
    first_token: int
    char_start: int
    ids: np.ndarray
    last_length: int
    whole: bool
    # layer -> K, V; a memory layer's until they are encoded
    blocks: dict[int, tuple[Tensor, Tensor]]
    landmarks: dict[int, Tensor]
    found_by: FoundBy | None  # where the memory has a selector
    units: list[BlockKey] = field(default_factory=list)  # pinned ones that hold it
    # (block, layer) -> record, once encoded
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
        selector: SelectorForm | None = None,
        token_landmarks: Tensor | None = None,
        words: Sequence[Words] | None = None,
    ) -> "Chunk":
        """The chunk that begins at first_block: see DocumentWriter.add_chunk. Raises InvalidInput
        for what is no chunk of this memory.
        """
        heads, size, dim = signature.geometry.shape
        dtype = torch_dtype(signature.kv_dtype)
        chunk_blocks, stored = document.settings.chunk_blocks, document.layers_of(signature)
        if sorted(layers) != stored:
            raise InvalidInput(f"a chunk needs blocks of layers {stored}, not of {sorted(layers)}")
        n = layers[stored[0]][0].shape[0]
        last = size if length_of_last is None else length_of_last
        blocks, keys = (n, heads, size, dim), (n, heads, dim)
        expected = (blocks, blocks, keys) if selector is None else (blocks, blocks)
        for layer, parts in layers.items():
            shapes = tuple(tuple(part.shape) for part in parts)
            if shapes != expected or {part.dtype for part in parts} != {dtype}:
                raise InvalidInput(
                    f"layer {layer}: expected {expected} {dtype}, got {shapes} {parts[0].dtype}"
                )
        in_bounds = 1 <= n <= chunk_blocks and 1 <= last <= size
        if not in_bounds or len(ids) != (n - 1) * size + last:
            raise InvalidInput(
                f"{len(ids)} tokens in {n} blocks, the last of {last}, are no chunk of "
                f"{chunk_blocks} blocks"
            )
        for layer, parts in layers.items():
            if not finite(parts):
                raise InvalidInput(
                    f"layer {layer}: keys, values or landmark keys of blocks {first_block} to "
                    f"{first_block + n} are not finite; the model cannot read this text in "
                    f"{signature.kv_dtype}, use one that can"
                )
        found_by = None
        if selector is not None:
            found_by = FoundBy.of(token_landmarks, words, selector, len(ids), n)
        elif token_landmarks is not None or words is not None:
            raise InvalidInput(
                "this memory has no selector, and keeps no token landmarks or words; leave them out"
            )
        return cls(
            first_block=first_block,
            end_block=first_block + n,
            first_token=first_block * size,
            char_start=char_start,
            ids=ids,
            last_length=last,
            whole=n == chunk_blocks and last == size,
            blocks={layer: (parts[0], parts[1]) for layer, parts in layers.items()},
            landmarks={
                layer: keys.clone() for layer, parts in layers.items() for keys in parts[2:]
            },
            found_by=found_by,
        )

    @property
    def end_token(self) -> int:
        """The number of the token after it."""
        return self.first_token + len(self.ids)

    @property
    def boundary(self) -> int:
        """The last boundary of chunks, in blocks, once this chunk is there."""
        return self.end_block if self.whole else self.first_block


def finite(parts: Sequence[Tensor]) -> bool:
    """Are all numbers of these tensors finite?"""
    # A sum is finite only of numbers that are; it may overflow of some that are, too.
    if torch.stack([part.sum(dtype=torch.float32) for part in parts]).isfinite().all():
        return True
    return all(bool(part.isfinite().all()) for part in parts)
