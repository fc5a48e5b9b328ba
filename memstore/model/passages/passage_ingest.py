"""Ingest by a passage model: text to passages to keys and values to committed blocks."""

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, tee

import torch
from torch import Tensor

from memstore.disk.format.citations import Place, Places
from memstore.disk.format.document import IngestSettings
from memstore.disk.format.text_parts import Keep, Passage
from memstore.freed_memory import return_freed_memory
from memstore.model.document_ingest import Ingesting, IngestProgress, described
from memstore.model.passages.passage_cutting import Passages
from memstore.model.passages.passage_encoding import Encoded, encode, words_of
from memstore.model.passages.passage_protocol import PassageModel
from memstore.model.texts.source_text import Text
from memstore.store.memory_store import MemoryStore
from memstore.store.write.admission import Mode
from memstore.store.write.known_passages import Known
from memstore.store.write.writer import DocumentWriter

_AT_ONCE = 16  # passages that are stored together
_FREED_EVERY = 4  # times: what was returned is mapped anew, which takes as long as storing
_LOOKED_UP = 64  # passages that are looked up together
_TITLE = 100  # characters; a longer first line is no title


def ingest_passages(
    reader: PassageModel, store: MemoryStore, text: Text, *, mode: Mode = "new", keep: Keep
) -> Ingesting:
    """Read a text into the store under text.name, passage by passage; the finished document is
    returned. keep: keys and values of its passages, or their text alone, of which a question
    computes those that it needs. Raises InvalidInput for a text that cannot be read, StorageFull.

    A document already there with the same content is returned unchanged; an interrupted ingest
    continues after the passages that are stored.
    """
    text.check()
    settings = IngestSettings(passage_tokens=reader.passage_tokens)
    writer = store.write_document(
        text.name, source_hash=text.digest, settings=settings, mode=mode, metadata=text.metadata
    )
    if writer is None:
        return described(store, text)
    with writer:
        began, resumed = time.perf_counter(), writer.tokens
        first, total = writer.characters, text.characters
        passages = passages_of(reader, text.pieces(), text.places)
        coming, ahead = tee(_looked_up(writer, (one for one in passages if one.end > first)))
        missing = (one.ids.tolist() for one, known in ahead if _missing(known, keep))
        layers = reader.selector.captures.layers if keep == "text" else None
        computed = encode(reader, missing, layers=layers)
        titles = Titles(text)
        batches = iter(lambda: list(islice(coming, _AT_ONCE)), [])
        for number, pairs in enumerate(batches):
            _add(writer, reader, pairs, computed, keep, titles)
            if number % _FREED_EVERY == 0:
                return_freed_memory()
            seconds = time.perf_counter() - began
            done = pairs[-1][0].end
            left = seconds * (total - done) / max(1, done - first)
            yield IngestProgress(done, total, writer.tokens, resumed, seconds, left)
        return writer.finish()


class Titles:
    """What passages of a text stand under, by which they are found, too: the document's name, its
    first line if that is short, and their headings.
    """

    def __init__(self, text: Text) -> None:
        line, _, _ = next(iter(text.pieces()), "").lstrip()[: _TITLE + 1].partition("\n")
        self._title = f"{text.name}\n{line}" if len(line) <= _TITLE else text.name
        self._places = Places(text.places)

    def above(self, passage: Passage) -> str:
        """The titles of a passage."""
        return "\n".join((self._title, *self._places.headings(passage.start)))


def _add(
    writer: DocumentWriter,
    reader: PassageModel,
    pairs: Sequence[tuple[Passage, Known | None]],
    computed: Iterator[Encoded],
    keep: Keep,
    titles: Titles,
) -> None:
    """Give the next passages to the writer. computed: what those that are missing hold comes next
    of it.
    """
    some = [one for one, _ in pairs]
    new = [at for at, (_, known) in enumerate(pairs) if _missing(known, keep)]
    found = list(islice(computed, len(new)))
    writer.add_passages(
        some,
        [one.stored for one in found] if keep == "kv" else [],
        given=new if keep == "kv" else [],
        landmarks=_landmarks(reader, pairs, new, found),
        words=words_of(reader, some, [titles.above(one) for one in some]),
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


def _landmarks(
    reader: PassageModel,
    pairs: Sequence[tuple[Passage, Known | None]],
    new: Sequence[int],
    computed: Sequence[Encoded],
) -> Tensor | None:
    """Token landmarks of passages, of which the new ones were computed and the others are known;
    None where the reader's selector keeps none.
    """
    parts: list[Tensor | None] = [
        None if known is None or known.landmarks is None else torch.from_numpy(known.landmarks)
        for _, known in pairs
    ]
    for at, one in zip(new, computed):
        parts[at] = reader.selector.landmarks(one.captured)
    kept = [part for part in parts if part is not None]
    return torch.cat(kept) if kept else None


def passages_of(
    reader: PassageModel, pieces: Iterable[str], places: Sequence[Place] = ()
) -> Passages:
    """A text as the reader's passages: see Passages."""
    size, most = reader.passage_tokens, reader.shape.block_size
    return Passages(reader.tokenizer, pieces, places, size=size, most=most)
