"""How much main memory does reading a document take, by its length?

Peak resident memory of a process of its own that ingests a quarter, once and four times
--memory-tokens tokens.

    python -m benchmarks.speed.peak_memory --text books-test.jsonl.zst
"""

import argparse
import resource
import shutil
import sys
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.common.main_memory import status_bytes
from benchmarks.common.memories import data_file, long_text
from benchmarks.common.options import add, load, parser, prepare
from benchmarks.common.results import write_part
from benchmarks.common.tables import table, tokens_number
from benchmarks.common.text import Books
from benchmarks.common.timing import in_fresh_process
from memstore import LandmarkModel, MemoryStore, load_model


def ingest_and_weigh(
    model_path: str | None, text: Path, memory: Path, threads: int
) -> dict[str, int]:
    """In a process of its own: peak resident bytes before and after ingesting a file."""
    prepare(threads)
    model = load_model(model_path)
    with MemoryStore.create(memory, model.signature) as store:
        model.ingest("A first short text, so that everything is loaded. " * 20, store, name="first")
        before = peak_bytes()
        document = model.ingest(text, store)
        return {
            "tokens": document.tokens,
            "before": before,
            "peak": peak_bytes(),
            "landmarks": store.stats()["landmarks"],
        }


def peak_bytes() -> int:
    """Peak resident bytes of this process. getrusage is second choice: Linux hands it down from the
    parent process.
    """
    try:
        return status_bytes("VmHWM")
    except (OSError, KeyError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure(
    model: LandmarkModel, books: Books, directory: Path, options: argparse.Namespace
) -> list[dict[str, Any]]:
    found = []
    for times in (0.25, 1, 4):
        length = round(options.memory_tokens * times)
        path = directory / f"text {times}.txt"
        path.write_text(
            model.tokenizer.decode(books.run(Random("peak"), length).tolist()), encoding="utf-8"
        )
        memory = directory / f"peak {times}"
        row = in_fresh_process(ingest_and_weigh, options.model, path, memory, options.threads)
        found.append(row | {"file_bytes": data_file(memory).stat().st_size})
        shutil.rmtree(memory)
    return found


def main() -> None:
    arguments = parser(__doc__)
    add(arguments, "--memory-tokens", "128K", type=tokens_number)
    options = arguments.parse_args()
    model = load(options)
    with long_text(options, model) as (directory, books, _):
        found = measure(model, books, directory, options)
    head = ["tokens", "MB on disk", "peak MB", "MB above a short text", "MB of landmark keys"]
    lines = [
        f"{row['tokens']:,} | {row['file_bytes'] / 1e6:,.1f} | {row['peak'] / 1e6:,.1f} | "
        f"{(row['peak'] - row['before']) / 1e6:,.1f} | {row['landmarks'] / 1e6:,.1f}"
        for row in found
    ]
    print(table(head, lines))
    write_part(options, "peak", found)


if __name__ == "__main__":
    main()
