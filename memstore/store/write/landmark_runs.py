"""The landmark keys of a document that is being written, in runs on a fixed grid, so that what is
stored does not depend on when it was committed.
"""

from collections.abc import Iterator, Sequence
from itertools import dropwhile

import torch
from torch import Tensor

from memstore.disk.format.document import Document
from memstore.disk.format.landmarks import LANDMARK_RUN
from memstore.disk.tables.catalog import Catalog
from memstore.errors import CorruptMemory
from memstore.store.write.chunk import Chunk
from memstore.tiers.raw_bits import from_raw, torch_dtype


def run_of(block: int) -> int:
    """First block of the run that a block's landmark key is stored in."""
    return block // LANDMARK_RUN * LANDMARK_RUN


class LandmarkRuns:
    """The latest keys of every layer: those that the next commit writes again with its own, and
    those that reading on needs.
    """

    def __init__(self, catalog: Catalog, document: Document, blocks: int, keep: int) -> None:
        """Of a document of which `blocks` blocks stay and, of layers without memory, those from
        `keep` on; none where the memory has a selector. Raises CorruptMemory.
        """
        signature = catalog.signature
        self._memory_layers = set(signature.memory_layers)
        self._empty = torch.empty(
            0, signature.num_kv_heads, signature.head_dim, dtype=torch_dtype(signature.kv_dtype)
        )
        # layer -> (first block, keys) of consecutive pieces
        self._pieces: dict[int, list[tuple[int, Tensor]]] = {
            layer: [] for layer in document.layers_of(signature) if catalog.selector is None
        }
        if not blocks:
            return
        first = min(run_of(blocks), keep)
        with catalog.database.read() as txn:
            for run in catalog.landmarks(txn, document.id):
                keys = from_raw(run.keys, signature.kv_dtype)[: blocks - run.first_block]
                if run.first_block + len(keys) > first and len(keys):
                    self._pieces[run.layer].append((run.first_block, keys))
        for layer in self._pieces:
            oldest = first if layer in self._memory_layers else keep
            if len(self.keys(layer, oldest, blocks)) != blocks - oldest:
                raise CorruptMemory(
                    f"landmark keys of document {document.name!r}, layer {layer} are missing; run "
                    "verify"
                )

    def add(self, chunk: Chunk, committed: int, keep: int) -> None:
        """Remember a chunk's keys, and forget what is no longer needed once `committed` blocks
        are; keep: as in __init__.
        """
        first = min(run_of(committed), keep)
        for layer, keys in chunk.landmarks.items():
            # A new list: the committing thread may be reading the old one.
            kept = dropwhile(lambda piece: piece[0] + len(piece[1]) <= first, self._pieces[layer])
            self._pieces[layer] = [*kept, (chunk.first_block, keys)]

    def keys(self, layer: int, first: int, end: int) -> Tensor:
        """Remembered keys of blocks first .. end, [n, Hkv, D]."""
        rows = [self._empty]
        rows += [keys[max(0, first - at) : max(0, end - at)] for at, keys in self._pieces[layer]]
        return torch.cat(rows)

    def to_write(self, chunks: Sequence[Chunk], keep: int) -> Iterator[tuple[int, int, Tensor]]:
        """What a commit of these chunks writes: (layer, first block, keys)."""
        begin, end = chunks[0].first_block, chunks[-1].end_block
        for layer in self._pieces:
            oldest = begin if layer in self._memory_layers else max(begin, keep)
            for first in range(run_of(oldest), end, LANDMARK_RUN):
                yield layer, first, self.keys(layer, first, min(first + LANDMARK_RUN, end))
