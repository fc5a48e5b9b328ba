"""How fast does the model generate from a long memory on disk, against the same model without one?

Tokens a second after a prompt of 32 tokens, in turns; medians, and the ratio is the median over
repeats of the ratio within a repeat.

    python -m benchmarks.speed.decode --text books-test.jsonl.zst
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.common.generation import PROMPT, generate
from benchmarks.common.memories import kept_memory, long_text
from benchmarks.common.options import add, add_memory_tokens, load, parser
from benchmarks.common.results import write_part
from benchmarks.common.tables import spread, table, tokens_text
from benchmarks.common.text import Books
from benchmarks.common.timing import interleaved, paired_ratio
from memstore import LandmarkModel, MemoryStore


def measure(
    model: LandmarkModel, memory: Path, books: Books, options: argparse.Namespace
) -> dict[str, Any]:
    rng = Random(f"decode {options.seed}")
    prompts = [books.place(rng, PROMPT).tolist() for _ in range(options.repeats + 1)]
    with MemoryStore.open(memory, model.signature, read_only=True) as store:

        def run(documents: list[str]) -> Callable[[int], float]:
            def once(repeat: int) -> float:
                return generate(
                    model, store, documents, prompts[repeat], options.tokens, seed=repeat
                )[0]

            return once

        runs = {"memory": run(["book"]), "none": run([])}
        for once in runs.values():
            once(options.repeats)  # warm up
        measured = interleaved(runs, options.repeats)
    return {
        "tokens_per_second": {name: statistics.median(values) for name, values in measured.items()},
        "ratio": paired_ratio(measured["memory"], measured["none"]),
        "measured": measured,
    }


def main() -> None:
    arguments = parser(__doc__)
    add_memory_tokens(arguments, repeats=9)
    add(arguments, "--tokens", 200, "generated in every repeat")
    options = arguments.parse_args()
    model = load(options)
    with long_text(options, model) as (directory, books, text):
        memory = kept_memory(model, directory, text, options)
        found = measure(model, memory, books, options)
    rates = [f"{rate:,.0f}" for rate in found["tokens_per_second"].values()]
    what = f"generating from {tokens_text(options.memory_tokens)} tokens of memory / without"
    print(
        table(
            ["what", "tokens a second", "ratio"],
            [[what, " / ".join(rates), spread(found["ratio"])]],
        )
    )
    write_part(options, "decode", found)


if __name__ == "__main__":
    main()
