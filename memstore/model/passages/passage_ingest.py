"""Ingest by a passage model: text to passages to keys and values to committed blocks."""

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, tee

import torch
from torch import Tensor

from memstore.disk.format.citations import Place
from memstore.disk.format.document import IngestSettings
from memstore.disk.format.text_parts import Keep, Passage
from memstore.freed_memory import return_freed_memory
from memstore.model.document_ingest import Ingesting, IngestProgress, begin_document, described
from memstore.model.passages.passage_cutting import Passages
from memstore.model.passages.passage_encoding import Computed, compute, words_of
from memstore.model.passages.passage_protocol import PassageModel
from memstore.model.passages.worker_pool import Workers
from memstore.model.texts.source_text import Text
from memstore.store.memory_store import MemoryStore
from memstore.store.write.admission import Mode
from memstore.store.write.known_passages import Known
from memstore.store.write.writer import DocumentWriter

_AT_ONCE = 16  # passages that are stored together
_FREED_EVERY = 4  # times: what was returned is mapped anew, which takes as long as storing
_LOOKED_UP = 64  # passages that are looked up together


def ingest_passages(
    reader: PassageModel,
    store: MemoryStore,
    text: Text,
    *,
    mode: Mode = "new",
    keep: Keep = "kv",
    workers: Workers | None = None,
) -> Ingesting:
    """Read a text into the store under text.name, passage by passage; the finished document is
    returned. keep: keys and values of its passages, or their text alone, of which a question
    computes those that it needs. workers: compute beside this process; what is stored is the same
    to rounding. Raises InvalidInput for a text that cannot be read, StorageFull, and what
    Workers.compute raises.

    A document already there with the same content is returned as it is; one whose ingest was
    interrupted goes on behind the passages that are stored. An appended text begins a passage.
    """
    text.check()
    writer = begin_document(store, text, reader.tokenizer, settings_of(reader), mode)
    if writer is None:
        return described(store, text)
    with writer:
        began, resumed = time.perf_counter(), writer.tokens
        before, first = writer.base_characters, writer.characters
        cutting = passages_of(
            reader,
            text.pieces(),
            [place._replace(start=before + place.start) for place in text.places],
            start=before,
            gap=writer.replaced_tail(),
            name=text.name,
        )
        # an append takes the last passage away, to be stored again in front of what follows
        passages = chain(writer.replaced_passages(), cutting)
        coming, ahead = tee(_looked_up(writer, (one for one in passages if one.end > first)))
        through = reader.selector.captures.layers if keep == "text" else None
        missing = (one.ids.tolist() for one, known in ahead if _missing(known, keep))
        if workers is None or through == 0:  # words alone are no work
            computed = compute(reader, missing, through)
        else:
            lacking = partial(_lacking, reader, store, keep)
            computed = workers.compute(missing, text, layers=through, lacking=lacking)
        batches = iter(lambda: list(islice(coming, _AT_ONCE)), [])
        for number, pairs in enumerate(batches):
            _add(writer, reader, pairs, computed, keep)
            if number % _FREED_EVERY == 0:
                return_freed_memory()
            seconds = time.perf_counter() - began
            done, total = pairs[-1][0].end, before + text.characters
            left = seconds * (total - done) / max(1, done - first)
            yield IngestProgress(done, total, writer.tokens, resumed, seconds, left)
        return writer.finish(cutting.tail)


def _add(
    writer: DocumentWriter,
    reader: PassageModel,
    pairs: Sequence[tuple[Passage, Known | None]],
    computed: Iterator[Computed],
    keep: Keep,
) -> None:
    """Give the next passages to the writer. computed: what those that are missing hold comes next
    of it.
    """
    some = [one for one, _ in pairs]
    new = [at for at, (_, known) in enumerate(pairs) if _missing(known, keep)]
    found = list(islice(computed, len(new)))
    writer.add_passages(
        some,
        [(one.k, one.v) for one in found] if keep == "kv" else [],
        given=new if keep == "kv" else [],
        landmarks=_landmarks(pairs, new, found),
        words=words_of(reader, some),
    )


def _looked_up(
    writer: DocumentWriter, passages: Iterable[Passage]
) -> Iterator[tuple[Passage, Known | None]]:
    """Passages, and what is stored of each already."""
    coming = iter(passages)
    while some := list(islice(coming, _LOOKED_UP)):
        yield from zip(some, writer.known(some))


def _missing(known: Known | None, keep: Keep) -> bool:
    """Has a passage to be computed?"""
    return known is None or (keep == "kv" and not known.stored)


def _kept(
    reader: PassageModel, store: MemoryStore, text: Text
) -> Iterator[tuple[Passage, Keep | None]]:
    """Passages of a text that is not read in yet, and what is kept of each already, as far as that
    can be told: where it is appended to another, it may be cut in another way.
    """
    coming = iter(passages_of(reader, text.pieces(), text.places))
    while some := list(islice(coming, _LOOKED_UP)):
        yield from zip(some, store.kept(some))


def _lacking(
    reader: PassageModel, store: MemoryStore, keep: Keep, text: Text
) -> Iterator[list[int]]:
    """Of a text that is not read in yet the passages that will have to be computed."""
    for one, kept in _kept(reader, store, text):
        if kept is None or (keep == "kv" and kept != "kv"):
            yield one.ids.tolist()


def _landmarks(
    pairs: Sequence[tuple[Passage, Known | None]], new: Sequence[int], computed: Sequence[Computed]
) -> Tensor | None:
    """What the reader's selector keeps of the tokens of passages, of which the new ones were
    computed, and the others are known.
    """
    parts: list[Tensor | None] = [
        None if known is None or known.landmarks is None else torch.from_numpy(known.landmarks)
        for _, known in pairs
    ]
    for at, one in zip(new, computed):
        parts[at] = one.landmarks
    kept = [part for part in parts if part is not None]
    return torch.cat(kept) if kept else None


def settings_of(reader: PassageModel) -> IngestSettings:
    """How the reader has its passages made."""
    return IngestSettings(passage_tokens=reader.passage_tokens, context=reader.context)


def passages_of(
    reader: PassageModel,
    pieces: Iterable[str],
    places: Sequence[Place] = (),
    *,
    start: int = 0,
    gap: str = "",
    name: str | None = None,
) -> Passages:
    """A text as the reader's passages: see Passages."""
    size, most = reader.passage_tokens, reader.shape.block_size
    return Passages(
        reader.tokenizer,
        pieces,
        places,
        size=size,
        most=most,
        start=start,
        gap=gap,
        context=reader.context,
        name=name,
    )
