"""What does it cost to choose blocks by token landmarks and by words: opening, and scoring?

A memory of random unit vectors in int8 and of words with Zipf's frequencies, so nothing is measured
here but time. Opening is from files to the first scores of every document, in a fresh store; cold:
the file's pages are dropped from the page cache first. Medians.

    python -m benchmarks.index.late --tokens 1M
"""

import argparse
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.memories import data_file, drop_cache, workplace
from benchmarks.common.options import add, plain_parser, prepare
from benchmarks.common.results import write_part
from benchmarks.common.tables import table, tokens_number, tokens_text
from benchmarks.common.timing import interleaved
from memstore import MemoryStore
from memstore.disk.format.document import IngestSettings
from memstore.disk.format.index_spec import IndexSpec
from memstore.disk.format.signature import Signature
from memstore.disk.format.text_parts import Passage

BLOCK, AT_ONCE, VOCABULARY = 64, 256, 100_000
SIGNATURE = Signature("random", "random", {}, "float16", 1, (0,), 1, 8, BLOCK)


def write_random_memory(memory: Path, tokens: int, documents: int, width: int, seed: int) -> None:
    """Documents of equal size, of passages of a block each; keys and values are left out."""
    form = IndexSpec("random", "random", 1, width, "int8", words=True)
    rng = np.random.default_rng(seed)
    some = AT_ONCE * BLOCK  # tokens
    frequencies = 1 / np.arange(1, VOCABULARY + 1)
    frequencies /= frequencies.sum()
    with MemoryStore.create(memory, SIGNATURE, selector=form) as store:
        for number in range(documents):
            writer = store.write_document(
                str(number), source_hash="random", settings=IngestSettings(passage_tokens=BLOCK)
            )
            assert writer is not None
            with writer:
                for first in range(0, tokens // documents, some):
                    random = rng.standard_normal((some, 1, width), dtype=np.float32)
                    unit = 127 * random / np.linalg.norm(random, axis=-1, keepdims=True)
                    # about as many words as three quarters of the tokens
                    drawn = rng.choice(VOCABULARY, (AT_ONCE, 48), p=frequencies)
                    words = [list(zip(*np.unique(block, return_counts=True))) for block in drawn]
                    landmarks = torch.from_numpy(unit.round().astype(np.int8))
                    passages = [
                        Passage(np.arange(at, at + BLOCK) + (number << 24), 0, "", at, BLOCK)
                        for at in range(first, first + some, BLOCK)
                    ]
                    writer.add_passages(passages, [], given=[], landmarks=landmarks, words=words)
                writer.finish()


def measure(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    memory, tokens = directory / "memory", tokens_number(options.tokens)
    write_random_memory(memory, tokens, options.documents, options.width, options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    q = torch.nn.functional.normalize(torch.randn(64, options.width, generator=generator), dim=-1)
    words = dict.fromkeys([3, 40, 500, 6000, 70_000, 999, 12, 1], 1.0)

    def opened(search: Callable[[MemoryStore], Any], cold: bool, _: int) -> float:
        if cold:
            drop_cache(memory)
        began = time.perf_counter()
        with MemoryStore.open(memory, read_only=True) as store:
            search(store)
            return time.perf_counter() - began

    def scope(store: MemoryStore) -> list[tuple[int, int, int]]:
        return [(document.id, 0, document.blocks) for document in store.documents()]

    def by_tokens(store: MemoryStore) -> Any:
        return store.retrieval.token_maxima(q[:12], 0, scope(store))

    def by_words(store: MemoryStore) -> Any:
        return store.retrieval.word_scores(words, scope(store))

    first = interleaved(
        {
            f"{name}, {cache}": partial(opened, search, cache == "cold")
            for name, search in (("landmarks", by_tokens), ("words", by_words))
            for cache in ("cold", "warm")
        },
        options.repeats,
    )
    with MemoryStore.open(memory, read_only=True) as store:
        everything = scope(store)
        one = everything[:1]

        def clock(work: Callable[[], Any]) -> Callable[[int], float]:
            def run(_: int) -> float:
                began = time.perf_counter()
                work()
                return time.perf_counter() - began

            return run

        runs = {
            f"landmarks, {rows} rows": clock(
                partial(store.retrieval.token_maxima, q[:rows], 0, everything)
            )
            for rows in (1, 12, 64)
        }
        runs["landmarks, 12 rows, one document"] = clock(
            lambda: store.retrieval.token_maxima(q[:12], 0, one)
        )
        runs["8 words"] = clock(lambda: store.retrieval.word_scores(words, everything))
        runs["8 words, one document"] = clock(lambda: store.retrieval.word_scores(words, one))
        floats = torch.randn(tokens, options.width, generator=generator)
        runs["(one product over as many numbers in float32, 12 rows)"] = clock(
            lambda: q[:12] @ floats.T
        )
        for run in runs.values():
            run(0)
        later = interleaved(runs, options.repeats)
        held = store.stats()["landmarks"]
    size = data_file(memory).stat().st_size
    shutil.rmtree(memory)
    return {"tokens": tokens, "bytes": size, "held": held, "first": first, "later": later}


def main() -> None:
    arguments = plain_parser(__doc__)
    add(arguments, "--work", None, "where the memory is made (default: temporary)", type=Path)
    add(arguments, "--tokens", "1M")
    add(arguments, "--documents", 16)
    add(arguments, "--width", 64, "numbers of a landmark")
    add(arguments, "--repeats", 9)
    options = arguments.parse_args()
    prepare(options.threads)
    with workplace(options) as directory:
        found = measure(directory, options)
    print(
        f"{tokens_text(found['tokens'])} tokens in {options.documents} documents; "
        f"{found['held'] / 1e6:.0f} MB held, {found['bytes'] / 1e6:.0f} MB on disk\n"
    )
    lines = [
        [kind, name, f"{1000 * statistics.median(seconds):.1f} ms"]
        for kind in ("first", "later")
        for name, seconds in found[kind].items()
    ]
    print(table(["call", "what", "time"], lines))
    write_part(options, "late", found)


if __name__ == "__main__":
    main()
