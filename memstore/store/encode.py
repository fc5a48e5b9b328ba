"""Chunks to records, on a thread of its own: the next chunk is encoded while the last one is
committed.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from memstore.block import RecordKey
from memstore.disk.catalog import Catalog, Document
from memstore.disk.codec import get_codec
from memstore.store.chunk import Chunk
from memstore.tiers.raw_bits import from_raw, raw_view


class Encoder:
    """Encodes the chunks of one document, in order."""

    def __init__(self, catalog: Catalog, document: Document) -> None:
        self.lossless = get_codec(catalog.codec).lossless
        self._signature, self._blocks = catalog.signature, catalog.blocks
        self._document = document
        self._layers = range(catalog.signature.num_layers)
        self._memory_layers = sorted(catalog.signature.memory_layers)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memstore-encoder")

    def ahead(self, chunk: Chunk, wanted: Callable[[], bool]) -> None:
        """Begin to encode a chunk's memory layers; its `encoding` tells when that is done.

        wanted: asked when its turn comes; if not, nothing is done.
        """
        chunk.encoding = self._thread.submit(
            lambda: self.memory_layers(chunk) if wanted() else None
        )

    def memory_layers(self, chunk: Chunk) -> None:
        """Have the chunk hold records in the place of its memory layers' blocks."""
        layers = [layer for layer in self._memory_layers if layer in chunk.blocks]
        self.add_records(chunk, layers, chunk.first_block)
        for layer in layers:
            del chunk.blocks[layer]

    def add_records(self, chunk: Chunk, layers: Iterable[int], first: int) -> None:
        """Encode the chunk's blocks from `first` on where that has not been done."""
        first = max(first, chunk.first_block)
        for layer in layers:
            if first < chunk.end_block and (chunk.end_block - 1, layer) not in chunk.records:
                k, v = (raw_view(x[first - chunk.first_block :]) for x in chunk.blocks[layer])
                key = RecordKey(self._document.id, first, layer)
                write = self._document.write_of(first)
                records = self._blocks.encode(key, k, v, chunk.last_length, write)
                chunk.records.update(
                    ((block, layer), record) for block, record in enumerate(records, first)
                )

    def replace_by_stored(self, chunk: Chunk) -> None:
        """Have the chunk hold what reading its records will give: a resumed ingest would read just
        that.
        """
        self.add_records(chunk, self._layers, chunk.first_block)
        for layer in self._layers:
            stored = [
                self._blocks.decode(
                    chunk.records[block, layer],
                    RecordKey(self._document.id, block, layer),
                    self._document.write_of(block),
                )
                for block in range(chunk.first_block, chunk.end_block)
            ]
            chunk.blocks[layer] = (
                from_raw(np.stack([k for k, _, _ in stored]), self._signature.kv_dtype),
                from_raw(np.stack([v for _, v, _ in stored]), self._signature.kv_dtype),
            )

    def close(self) -> None:
        """Wait for what was begun, and end the thread."""
        self._thread.shutdown(wait=True)
