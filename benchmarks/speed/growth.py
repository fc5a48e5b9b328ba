"""How does every cost grow with the work, and how near is it to what this machine can do?

tokens     Of each of --models and --lengths: seconds of a core to read a text of so many tokens in,
           to the first token of an answer (the model loaded, the memory warm), of every next token;
           bytes a token on disk; opening in fresh processes, its pages in the page cache and not,
           and there to the first token.
documents  Of each of --documents synthetic ones of one block (zeros, with random landmark keys):
           opening and listing in fresh processes; listing and a first token over all of them, warm.
readers    Of each of --readers processes that ask one memory of --memory-tokens for --seconds:
           questions a second of all, latency, main memory of each.
models     Decoders of random weights of --sizes with a memory of --memory-tokens, 2K by default:
           read in and generated, with weights in bfloat16 and in int8.

Beside each, in turns with it: a sum over a large buffer (main memory), products of 256 tokens with
a layer of the model's width and dtype, and once a part a file written, synced, and read cold. Every
point is a part of its own of --out, with the load; a run adds to what is there, and
`benchmarks.speed.growth_figure` tables, fits and draws them.

    python -m benchmarks.speed.growth --text books-test.jsonl.zst --out cost.json
"""

import argparse
import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.memories import workplace
from benchmarks.common.options import add, parser, prepare
from benchmarks.common.results import write_part
from benchmarks.common.tables import tokens_number, tokens_text
from benchmarks.speed.growth_documents import NAME, of_documents
from benchmarks.speed.growth_limits import disk
from benchmarks.speed.growth_models import measure, opening, read_in, text_of
from benchmarks.speed.growth_readers import of_readers
from benchmarks.speed.growth_weights import SHAPES, loaded, random_model
from memstore.training.corpus import read_documents

Keep = Callable[[str, dict[str, Any]], None]


def main() -> None:
    options = read_options()
    prepare(options.threads)
    with workplace(options) as directory:
        for part in options.parts:

            def keep(name: str, found: dict[str, Any], part: str = part) -> None:
                shares = {of: round(share, 3) for of, share in found.get("shares", {}).items()}
                print(f"{part} {name}: {found}\n{shares}\n", flush=True)
                write_part(options, f"{part} {name}", found)

            PARTS[part](directory, options, keep)


def tokens(directory: Path, options: argparse.Namespace, keep: Keep) -> None:
    rates = disk(directory)
    for name in options.models:
        reader = loaded(name)
        for length in map(tokens_number, options.lengths):
            path = directory / f"{name}-{length}"
            text, _ = text_of(reader, read_documents(options.text), length)
            found = measure(reader, text, path, options, rates)
            found["opening"] = opening(name, path, 3)
            shutil.rmtree(path)
            keep(f"{name} {tokens_text(length)}", found)


def documents(directory: Path, options: argparse.Namespace, keep: Keep) -> None:
    rates = disk(directory)
    for count in options.documents:
        path = directory / f"documents-{count}"
        found = of_documents(path, count, options, rates)
        shutil.rmtree(path)
        keep(str(count), found)


def readers(directory: Path, options: argparse.Namespace, keep: Keep) -> None:
    path, reader = directory / "asked", loaded(NAME)
    length = tokens_number(options.memory_tokens)
    read_in(reader, text_of(reader, read_documents(options.text), length)[0], path)
    del reader
    for count in options.readers:
        keep(str(count), of_readers(path, count, options.seconds))
    shutil.rmtree(path)


def models(directory: Path, options: argparse.Namespace, keep: Keep) -> None:
    rates = disk(directory)
    for shape in options.sizes:
        for weights in options.weights:
            reader = random_model(shape, weights, options.seed)
            length = tokens_number(options.memory_tokens)
            text, _ = text_of(reader, read_documents(options.text), length)
            path = directory / f"model-{shape}"
            found = measure(reader, text, path, options, rates)
            found["x"] = found["parameters"]
            keep(f"{shape} {weights}", found)
            shutil.rmtree(path)
            del reader
            gc.collect()


PARTS = {"tokens": tokens, "documents": documents, "readers": readers, "models": models}


def read_options() -> argparse.Namespace:
    options = parser(__doc__)
    add(options, "--parts", list(PARTS), choices=PARTS, metavar="PART")
    add(options, "--models", [NAME, "smollm2"], "of tokens: names that memstore takes")
    add(options, "--lengths", ["2K", "8K", "32K", "128K"], "of tokens")
    add(options, "--documents", [1, 100, 10_000, 100_000])
    add(options, "--readers", [1, 2, 4, 8, 16])
    add(options, "--seconds", 10.0, "that readers ask")
    add(options, "--memory-tokens", "2K", "of readers and models")
    add(options, "--sizes", list(SHAPES), choices=SHAPES, metavar="SIZE")
    add(options, "--weights", ["full", "int8"], "of models", choices=("full", "int8", "int4"))
    add(options, "--decoded", 32, "tokens of each repeat")
    add(options, "--repeats", 5)
    return options.parse_args()


if __name__ == "__main__":
    main()
