"""What would a library of a trillion tokens take, and what breaks first on the way there?

Reckoned from what was measured (the results named below, of docs/results) by a design's own rules,
for --tokens; a simulation draws how long the slowest of many shards takes. Nothing is built here.

one memory   LMDB on one machine: lists in main memory, one writer, a question in two stages.
one reader   A publication that one machine asks: it reads every row when it opens, and at the first
             question the lists that this looks at.
shards       Publications of --shard tokens, each asked by a machine with its lists in memory; a
             question goes to all of them, each returns its best, the best of all are read.

What is kept is text, landmarks and words (--keep text); keys and values of what is chosen are
computed. Prices are those that object stores and machines are commonly let at, and only that.

    python -m benchmarks.share.reckoning --results docs/results
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.options import add, plain_parser
from benchmarks.common.results import write
from benchmarks.common.tables import table
from memstore.share.format.document_pages import PAGE_ENTRIES, PageRef
from memstore.share.format.packed_objects import PACKED_BYTES, pack

DOCUMENT = 2_000  # tokens
GB_MONTH, PUTS, GETS, CORE_HOUR, GB_HOUR = 0.023, 5e-6, 0.4e-6, 0.04, 0.005  # dollars
MEMORY, DISK, LINE = 256e9, 16e12, 125e6  # bytes of a machine, and a second between it and a store
_DRAWS = 2_000


class Measured(NamedTuple):
    """What a token, a document and a question were measured to take."""

    read_in: float  # tokens a second of a core
    published: float  # bytes a token of text, landmarks and words, as it is published
    resident: float  # bytes a token in main memory, to be asked in two stages
    lists: float  # bytes a token of lists and words, in files
    looked_at: float  # bytes a token that a reader's first question reads
    indexed: float  # tokens a second of a core that lists are made of
    per_token: float  # seconds of a core a question spends on each token, of more than a million
    question: np.ndarray  # seconds of a core that questions took
    tokens: int  # that these were asked of
    row: float  # bytes of a document's row and pieces, published
    listed: float  # seconds of a core a document, to open a publication
    page: float  # bytes a page takes in the manifest


def measured(results: Path) -> Measured:
    """The numbers of the result files."""

    def found(name: str) -> Any:
        return json.loads((results / name).read_text(encoding="utf-8"))

    afar = found("two-stages-afar.json")["afar"]["0"]["questions"][0]
    two, library = found("two-stages.json"), found("library.json")["file"]["found"]["rounds"]
    short = found("short-documents.json")["short documents, passages"]["found"]["100,000"]
    seconds = np.array(two["ms, asked again"]) / 1000
    alone = [one["alone, of a processor"] for one in library]
    pages = [
        PageRef(
            f"folder/document {number}",
            PAGE_ENTRIES,
            f"pages/{os.urandom(16).hex()}",
            1 << 20,
            int.from_bytes(os.urandom(8), "little"),
        )
        for number in range(0, 256_000, PAGE_ENTRIES)
    ]
    return Measured(
        read_in=float(np.median(alone)),
        published=short["publish all"]["sent"] / (100_000 * 64),
        resident=two["resident"]["own"] / two["tokens"],
        lists=two["lists"]["bytes"] / two["tokens"],
        looked_at=afar["MB"] * 1e6 / two["tokens"],
        indexed=two["tokens"] / two["seconds of a core for that"],
        per_token=float(np.median(seconds)) / two["tokens"],
        question=seconds,
        tokens=two["tokens"],
        row=short["publish replaced"]["sent"] / PAGE_ENTRIES,
        listed=short["open published"]["core"] / 100_000,
        page=len(pack(b"mRmanife", 4, [list(page) for page in pages])) / len(pages),
    )


def reckoned(by: Measured, tokens: float, shard: float, cores: int) -> dict[str, float]:
    """What a library of so many tokens takes."""
    documents, shards = tokens / DOCUMENT, max(1.0, tokens / shard)
    objects = tokens * by.published / (32 << 20) + documents / PAGE_ENTRIES + 2
    stored = tokens * (by.published + by.lists) + documents * by.row
    rng = np.random.default_rng(0)
    # a shard's questions take what those measured took, by its tokens
    scale = min(tokens, shard) / by.tokens
    slowest = rng.choice(by.question, (_DRAWS, min(10_000, int(np.ceil(shards))))).max(1) * scale
    return {
        "core-years to read in": tokens / by.read_in / 86400 / 365,
        "dollars to read in": tokens / by.read_in / 3600 * CORE_HOUR,
        "days on the cores": tokens / by.read_in / 86400 / cores,
        "core-hours to index": tokens / by.indexed / 3600,
        "objects": objects,
        "dollars to put them": objects * PUTS,
        "TB stored": stored / 1e12,
        "dollars a month": stored / 1e9 * GB_MONTH,
        "manifest, MB": documents / PAGE_ENTRIES * by.page / 1e6,
        "rows, GB": documents * by.row / 1e9,
        "one machine: memory, GB": tokens * by.resident / 1e9,
        "one machine: a question, s": tokens * by.per_token,
        "one reader: to open, s": documents * max(by.listed, by.row / LINE),
        "one reader: to the first question, s": tokens * by.looked_at / LINE,
        "shards": shards,
        "shards: memory, dollars an hour": tokens * by.resident / 1e9 * GB_HOUR,
        "shards: a question, core-seconds": tokens * by.per_token,
        "shards: slowest of all, s": float(np.median(slowest)),
    }


def breaks(by: Measured) -> dict[str, float]:
    """From how many tokens on each part of a design is too much."""
    return {
        "a machine's memory holds no more lists": MEMORY / by.resident,
        "a question in two stages takes a second of a core": 1 / by.per_token,
        "a reader waits a minute for the first answer": 60 * LINE / by.looked_at,
        "a reader waits a minute to open": 60 / max(by.listed, by.row / LINE) * DOCUMENT,
        "a machine's disk holds no more": DISK / (by.published + by.lists),
        "a core reads in for a year": by.read_in * 86400 * 365,
        "a manifest names no more pages": PACKED_BYTES / by.page * PAGE_ENTRIES * DOCUMENT,
    }


def main() -> None:
    options = own_options().parse_args()
    by = measured(options.results)
    columns = {
        tokens: reckoned(by, float(tokens), float(options.shard), options.cores)
        for tokens in options.tokens
    }
    head = ["of a library of tokens", *(f"{float(tokens):.0e}" for tokens in columns)]
    names = next(iter(columns.values()))
    lines = [[name, *(f"{column[name]:,.3g}" for column in columns.values())] for name in names]
    print(table(head, lines))
    limits = sorted(breaks(by).items(), key=lambda limit: limit[1])
    print("\n" + table(["what breaks", "from tokens on"], [[n, f"{at:.1e}"] for n, at in limits]))
    kept = by._replace(question=np.array([]))._asdict()
    kept.pop("question")
    write(options, {"measured": kept, "reckoned": columns, "breaks": dict(limits)})


def own_options() -> argparse.ArgumentParser:
    options = plain_parser(__doc__)
    add(options, "--results", Path("docs/results"), "where what was measured is kept", type=Path)
    add(options, "--tokens", ["1e6", "1e9", "1e12"], "of the library", nargs="+")
    add(options, "--shard", 1e9, "tokens of a shard", type=float)
    add(options, "--cores", 1000, "that read in", type=int)
    return options


if __name__ == "__main__":
    main()
