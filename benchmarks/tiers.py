"""How many lookups do the tiers answer without the disk, by eviction policy and capacity?

Replays the lookups that a model made while it answered questions, against every policy and
capacity. Belady's optimum is the bound of fetching on demand. Predictions are replayed as if they
arrived at once, so the hit rate with them is an upper bound. A capacity is a share of the distinct
blocks that were looked up. Blocks of a session's own are pinned, and left out.

    python -m benchmarks.tiers                              lookups of 40 questions about six books
    python -m benchmarks.tiers --trace FILE                 lookups recorded before
    python -m benchmarks.tiers --text books-test.jsonl.zst --trace FILE     asks first, and records
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

from benchmarks.common.memories import workplace
from benchmarks.common.options import add, plain_parser, prepare
from benchmarks.common.results import write
from benchmarks.common.tables import table
from benchmarks.common.text import Books
from benchmarks.replay import Recorded, belady, recorded, replay
from memstore import LandmarkModel, MemoryStore, load_model
from memstore.tiers.policy import DEFAULT_POLICY, POLICIES

TRACE = Path(__file__).parent.parent / "tests/data/trace-books.zst"
BELADY, AHEAD = "belady", f"{DEFAULT_POLICY}, predicted"
_PASSAGE = 160  # tokens of a passage that the model continues
_CONTINUED, _ANSWERED = 24, 12  # tokens generated for a passage and for a question
_TEMPERATURE = 0.8  # a small model that decodes greedily soon repeats itself and its lookups
_NAME = re.compile(r"(?<=[a-z,;] )[A-Z][a-z]{2,}")  # a capital that begins no sentence


def hit_rates(lookups: Recorded, share: float) -> dict[str, float]:
    """The hit rate of each policy, of Belady's optimum, and of the default policy with the
    predictions, for a capacity of this share of the recorded blocks.
    """
    capacity = max(1, round(share * lookups.units))
    rates = {name: replay(lookups.requests, capacity, name).hit_rate for name in POLICIES}
    rates[BELADY] = belady(lookups.requests, capacity).hit_rate
    ahead = replay(lookups.requests, capacity, DEFAULT_POLICY, lookups.predicted)
    return rates | {AHEAD: ahead.hit_rate}


def questions(model: LandmarkModel, books: Books, count: int, seed: int) -> Iterator[list[str]]:
    """Passages of the books and, in the same session, a question about a name in each."""
    rng = Random(seed)
    for _ in range(count // 2):
        passage = model.tokenizer.decode(books.place(rng, _PASSAGE).tolist())
        name = rng.choice(_NAME.findall(passage) or passage.split())
        yield [passage, f" Who is {name}? {name} is"]


def record(
    model: LandmarkModel, books: Books, directory: Path, options: argparse.Namespace
) -> None:
    """Write the lookups of a model that answers questions about the books to `options.trace`."""
    place = directory / "memory"
    with MemoryStore.create(place, model.signature) as memory:
        for number, book in enumerate(books.books, 1):
            text = model.tokenizer.decode(book[: options.book_tokens].tolist())
            model.ingest(text, memory, name=f"book {number}")
    with (
        MemoryStore.open(place, model.signature, read_only=True, prefetch="speculative") as memory,
        recorded(memory.tiers, options.trace),
    ):
        for number, asked in enumerate(questions(model, books, options.questions, options.seed)):
            with model.chat(memory) as conversation:
                for text, most in zip(asked, (_CONTINUED, _ANSWERED), strict=True):
                    conversation.ask(
                        text,
                        max_new_tokens=most,
                        temperature=_TEMPERATURE,
                        seed=number,
                        until_sentence=False,
                    )


def share(text: str) -> float:
    """ "5%" -> 0.05"""
    return float(text.removesuffix("%")) / 100


def main() -> None:
    arguments = plain_parser(__doc__)
    add(arguments, "--trace", TRACE, "replay (with --text: record) this file", type=Path)
    add(arguments, "--capacities", [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5], type=share)
    arguments.add_argument(
        "--text", nargs="+", default=[], help="books to ask about: .jsonl.zst or .txt"
    )
    arguments.add_argument("--model", help="directory of a model (default: the one that ships)")
    arguments.add_argument("--work", type=Path, help="keep the memory in this directory")
    add(arguments, "--books", 6)
    add(arguments, "--book-tokens", 1 << 15, "most tokens to read of a book", type=int)
    add(arguments, "--questions", 40)
    options = arguments.parse_args()
    if options.text:
        if options.trace == TRACE:
            raise SystemExit("--text records lookups: name the file with --trace")
        prepare(options.threads)
        model = load_model(options.model)
        with workplace(options) as directory:
            books = Books.read(options.text, model.tokenizer, directory / "tokens")
            record(model, Books(books.books[: options.books], books.words), directory, options)
    lookups = Recorded.load(options.trace)
    rows = {capacity: hit_rates(lookups, capacity) for capacity in options.capacities}
    print(f"{len(lookups.requests):,} lookups of {lookups.units:,} distinct blocks\n")
    print(rates_table(rows))
    write(options, {"units": lookups.units, "lookups": len(lookups.requests), "rates": rows})


def rates_table(rows: dict[float, dict[str, float]]) -> str:
    """A row a capacity, a column a policy, and the means."""
    columns = [*POLICIES, BELADY, AHEAD]
    cells: list[list[Any]] = [
        [f"{capacity:.0%}", *(f"{rates[column]:.3f}" for column in columns)]
        for capacity, rates in rows.items()
    ]
    means = (mean(rates[column] for rates in rows.values()) for column in columns)
    cells.append(["mean", *(f"{value:.3f}" for value in means)])
    return table(["capacity", *columns], cells)


if __name__ == "__main__":
    main()
