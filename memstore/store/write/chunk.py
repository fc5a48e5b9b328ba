"""A chunk of a document, or a batch of its passages, on its way to disk."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from memstore.block import BlockKey
from memstore.disk.format.runs import Run
from memstore.disk.tables.passage_table import Digest

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

    @property
    def boundary(self) -> int:
        """Up to where the document could be continued from, in blocks, once this is there."""
        return self.end_block if self.whole else self.first_block


def finite(parts: Sequence[Tensor]) -> bool:
    """Are all numbers of these tensors finite?"""
    # where a number is none, the least and the largest are none
    ends = [end for part in parts if part.numel() for end in part.aminmax()]
    return not ends or bool(torch.stack(ends).isfinite().all())
