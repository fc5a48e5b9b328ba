"""Does search find a passage of a million tokens from a sentence that is not quite the one it read?

One process ingests the books of --text into a memory, every book a document, of long ones only as
much as makes --tokens in all. Another, fresh one opens it. A query is a sentence of 8 to 30 words
from a random place (characters are equally likely), put on one line; 15% of its words (at least
one) are replaced by words from random places of the books, and one is left out. A hit is one of the
blocks that hold some of the sentence; at the level of documents, its book. The same queries go to
BM25 (bm25s with its defaults, but no stop words left out) over the texts of the same blocks; a
document ranks by its best block in both. The queries depend on --seed and the texts alone.

The rows of ours differ in how many blocks the landmark keys choose to be compared word by word
("all": every one, so that the landmark keys decide nothing). Seconds are medians over the queries,
one after the other in one process; the tier of main memory is empty at the first row's beginning,
and what a query reads there the next ones find there. Intervals are Wilson's, 95%.

    python -m benchmarks.quality.search --text books-test.jsonl.zst
"""

import argparse
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.common.memories import workplace
from benchmarks.common.options import add, load, parser, prepare
from benchmarks.common.results import write_results
from benchmarks.common.tables import rate, table, tokens_number
from benchmarks.common.text import Books
from benchmarks.common.timing import in_fresh_process, timed
from memstore import LandmarkModel, MemoryStore, load_model
from memstore.model.landmark.byte_tokenizer import Tokenizer

LEAST_WORDS, MOST_WORDS = 8, 30  # of a sentence
REPLACED = 0.15  # share of its words
SENTENCE = re.compile(r"""(?<=[.!?])["')]*\s+((?:(?!\n\s*\n)[^.!?])*[.!?])""")
WORD = re.compile(r"(?<!\w)[^\W\d_]+(?!\w)")
RECALLS = (1, 5, 10)

Place = tuple[str, int]
"""A document and a block."""


def main() -> None:
    options = parser(__doc__)
    add(options, "--tokens", "1M", "tokens of memory, e.g. 100K or 1M")
    add(options, "--queries", 250)
    add(options, "--shortlists", ["2K", "8K", "all"], "blocks compared word by word", nargs="*")
    given = options.parse_args()
    given.tokens = tokens_number(given.tokens)
    given.shortlists = [None if text == "all" else tokens_number(text) for text in given.shortlists]
    model = load(given)
    with workplace(given) as directory:
        in_fresh_process(build, directory, vars(given))
        results = in_fresh_process(search_all, directory, given)
    print(
        f"\n{results['tokens']:,} tokens, {results['blocks']:,} blocks, {results['documents']} "
        "documents\n"
    )
    print(report(results["rows"]))
    write_results(given, model, results)


def build(directory: Path, settings: dict[str, Any]) -> None:
    """Ingest the books into directory/memory, those that are not there already.

    settings: model, text, tokens, threads.
    """
    began = time.perf_counter()
    prepare(settings["threads"])
    model = load_model(settings["model"])
    books = Books.read(settings["text"], model.tokenizer, directory / "tokens").books
    most = share(sorted(map(len, books)), settings["tokens"])
    create_or_open = MemoryStore.open if (directory / "memory").exists() else MemoryStore.create
    with create_or_open(directory / "memory", model.signature) as store:
        for number, book in enumerate(books):
            model.ingest(model.tokenizer.decode(book[:most].tolist()), store, name=f"book {number}")
            print(
                f"  {number + 1} of {len(books)} books, {time.perf_counter() - began:.0f} s",
                flush=True,
            )


