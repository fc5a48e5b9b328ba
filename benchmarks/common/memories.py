"""Memories on disk that several benchmarks make, and what the page cache holds of them."""

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import numpy as np

from benchmarks.common.tables import tokens_text
from benchmarks.common.text import Books
from benchmarks.common.timing import timed
from memstore import LandmarkModel, MemoryStore


def build_memory(model: LandmarkModel, memory: Path, text: np.ndarray) -> None:
    """Ingest the text as the document "book", or what is missing of it."""
    create_or_open = MemoryStore.open if memory.exists() else MemoryStore.create
    with create_or_open(memory, model.signature) as store:
        model.ingest(model.tokenizer.decode(text.tolist()), store, name="book")


def data_file(memory: Path) -> Path:
    """The file of a memory that its blocks lie in."""
    return memory / "data.mdb"


def drop_cache(memory: Path) -> None:
    """Let the page cache forget a memory's file; nobody may have it open."""
    os.sync()
    file = os.open(data_file(memory), os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def fill_cache(memory: Path) -> None:
    """Have the page cache hold a memory's file."""
    data_file(memory).read_bytes()


@contextmanager
def workplace(options: argparse.Namespace) -> Iterator[Path]:
    """The directory --work, or a temporary one."""
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
        yield options.work
        return
    with tempfile.TemporaryDirectory(prefix="memstore-benchmark-") as temporary:
        yield Path(temporary)


@contextmanager
def long_text(
    options: argparse.Namespace, model: LandmarkModel
) -> Iterator[tuple[Path, Books, np.ndarray]]:
    """A place to work in, the books of --text, and --memory-tokens tokens of them in a row."""
    with workplace(options) as directory:
        books = Books.read(options.text, model.tokenizer, directory / "tokens")
        text = books.run(Random(f"memory {options.seed}"), options.memory_tokens)
        yield directory, books, text


def kept_memory(
    model: LandmarkModel, directory: Path, text: np.ndarray, options: argparse.Namespace
) -> Path:
    """The memory of this text in a directory, read into it now if it is not there already."""
    memory = directory / f"memory-{len(text)}-{options.seed}"
    seconds, _ = timed(lambda: build_memory(model, memory, text))
    print(f"memory of {tokens_text(len(text))} tokens, read in {seconds:.1f} s\n", flush=True)
    return memory
