"""What does a budget of keys and values cost where questions come back?

A part of a book with facts planted in it is read into memories of which the keys and values of
passages may take all of their bytes, a third, a tenth, or nothing; then questions about the facts
are asked, which come back as Zipf's law has it, each of a memory that is opened anew, so that
nothing is in main memory. Told of each: the share of the passages read that were computed, in the
first and in the second half of the questions, the processor's seconds a question, and how many
answers are others than those of a memory without a budget, of which there should be none. As
SmolLM2 ships, passages are chained: the first one in the text is read out of the memory, and those
behind it are computed over it whatever is kept, and are not counted.

    python -m benchmarks.real.kv_budget --text books-val.jsonl.zst --model smollm2
"""

import argparse
import re
import tempfile
import time
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.common.options import add, plain_parser, prepare
from benchmarks.common.results import write
from benchmarks.common.tables import table, tokens_number
from benchmarks.real.passage_model import passage_model
from benchmarks.real.prompting import DTYPES
from benchmarks.real.stored_once import part
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.model.texts.source_text import Text
from memstore.store.memory_store import MemoryStore

SHARES: dict[str, float | None] = {
    "no budget": None,
    "all": 1.0,
    "a third": 1 / 3,
    "a tenth": 0.1,
    "nothing": 0.0,
}
_CHARACTERS = 4.4  # of a token, about
_COLOURS = ("red", "grey", "silver", "copper", "black", "white", "blue", "green", "golden", "brown")
_THINGS = ("lantern", "barrel", "anchor", "ladder", "clock", "mirror")


def main() -> None:
    options = read_options()
    prepare(options.threads)
    reader = passage_model(options.model, options.dtype)
    rng = Random(options.seed)
    book = part(options.text, int(options.tokens * _CHARACTERS), options.seed)
    text, names = planted(book, rng)
    asked = rng.choices(names, zipf(len(names), options.exponent), k=options.questions)
    with tempfile.TemporaryDirectory() as place:
        how = {"chained": False} if options.unchained else {}
        rows = measure(reader, Path(place), text, asked, options.codec, how)
    shown = [
        (
            name,
            f"{row['bytes']:,}",
            *(f"{share:.2f}" for share in row["computed"]),
            f"{row['seconds']:.3f}",
            str(row["other_answers"]),
        )
        for name, row in rows.items()
    ]
    head = ("keys and values", "bytes", "computed, first half", "second", "seconds", "others")
    print(f"{len(asked)} questions about {len(set(asked))} of {len(names)} facts\n")
    print(table(head, shown))
    write(options, {"rows": rows, "asked": len(asked), "different": len(set(asked))})


def read_options() -> argparse.Namespace:
    options = plain_parser(__doc__)
    options.add_argument("--text", nargs="+", required=True, help="books: .jsonl.zst or .txt")
    add(options, "--model", "smollm2", "of Hugging Face's make")
    add(options, "--dtype", "bfloat16", "of the weights", choices=DTYPES)
    add(options, "--codec", "int8", "of the memory")
    add(options, "--tokens", 8_000, "of the book, about", type=tokens_number)
    add(options, "--questions", 100)
    add(options, "--exponent", 1.0, "of Zipf's law")
    options.add_argument(
        "--unchained",
        action="store_true",
        help="read every passage out of the memory, and not the first of a chain alone",
    )
    return options.parse_args()


def planted(book: str, rng: Random) -> tuple[str, list[str]]:
    """The book with a sentence about each of some things, at random places, and their names."""
    sentences = re.split(r"(?<=[.!?]) ", book)
    names = [f"{colour} {thing}" for colour in _COLOURS for thing in _THINGS]
    rng.shuffle(names)
    for name in names:
        fact = f"The number of the {name} is {rng.randrange(100, 1000)}."
        sentences.insert(rng.randrange(len(sentences) + 1), fact)
    return " ".join(sentences), names


def zipf(count: int, exponent: float) -> list[float]:
    """How often each of so many is asked for, the first one most."""
    return [1 / rank**exponent for rank in range(1, count + 1)]


def measure(
    reader: HuggingFacePassageModel,
    place: Path,
    text: str,
    asked: list[str],
    codec: str,
    how: dict[str, Any],
) -> dict[str, dict[str, Any]]:
    """Of each budget what was computed, the seconds, and the answers that are others. how:
    LookupSettings that differ from the reader's.
    """
    rows: dict[str, dict[str, Any]] = {}
    size, expected = 0, list[list[int]]()
    for name, share in SHARES.items():
        path = place / name
        budget = None if share is None else int(share * size)
        with MemoryStore.create(
            path, reader.signature, codec=codec, selector=reader.keeps, kv_budget=budget
        ) as store:
            reader.ingest(Text(text, "book"), store)
            size = size or store.stats()["passages"]["bytes"]
        answers, computed, read, seconds = ask_all(reader, path, asked, how)
        expected = expected or answers
        with MemoryStore.open(path, read_only=True) as store:
            kept = store.stats()["passages"]["bytes"]
        halves = slice(0, len(asked) // 2), slice(len(asked) // 2, None)
        rows[name] = {
            "bytes": kept,
            "budget": budget,
            "computed": [sum(computed[half]) / max(1, sum(read[half])) for half in halves],
            "seconds": sum(seconds) / len(asked),
            "other_answers": sum(one != other for one, other in zip(answers, expected)),
            "by_question": {
                "computed": list(accumulate(computed)),
                "read": list(accumulate(read)),
                "seconds": seconds,
            },
        }
    return rows


def ask_all(
    reader: HuggingFacePassageModel, path: Path, asked: list[str], how: dict[str, Any]
) -> tuple[list[list[int]], list[int], list[int], list[float]]:
    """Of each question the answer's tokens, the passages that were computed and that were read,
    and the processor's seconds.
    """
    answers, computed, read, seconds = [], list[int](), list[int](), list[float]()
    units = len(reader.shape.memory_layers) * reader.shape.num_kv_heads
    for name in asked:
        with MemoryStore.open(path) as store:
            began = time.process_time()
            question = f"What is the number of the {name}?"
            answer = reader.ask(question, store, max_new_tokens=8, **how)
            seconds.append(time.process_time() - began)
            host = answer.tiers["host"]
            computed.append(int(answer.tiers["computed"]["hits"]) // units)
            read.append(int(host["hits"] + host["misses"]) // units)
        answers.append(answer.tokens)
    return answers, computed, read, seconds


if __name__ == "__main__":
    main()
