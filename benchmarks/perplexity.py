"""Does text before the training window help, and does retrieval help beyond the most recent blocks?

The same target tokens (256 of each segment, segments at random places of the books) are scored with
more and more of the text before them in memory. For every memory size a session of its own reads
exactly that much text, chunk by chunk, and its blocks become its memory; nothing of earlier text is
in them. The targets are then read three times from that same memory:
  retrieved   retrieved blocks and the latest ones, as a session that goes on reading sees them
  ageless     the same without what blocks lose by their age (recency 0) recent      the latest
  top_k blocks alone attached    a fresh session that has the text attached as an old document, and
  nothing just before the targets
Reading the text itself attends to the latest blocks (the way documents are ingested), or with
--read-retrieving to retrieved ones. Intervals are 95%, by Student's t, of the difference of mean
log likelihood in the same segment, as a ratio of perplexities.

    python benchmarks/perplexity.py --text books-test.jsonl.zst --out results/perplexity.json
"""

import argparse
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any

import common
import numpy as np
from common import Books, mean_interval, table, tokens_number, tokens_text

from memstore import LandmarkModel, MemoryStore
from memstore.model.session import ScratchSession

TARGETS = 256
MODES = ("retrieved", "ageless", "recent", "attached")


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


class Reading:
    """A text in a session's memory, from which the same targets can be scored again and again. A
    context manager.
    """

    def __init__(self, model: LandmarkModel, text: np.ndarray, *, retrieving: bool = False) -> None:
        chunk = model.config.chunk_blocks * model.config.block_size
        if len(text) % chunk:
            raise SystemExit(
                f"memory sizes must be multiples of a chunk, {chunk} tokens; {len(text)} is not"
            )
        self.model = model
        self.store = MemoryStore.in_memory(model.signature)
        self.session = model.session(self.store, [], retrieve=retrieving)
        self.session.feed(text.tolist())
        self.session.end_chunk()

    def score(
        self, targets: np.ndarray, mode: str, cmt_cutoff: float | None = None
    ) -> tuple[np.ndarray, ScratchSession]:
        """Log probabilities [n - 1] of targets[1:], and the session that read them (its lookups are
        those of this reading).
        """
        if mode == "attached":
            blocks = self.session.blocks
            assert blocks.own_document is not None
            documents = [(blocks.own_document, blocks.own_end)] if blocks.own_end else []
            session = ScratchSession(self.model, self.session.settings, self.store, documents)
        else:
            session = self.session
            session.attention.retrieve = mode != "recent"
            recency = 0.0 if mode == "ageless" else self.model.config.recency
            lookup = session.attention.lookup
            lookup.settings = replace(lookup.settings, recency=recency)
            session.attention.chunk.length = session.content = 0  # the open chunk is begun again
            session.attention.start_chunk()
        if cmt_cutoff is not None:
            lookup = session.attention.lookup
            lookup.settings = replace(lookup.settings, cmt_cutoff=cmt_cutoff)
        session.attention.lookups = type(session.attention.lookups)()
        try:
            return self.model.score(session, targets.tolist()), session
        finally:
            if session is not self.session:
                session.close()

    def __enter__(self) -> "Reading":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.session.close()
        self.store.close()


