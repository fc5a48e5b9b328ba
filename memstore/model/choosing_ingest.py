"""Reading a document by a reader that chooses: chunk by chunk behind the reader's prefix, over a
window of the text before.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from memstore.disk.document import Document, IngestSettings
from memstore.errors import InvalidWeights
from memstore.model.compact import CompactAttention, KeysValues, read_beginning
from memstore.model.ingest import Ingesting, OnForecast, ingest
from memstore.model.reader import ChoosingReader
from memstore.model.tap import tapping
from memstore.model.tapped import Tapped
from memstore.model.text import Text
from memstore.store.admission import Mode
from memstore.store.chunk import finite
from memstore.store.memory_store import MemoryStore
from memstore.store.writer import DocumentWriter


def ingest_in_windows(
    reader: ChoosingReader,
    store: MemoryStore,
    text: Text,
    *,
    mode: Mode = "new",
    expect: OnForecast | None = None,
) -> Ingesting:
    """`memstore.model.ingest.ingest` with this reader."""
    return ingest(
        store,
        text,
        reader.tokenizer,
        IngestSettings(chunk_blocks=reader.lookup.chunk_blocks, top_k=reader.window_blocks),
        lambda writer: _WindowReader(reader, writer),
        mode=mode,
        expect=expect,
    )


class _WindowReader:
    """Each chunk attends to the prefix, to the window before it as it is stored, and to itself."""

    def __init__(self, reader: ChoosingReader, writer: DocumentWriter) -> None:
        self._reader, self._writer = reader, writer
        self._beginning = read_beginning(reader)
        self.chunk_tokens = reader.lookup.chunk_blocks * reader.shape.block_size

    def chunk(self, ids: list[int], characters: int) -> None:
        """As ChunkReader.chunk."""
        reader, writer = self._reader, self._writer

        def window(layer: int) -> KeysValues:
            # as stored, not as computed: a resumed ingest has nothing else
            recent = writer.recent(layer, reader.window_blocks)
            return as_text(recent.k), as_text(recent.v)

        first = writer.tokens
        tapped, blocks = _read_chunk(
            reader, self._beginning, ids, window if writer.blocks else None
        )
        writer.add_chunk(
            ids,
            characters,
            blocks,
            length_of_last=len(ids) % reader.shape.block_size or None,
            landmarks=reader.selector.landmarks(tapped, first),
            words=words_of(reader, ids),
        )


def find_again(
    reader: ChoosingReader, store: MemoryStore, document: Document
) -> Iterator[tuple[int, Tensor | None, list[list[tuple[int, int]]] | None]]:
    """What the reader's selector keeps of a stored document: pieces (first block, landmarks, words)
    one after the other. Its text is read again as it was, through the layers that the selector
    needs.
    """
    size, taps = reader.shape.block_size, reader.selector.taps
    step, before = document.settings.chunk_blocks, document.settings.top_k
    beginning = read_beginning(reader)
    recent: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by layer, blocks of each chunk
    chunks = -(-before // step)

    def window(layer: int) -> KeysValues:
        k, v = (torch.cat(halves)[-before:] for halves in zip(*recent[layer]))
        return as_text(k), as_text(v)

    for first in range(0, document.blocks, step):
        span = store.tokens(document.id, first * size, (first + step) * size)
        ids = span.ids.tolist()
        landmarks = None
        if taps.layers:
            tapped, blocks = _read_chunk(
                reader, beginning, ids, window if recent else None, layers=taps.layers
            )
            landmarks = reader.selector.landmarks(tapped, first * size)
            for layer, halves in blocks.items():
                recent[layer] = [*recent.get(layer, []), halves][-chunks:]
        yield first, landmarks, words_of(reader, ids)


@torch.no_grad()
def _read_chunk(
    reader: ChoosingReader,
    beginning: Sequence[KeysValues],
    ids: list[int],
    window: Callable[[int], KeysValues] | None,
    *,
    layers: int | None = None,
) -> tuple[Tapped, dict[int, tuple[Tensor, Tensor]]]:
    """What a chunk shows to the selector, and its blocks as they are stored, of the first `layers`
    layers (None = all). window: the text before it in a layer; None where there is none.
    """
    shape = reader.shape
    context = CompactAttention(reader, beginning)
    if window is not None:
        for layer in range(shape.num_layers if layers is None else layers):
            k, v = window(layer)
            context.remember(layer, k, v)
    blocks: dict[int, tuple[Tensor, Tensor]] = {}

    def keeping(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        blocks[layer_idx] = blocks_of(reader, k[0]), blocks_of(reader, v[0])
        return context.attend(layer_idx, q, k, v)

    taps = reader.selector.taps
    tapped, attend, enter = tapping(ids, taps, keeping)
    given = torch.tensor([ids], device=reader.device)
    states = reader.hidden(given, attend, layers=layers, enter=enter)
    if layers is not None:
        enter(layers, states)
    return tapped, blocks


def words_of(reader: ChoosingReader, ids: Sequence[int]) -> list[list[tuple[int, int]]] | None:
    """What the reader's selector keeps of the words of consecutive blocks."""
    size = reader.shape.block_size
    return reader.selector.words(
        [reader.tokenizer.decode(ids[at : at + size]) for at in range(0, len(ids), size)]
    )


def as_text(blocks: Tensor) -> Tensor:
    """Blocks [n, Hkv, block_size, D] as one text [Hkv, n * block_size, D]."""
    return blocks.transpose(0, 1).flatten(1, 2)


def blocks_of(reader: ChoosingReader, half: Tensor) -> Tensor:
    """Keys or values of a chunk [Hkv, T, D] as they are stored, [n, Hkv, block_size, D]."""
    shape = reader.shape
    stored = half.to("cpu", shape.kv_dtype)
    if not finite([stored]):
        raise InvalidWeights(
            f"its keys or values do not fit into {shape.kv_dtype}; they cannot be stored"
        )
    missing = -stored.shape[1] % shape.block_size
    padded = torch.nn.functional.pad(stored, (0, 0, 0, missing))
    return padded.unflatten(1, (-1, shape.block_size)).transpose(0, 1).contiguous()