def share(lengths: list[int], tokens: int) -> int:
    """How many tokens of every book (shorter ones whole) give `tokens` in all; lengths:
    ascending.
    """
    if sum(lengths) < tokens:
        raise SystemExit(
            f"the texts have {sum(lengths):,} tokens, fewer than {tokens:,}; give more, or set "
            "--tokens"
        )
    for shorter, length in enumerate(lengths):
        each = -(-tokens // (len(lengths) - shorter))
        if each <= length:
            return each
        tokens -= length
    return lengths[-1]


@dataclass(frozen=True)
class Query:
    """A sentence as it is asked for, and where it stands: tokens first .. end of a document."""

    phrase: str
    document: str
    first: int
    end: int

    def blocks(self, block_size: int) -> range:
        """The blocks that hold some of it."""
        return range(self.first // block_size, (self.end - 1) // block_size + 1)


def search_all(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Runs in a process of its own, which has read none of the text that is searched."""
    model = load(options)
    with MemoryStore.open(directory / "memory", model.signature, read_only=True) as store:
        texts = read_texts(store, model.tokenizer)
        queries = draw_queries(texts, options.queries, Random(f"search {options.seed}"))
        places = [
            (document.name, block)
            for document in store.documents()
            for block in range(document.blocks)
        ]
        rows = []
        if find_spec("bm25s") is None:
            print("bm25s is not installed (pip install '.[bench]'): no BM25", flush=True)
        else:
            find = bm25(store, model, places)
            rows.append(measure("BM25", find, queries, model.config.block_size))
        for shortlist in options.shortlists:
            count = len(places) if shortlist is None else shortlist
            name = f"memstore, {'all' if count >= len(places) else f'{count:,}'} blocks compared"
            rows.append(measure(name, ours(store, model, count), queries, model.config.block_size))
            rows[-1]["shortlist"] = count
        held = store.stats()
    return {
        "tokens": held["tokens"],
        "blocks": held["blocks"],
        "documents": held["documents"],
        "rows": rows,
    }


def ours(store: MemoryStore, model: LandmarkModel, shortlist: int) -> Callable[[str], list[Place]]:
    """The search under test."""

    def find(phrase: str) -> list[Place]:
        found = model.search(phrase, store, top_k=max(RECALLS), shortlist=shortlist)
        return [(source.document, source.block) for source in found]

    return find


def bm25(
    store: MemoryStore, model: LandmarkModel, places: Sequence[Place]
) -> Callable[[str], list[Place]]:
    """BM25 over the texts of the same blocks."""
    import bm25s

    size, texts = model.config.block_size, []
    for document in store.documents():
        ids = store.tokens(document.id).ids.tolist()
        texts += [model.tokenizer.decode(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert len(texts) == len(places)

    def words(texts: str | list[str]) -> Any:
        return bm25s.tokenize(texts, stopwords=None, show_progress=False)

    index = bm25s.BM25()
    index.index(words(texts), show_progress=False)

    def find(phrase: str) -> list[Place]:
        found, _ = index.retrieve(words(phrase), k=max(RECALLS), show_progress=False)
        return [places[number] for number in found[0].tolist()]

    return find


def measure(
    name: str, find: Callable[[str], list[Place]], queries: Sequence["Query"], block_size: int
) -> dict[str, Any]:
    """Ask every query; ranks count from 1, None = not found."""
    ranks, documents, seconds = [], 0, []
    for query in queries:
        took, found = timed(partial(find, query.phrase))
        seconds.append(took)
        right = {(query.document, block) for block in query.blocks(block_size)}
        ranks.append(next((rank for rank, place in enumerate(found, 1) if place in right), None))
        documents += bool(found) and found[0][0] == query.document
    row = {"name": name, "queries": len(queries), "ranks": ranks, "right_documents": documents}
    row |= {"median_seconds": statistics.median(seconds), "first_seconds": seconds[0]}
    print("  " + "  ".join(map(str, cells(row))), flush=True)
    return row


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    within = [sum(rank is not None and rank <= most for rank in row["ranks"]) for most in RECALLS]
    rates = [rate(right, row["queries"]) for right in [*within, row["right_documents"]]]
    return [row["name"], *rates, f"{row['median_seconds']:.3f}"]


def report(rows: Sequence[dict[str, Any]]) -> str:
    """The table of all rows."""
    head = [
        "search",
        *(f"recall@{most}" for most in RECALLS),
        "document recall@1",
        "seconds a query",
    ]
    return table(head, [cells(row) for row in rows])


def draw_queries(
    texts: Mapping[str, tuple[str, np.ndarray]], number: int, rng: Random
) -> list[Query]:
    """Sentences from random places, altered; texts: see read_texts."""
    names = list(texts)
    queries: list[Query] = []
    lengths = [len(text) for text, _ in texts.values()]
    while len(queries) < number:
        name = rng.choices(names, lengths)[0]
        text, ends = texts[name]
        found = SENTENCE.search(text, rng.randrange(len(text)))
        if found is None or not LEAST_WORDS <= len(found[1].split()) <= MOST_WORDS:
            continue
        first, last = np.searchsorted(
            ends, [found.start(1), found.end(1) - 1], side="right"
        ).tolist()
        phrase = alter(found[1], lambda: draw_word(texts[rng.choice(names)][0], rng), rng)
        queries.append(Query(phrase, name, first, last + 1))
    return queries


def alter(sentence: str, word: Callable[[], str], rng: Random) -> str:
    """The sentence on one line, REPLACED of its words replaced by drawn ones and one left out."""
    words = sentence.split()
    places = rng.sample(range(len(words)), 1 + max(1, round(REPLACED * len(words))))
    for place in places[1:]:
        old = words[place]
        while words[place] == old:
            words[place] = word()
    del words[places[0]]
    return " ".join(words)


def draw_word(text: str, rng: Random) -> str:
    """A word of a random place."""
    while True:
        found = WORD.search(text, rng.randrange(len(text)))
        if found is not None:
            return found[0]


def read_texts(store: MemoryStore, tokenizer: Tokenizer) -> dict[str, tuple[str, np.ndarray]]:
    """Of every document its text, and the characters before the end of each token."""
    read = {}
    for document in store.documents():
        ids = store.tokens(document.id).ids
        read[document.name] = (
            tokenizer.decode(ids.tolist()),
            tokenizer.character_counts[ids].cumsum(),
        )
    return read


if __name__ == "__main__":
    began = time.perf_counter()
    main()
    print(f"{time.perf_counter() - began:.0f} s")
