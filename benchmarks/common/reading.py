"""Scoring the same targets of a book with more and less of the text before them in memory."""

from dataclasses import dataclass, replace
from random import Random

import numpy as np
import torch

from benchmarks.common.text import Books
from memstore import LandmarkModel, MemoryStore
from memstore.closing import Closing
from memstore.model.landmark.landmark_session import LandmarkSession

TARGETS = 256  # tokens


@dataclass(frozen=True)
class Segment:
    """Targets [256] and the text before them."""

    book: int
    start: int
    targets: np.ndarray
    before: np.ndarray


def segments(books: Books, count: int, longest: int, seed: int) -> list[Segment]:
    """`count` segments that do not overlap, from places with `longest` tokens before them, books
    weighed by their length.
    """
    places = [
        (book, start)
        for book, ids in enumerate(books.books)
        for start in range(longest, len(ids) - TARGETS + 1, TARGETS)
    ]
    if len(places) < count:
        raise SystemExit(
            f"the texts have only {len(places)} segments with {longest:,} tokens before them"
        )
    chosen = sorted(Random(f"segments {seed}").sample(places, count))
    return [
        Segment(
            book, at, books.books[book][at : at + TARGETS], books.books[book][at - longest : at]
        )
        for book, at in chosen
    ]


class Reading(Closing):
    """A text in a session's memory, after which the same targets can be scored several times. A
    context manager.
    """

    def __init__(self, model: LandmarkModel, text: np.ndarray) -> None:
        """Read the text, attending to its latest blocks, as an ingest does."""
        chunk = model.lookup.chunk_blocks * model.shape.block_size
        if len(text) % chunk:
            raise SystemExit(
                f"memory sizes must be multiples of a chunk, {chunk} tokens; {len(text)} is not"
            )
        self.model = model
        self.store = MemoryStore.in_memory(model.signature)
        self.session = model.session(self.store, [], retrieve=False)
        self.session.feed(text.tolist())
        self.session.end_chunk()

    def score(
        self, targets: np.ndarray, *, retrieve: bool = True, cmt_cutoff: float | None = None
    ) -> tuple[np.ndarray, LandmarkSession]:
        """Log probabilities [n - 1] of targets[1:], and the session with the lookups of this
        reading.
        """
        session = self.session
        attention = session.attention
        attention.retrieve = retrieve
        attention.chunk.length = session.content = 0  # the open chunk begins again
        attention.start_chunk()
        if cmt_cutoff is not None:
            attention.settings = replace(attention.settings, cmt_cutoff=cmt_cutoff)
        attention.lookups = type(attention.lookups)()
        logits = session.logits(session.feed(targets[:-1].tolist())).log_softmax(-1)
        following = torch.tensor(targets[1:].tolist(), device=logits.device)
        found = logits.gather(-1, following[:, None])[:, 0]
        return found.double().cpu().numpy(), session

    def close(self) -> None:
        """Release the text."""
        self.session.close()
        self.store.close()
