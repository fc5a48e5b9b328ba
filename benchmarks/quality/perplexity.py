"""Does text before the training window help, and does retrieval help beyond the latest blocks?

The same target tokens (256 of each segment, at random places of the books) are scored with more and
more of the text before them in memory. For every size of memory a new session reads exactly that
much text, chunk by chunk, and its blocks become its memory. The targets are then read with that
memory:
  retrieved   retrieved blocks and the latest ones, as in a session that goes on reading
  recent      the latest top_k blocks alone
Intervals are 95%, by Student's t, of the difference of mean log
likelihood in the same segment, as a ratio of perplexities.

    python -m benchmarks.quality.perplexity --text books-test.jsonl.zst
"""

import argparse
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.intervals import perplexity_ratio
from benchmarks.common.options import add, load, parser
from benchmarks.common.reading import TARGETS, Reading, segments
from benchmarks.common.results import write
from benchmarks.common.tables import table, tokens_number, tokens_text, with_interval
from benchmarks.common.text import Books
from memstore import LandmarkModel

MODES = ("retrieved", "recent")


def measure(model: LandmarkModel, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row a segment: mean negative log likelihood of its targets by mode and memory size."""
    with tempfile.TemporaryDirectory() as cache:
        books = Books.read(options.text, model.tokenizer, Path(cache))
    for segment in segments(books, options.segments, max(options.sizes), options.seed):
        losses: dict[str, float] = {}
        for size in options.sizes:
            before = segment.before[len(segment.before) - size :]
            with Reading(model, before) as reading:
                for mode in MODES if size else ("recent",):
                    scores, _ = reading.score(segment.targets, retrieve=mode == "retrieved")
                    losses[f"{mode} {size}"] = -float(scores.mean())
        yield {"book": segment.book, "start": segment.start, "losses": losses}


def main() -> None:
    options = parser(__doc__)
    add(options, "--sizes", ["0", "512", "2K", "4K", "16K"], "tokens of memory")
    add(options, "--segments", 240)
    given = options.parse_args()
    given.sizes = sorted({0, *map(tokens_number, given.sizes)})
    if len(given.sizes) < 2:
        options.error("--sizes needs a memory other than 0")
    model = load(given)
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
    head = f"memory | {' | '.join(MODES)} | retrieved / none | retrieved / recent"
    lines = [
        [tokens_text(p["size"]), *(f"{p[mode]:.2f}" for mode in MODES)]
        + [with_interval(p[f"retrieved_to_{what}"], 4) for what in ("none", "recent")]
        for p in points
    ]
    print(table(head, lines))
    weights = model.signature.weights
    write(given, {"weights": weights, "points": points, "segments": rows})


def summary(losses: dict[str, np.ndarray], sizes: list[int]) -> list[dict[str, Any]]:
    """Perplexities of every size, and ratios with their intervals."""
    return [
        {
            "size": size,
            **{mode: math.exp(losses[f"{mode} {size}"].mean()) for mode in MODES},
            "retrieved_to_none": perplexity_ratio(losses[f"retrieved {size}"], losses["recent 0"]),
            "retrieved_to_recent": perplexity_ratio(
                losses[f"retrieved {size}"], losses[f"recent {size}"]
            ),
        }
        for size in sizes
    ]


if __name__ == "__main__":
    main()
