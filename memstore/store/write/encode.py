"""Chunks to records, on a thread of its own: the next chunk is encoded while the last one is
committed.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from memstore.block import RecordKey
from memstore.disk.format.codec import get_codec
from memstore.disk.format.document import Document
from memstore.disk.tables.catalog import Catalog
from memstore.store.write.chunk import Chunk
from memstore.tiers.raw_bits import from_raw, raw_view


class Encoder:
    """Encodes the chunks of one document, in order."""

    def __init__(self, catalog: Catalog, document: Document) -> None:
        """document: with the write that makes its next blocks."""
        self.lossless = get_codec(catalog.codec).lossless
        self._signature, self._blocks = catalog.signature, catalog.blocks
        self._document, self._write = document.id, document.writes[-1].id
        self._codec = document.codec  # of passages
        self._memory_layers = document.memory_layers(catalog.signature)
        self._other_layers = document.other_layers(catalog.signature)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memstore-encoder")

    def ahead(self, chunk: Chunk, wanted: Callable[[], bool]) -> None:
        """Begin to encode a chunk's memory layers; its `encoding` tells when that is done.

        wanted: asked when its turn comes; if not, nothing is done.
        """
        chunk.encoding = self._thread.submit(
            lambda: self.memory_layers(chunk) if wanted() else None
        )

    def memory_layers(self, chunk: Chunk) -> None:
        """Have the chunk hold records in the place of its memory layers' blocks, or passages."""
        for number, (k, v) in zip(chunk.given, chunk.kv):
            bits, digest = (raw_view(k), raw_view(v)), chunk.digests[number]
            layers = self._memory_layers
            found = self._blocks.encode_passage(layers, *bits, digest, self._codec)
            chunk.records.update(((number, layer), record) for layer, record in found.items())
        chunk.kv = ()
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
                key = RecordKey(self._document, first, layer)
                lengths = chunk.lengths[first - chunk.first_block :]
                records = self._blocks.encode(key, k, v, lengths, self._write)
                chunk.records.update(
                    ((block, layer), record) for block, record in enumerate(records, first)
                )

    def replace_by_stored(self, chunk: Chunk) -> None:
        """Have the chunk hold what reading its records will give: a resumed ingest would read just
        that.
        """
        layers = [*self._memory_layers, *self._other_layers]
        self.add_records(chunk, layers, chunk.first_block)
        for layer in layers:
            stored = [
                self._blocks.decode(
                    chunk.records[block, layer],
                    RecordKey(self._document, block, layer),
                    self._write,
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