def measure(model: LandmarkModel, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row a segment: mean negative log likelihood of its targets by mode and memory size."""
    with tempfile.TemporaryDirectory() as cache:
        books = Books.read(options.text, model.tokenizer, Path(cache))
    for segment in segments(books, options.segments, max(options.sizes), options.seed):
        losses: dict[str, float] = {}
        for size in options.sizes:
            with Reading(
                model,
                segment.before[len(segment.before) - size :],
                retrieving=options.read_retrieving,
            ) as reading:
                for mode in MODES if size else ("recent",):
                    scores, _ = reading.score(segment.targets, mode)
                    losses[f"{mode} {size}"] = -float(scores.mean())
        yield {"book": segment.book, "start": segment.start, "losses": losses}


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument(
        "--sizes", nargs="+", default=["0", "512", "2K", "4K", "16K"], help="tokens of memory"
    )
    options.add_argument("--segments", type=int, default=240)
    options.add_argument(
        "--read-retrieving",
        action="store_true",
        help="read the text with retrieval too (much slower)",
    )
    given = options.parse_args()
    given.sizes = sorted({0, *map(tokens_number, given.sizes)})
    if len(given.sizes) < 2:
        options.error("--sizes needs a memory beside 0")
    model = common.load(given)
    rows, began = [], time.perf_counter()
    for row in measure(model, given):
        rows.append(row)
        if len(rows) % 20 == 0:
            print(
                f"  {len(rows)} of {given.segments} segments, {time.perf_counter() - began:.0f} s",
                flush=True,
            )
    losses = {name: np.array([row["losses"][name] for row in rows]) for name in rows[0]["losses"]}
    losses |= {f"{mode} 0": losses["recent 0"] for mode in MODES}
    points = summary(losses, given.sizes)
    print(
        f"\n{len(rows)} segments of {TARGETS} tokens; perplexity, and its ratio to that without "
        "memory or retrieval\n"
    )
    print(
        table(
            [
                "memory",
                *MODES,
                "retrieved / none",
                f"retrieved / {tokens_text(given.sizes[1])}",
                "retrieved / recent",
                "retrieved / ageless",
                "attached / none",
            ],
            [
                [
                    tokens_text(p["size"]),
                    *(f"{p[mode]:.2f}" for mode in MODES),
                    interval(p["retrieved_to_none"]),
                    interval(p["retrieved_to_least"]),
                    interval(p["retrieved_to_recent"]),
                    interval(p["retrieved_to_ageless"]),
                    interval(p["attached_to_none"]),
                ]
                for p in points
            ],
        )
    )
    common.write_results(given, model, {"points": points, "segments": rows})
    common.plot(given, lambda figure: draw(figure, points), (5, 4))


def summary(losses: dict[str, np.ndarray], sizes: list[int]) -> list[dict[str, Any]]:
    """Perplexities of every size, and ratios with their intervals."""
    return [
        {
            "size": size,
            **{mode: math.exp(losses[f"{mode} {size}"].mean()) for mode in MODES},
            "retrieved_to_none": ratio(losses[f"retrieved {size}"], losses["recent 0"]),
            "retrieved_to_least": ratio(
                losses[f"retrieved {size}"], losses[f"retrieved {sizes[1]}"]
            ),
            "retrieved_to_recent": ratio(losses[f"retrieved {size}"], losses[f"recent {size}"]),
            "retrieved_to_ageless": ratio(losses[f"retrieved {size}"], losses[f"ageless {size}"]),
            "attached_to_none": ratio(losses[f"attached {size}"], losses["recent 0"]),
        }
        for size in sizes
    ]


def ratio(losses: np.ndarray, against: np.ndarray) -> list[float]:
    """The ratio of two perplexities and its interval, from paired mean losses."""
    return [math.exp(x) for x in mean_interval(losses - against)]


def interval(values: list[float]) -> str:
    """ "0.970 (0.965-0.975)"."""
    return f"{values[0]:.4f} ({values[1]:.4f}-{values[2]:.4f})"


def draw(figure: Any, points: list[dict[str, Any]]) -> None:
    """Perplexity by memory size."""
    axes = figure.subplots()
    at = range(len(points))
    for mode in MODES:
        axes.plot(at, [point[mode] for point in points], "o-", markersize=4, label=mode)
    axes.set_xticks(list(at), [tokens_text(point["size"]) for point in points])
    axes.set_xlabel("tokens of earlier text in memory")
    axes.set_ylabel("perplexity of the same targets")
    axes.grid(alpha=0.3)
    axes.legend()


if __name__ == "__main__":
    main()
