"""Reading a document in as passages: text to passages to keys and values to committed blocks."""

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, tee

from torch import Tensor

from memstore.disk.document import Document, IngestSettings
from memstore.disk.places import Place
from memstore.freed_memory import return_freed_memory
from memstore.model.ingest import Ingesting, IngestProgress, OnForecast, begin_document, described
from memstore.model.passages.cut import Passages
from memstore.model.passages.encode import encode
from memstore.model.passages.stack import landmarks_of, padded, words_of
from memstore.model.reader import ChoosingReader
from memstore.model.text import Text
from memstore.store.admission import Mode
from memstore.store.memory_store import MemoryStore

_AT_ONCE = 16  # passages that are stored together


def ingest_passages(
    reader: ChoosingReader,
    store: MemoryStore,
    text: Text,
    *,
    mode: Mode = "new",
    expect: OnForecast | None = None,
) -> Ingesting:
    """Read a text into the store under text.name, passage by passage; the finished document is
    returned. Raises what memstore.model.ingest.ingest raises.

    A document already there with the same content is returned as it is; one whose ingest was
    interrupted goes on behind the passages that are stored. An appended text begins a passage.
    """
    settings = IngestSettings(chunk_blocks=1, top_k=0, passage_tokens=reader.passage_tokens)
    writer, foreseen = begin_document(store, text, reader.tokenizer, settings, mode)
    if writer is None:
        return described(store, text)
    with writer:
        foreseen.tell(expect)
        began, resumed = time.perf_counter(), writer.tokens
        before, first = writer.base_characters, writer.characters
        cutting = passages_of(
            reader,
            text.pieces(),
            [place._replace(start=before + place.start) for place in text.places],
            start=before,
            gap=writer.replaced_tail(),
        )
        # an append takes the last passage away, to be stored again in front of what follows
        passages = chain(writer.replaced_passages(), cutting)
        missing, ahead = tee(one for one in passages if one.end > first)
        encoded = encode(reader, (one.ids.tolist() for one in ahead))
        while some := list(islice(missing, _AT_ONCE)):
            found = list(islice(encoded, len(some)))
            writer.add_passages(
                some,
                {layer: padded(reader, found, layer) for layer in reader.shape.memory_layers},
                landmarks=landmarks_of(reader, found),
                words=words_of(reader, some),
            )
            return_freed_memory()
            foreseen.look_again(writer.document.tokens > resumed)
            seconds = time.perf_counter() - began
            done, total = some[-1].end, before + text.characters
            left = seconds * (total - done) / max(1, done - first)
            yield IngestProgress(done, total, writer.tokens, resumed, seconds, left)
        return writer.finish(cutting.tail)


def passages_of(
    reader: ChoosingReader,
    pieces: Iterable[str],
    places: Sequence[Place] = (),
    *,
    start: int = 0,
    gap: str = "",
) -> Passages:
    """A text as the reader's passages: see Passages."""
    size, most = reader.passage_tokens, reader.shape.block_size
    tokenizer = reader.tokenizer
    return Passages(tokenizer, pieces, places, size=size, most=most, start=start, gap=gap)


def find_again(
    reader: ChoosingReader, store: MemoryStore, document: Document
) -> Iterator[tuple[int, Tensor | None, list[list[tuple[int, int]]] | None]]:
    """What the reader's selector keeps of a stored document: pieces (first block, landmarks, words)
    one after the other. Its passages are read again, through the layers that the selector needs.
    """
    layers = reader.selector.taps.layers
    for first in range(0, document.blocks, _AT_ONCE):
        passages = store.passages(document.id, first, first + _AT_ONCE)
        landmarks = None
        if layers:
            ids = [one.ids.tolist() for one in passages]
            landmarks = landmarks_of(reader, list(encode(reader, ids, layers=layers)))
        yield first, landmarks, words_of(reader, passages)
