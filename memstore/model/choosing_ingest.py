"""Reading a document by a reader that chooses: chunk by chunk behind the reader's prefix, over a
window of the text before.
"""

import torch
from torch import Tensor

from memstore.disk.document import Document, IngestSettings
from memstore.errors import InvalidWeights
from memstore.model.choosing_session import tapping
from memstore.model.compact import CompactAttention, read_beginning
from memstore.model.ingest import OnProgress, ingest
from memstore.model.reader import ChoosingReader
from memstore.model.text import Text
from memstore.store.admission import Mode
from memstore.store.memory_store import MemoryStore
from memstore.store.writer import DocumentWriter


def ingest_in_windows(
    reader: ChoosingReader,
    store: MemoryStore,
    text: Text,
    *,
    mode: Mode = "new",
    progress: OnProgress | None = None,
) -> Document:
    """`memstore.model.ingest.ingest` with this reader."""
    return ingest(
        store,
        text,
        reader.tokenizer,
        IngestSettings(chunk_blocks=reader.lookup.chunk_blocks, top_k=reader.window_blocks),
        lambda writer: _WindowReader(reader, writer),
        mode=mode,
        progress=progress,
    )


class _WindowReader:
    """Each chunk attends to the prefix, to the window before it as it is stored, and to itself."""

    def __init__(self, reader: ChoosingReader, writer: DocumentWriter) -> None:
        self._reader, self._writer = reader, writer
        self._beginning = read_beginning(reader)
        self.chunk_tokens = reader.lookup.chunk_blocks * reader.shape.block_size

    @torch.no_grad()
    def chunk(self, ids: list[int], characters: int) -> None:
        """As ChunkReader.chunk."""
        reader, writer, shape = self._reader, self._writer, self._reader.shape
        size = shape.block_size
        context = CompactAttention(
            reader, self._beginning, min(writer.blocks, reader.window_blocks) * size
        )
        for layer in range(shape.num_layers if writer.blocks else 0):
            # as stored, not as computed: a resumed ingest has nothing else
            recent = writer.recent(layer, reader.window_blocks)
            k, v = (half.transpose(0, 1).flatten(1, 2) for half in (recent.k, recent.v))
            context.remember(layer, k, v)
        blocks: dict[int, tuple[Tensor, Tensor]] = {}

        def keeping(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            blocks[layer_idx] = self._blocks(k[0]), self._blocks(v[0])
            return context.attend(layer_idx, q, k, v)

        tapped, attend, enter = tapping(ids, reader.selector.taps, keeping)
        reader.hidden(torch.tensor([ids], device=reader.device), attend, enter=enter)
        parts = [reader.tokenizer.decode(ids[at : at + size]) for at in range(0, len(ids), size)]
        writer.add_chunk(
            ids,
            characters,
            blocks,
            length_of_last=len(ids) % size or None,
            landmarks=reader.selector.landmarks(tapped, writer.tokens),
            words=reader.selector.words(parts),
        )

    def _blocks(self, half: Tensor) -> Tensor:
        """Keys or values of a chunk [Hkv, T, D] as they are stored, [n, Hkv, block_size, D]."""
        shape = self._reader.shape
        stored = half.to("cpu", shape.kv_dtype)
        if not stored.isfinite().all():
            raise InvalidWeights(
                f"its keys or values do not fit into {shape.kv_dtype}; they cannot be stored"
            )
        missing = -stored.shape[1] % shape.block_size
        padded = torch.nn.functional.pad(stored, (0, 0, 0, missing))
        return padded.unflatten(1, (-1, shape.block_size)).transpose(0, 1).contiguous()
