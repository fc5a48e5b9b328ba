"""How fast is the landmark model with a memory on disk?

decode  Tokens a second after a prompt of 32 tokens, from a memory of --memory-tokens and without a
        memory.
first   Seconds from opening the memory to the first answer token of a new session, with its pages
        dropped from the page cache (cold) and present (warm), against reading the text again by
        the faster of two forward passes that store nothing: the session's own chunks, and windows
        of 8 blocks in batches of 8 that attend to nothing outside themselves.
ingest  Tokens a second of an ingest of a quarter of --memory-tokens, against the same chunks with
        nothing stored; both tokenise.
open    Seconds to open a memory of --gigabytes of random blocks, cold and warm.
peak    Peak main memory of fresh processes that ingest a quarter, once and four times
        --memory-tokens.

Taken in turns; medians, and a ratio is the median over repeats of the ratio within a repeat.

    python -m benchmarks.speed.landmark --text books-test.jsonl.zst
"""

import argparse
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from benchmarks.common.memories import data_file, drop_cache, peaks_table, weigh_ingest, workplace
from benchmarks.common.options import add, load, parser, prepare
from benchmarks.common.results import write_part
from benchmarks.common.tables import spread, table, tokens_number, tokens_text
from benchmarks.common.text import Books
from benchmarks.common.timing import in_fresh_process, interleaved, paired_ratio, timed
from memstore import LandmarkModel, MemoryStore, load_model
from memstore.disk.format.document import IngestSettings
from memstore.model.landmark.landmark_session import LandmarkSession
from memstore.training.objectives import encode_windows

PROMPT = 32  # tokens before generation begins
PARTS = ["decode", "first", "ingest", "open", "peak"]
QUESTION = " What is the name of the old man who lives in the house near the river? It is"


def main() -> None:
    options = read_options()
    model = load(options)
    with workplace(options) as directory:
        books = Books.read(options.text, model.tokenizer, directory / "tokens")
        text = books.run(Random(f"memory {options.seed}"), options.memory_tokens)
        memory = directory / f"memory-{len(text)}-{options.seed}"
        if {"decode", "first"} & set(options.parts):
            with (MemoryStore.open if memory.exists() else MemoryStore.create)(
                memory, model.signature
            ) as store:
                model.ingest(model.tokenizer.decode(text.tolist()), store, name="book")
        if "decode" in options.parts:
            found = decode(model, memory, books, options)
            report(f"generating from {tokens_text(len(text))} tokens / without a memory", found)
            write_part(options, "decode", found)
        if "first" in options.parts:
            write_part(options, "first", first_answer(model, memory, text, options))
        if "ingest" in options.parts:
            found = ingest(model, text[: len(text) // 4], directory, options)
            report(f"ingesting {tokens_text(len(text) // 4)} tokens / nothing stored", found)
            write_part(options, "ingest", found)
        if "open" in options.parts:
            write_part(options, "open", opening(model, directory, options))
        if "peak" in options.parts:
            write_part(options, "peak", peaks(model, books, directory, options))


def read_options() -> argparse.Namespace:
    options = parser(__doc__)
    add(options, "--memory-tokens", "128K", "e.g. 32K or 1M", type=tokens_number)
    add(options, "--repeats", 7)
    add(options, "--parts", PARTS, choices=PARTS, metavar="PART")
    add(options, "--tokens", 200, "generated in every repeat")
    add(options, "--gigabytes", 1.0, "of the memory that is opened")
    return options.parse_args()


def report(what: str, found: dict[str, Any]) -> None:
    """Two rates and their ratio."""
    rates = " / ".join(f"{rate:,.0f}" for rate in found["tokens_per_second"].values())
    line = [what, rates, spread(found["ratio"])]
    print(table(["what", "tokens a second", "ratio"], [line]) + "\n", flush=True)


def rates_of(measured: dict[str, list[float]]) -> dict[str, Any]:
    """Medians of two rates, and the ratio of the first to the second."""
    return {
        "tokens_per_second": {name: statistics.median(values) for name, values in measured.items()},
        "ratio": paired_ratio(*measured.values()),
        "measured": measured,
    }


def decode(
    model: LandmarkModel, memory: Path, books: Books, options: argparse.Namespace
) -> dict[str, Any]:
    rng = Random(f"decode {options.seed}")
    prompts = [books.place(rng, PROMPT).tolist() for _ in range(options.repeats + 1)]
    with MemoryStore.open(memory, model.signature, read_only=True) as store:

        def rate(documents: list[str], repeat: int) -> float:
            prompt = prompts[repeat]
            with model.session(store, documents) as session:
                state = session.feed(prompt)[-1]
                tokens = session.generate(state, options.tokens + 1, temperature=0.8, seed=repeat)
                return options.tokens / timed(lambda: list(tokens))[0]

        runs = {"memory": partial(rate, ["book"]), "none": partial(rate, [])}
        for run in runs.values():
            run(options.repeats)  # warm up
        return rates_of(interleaved(runs, options.repeats))


def first_answer(
    model: LandmarkModel, memory: Path, text: np.ndarray, options: argparse.Namespace
) -> dict[str, Any]:
    question = model.tokenizer.encode(QUESTION)[-16:]

    def seconds(cold: bool, _: int) -> float:
        drop_cache(memory) if cold else data_file(memory).read_bytes()
        began = time.perf_counter()
        with (
            MemoryStore.open(memory, model.signature, read_only=True) as store,
            model.session(store, ["book"]) as session,
        ):
            next(session.generate(session.feed(question)[-1], 1))
            return time.perf_counter() - began

    seconds(False, 0)  # warm up
    runs = {"cold": partial(seconds, True), "warm": partial(seconds, False)}
    measured = interleaved(runs, options.repeats)
    forwards: dict[str, Callable[[], None]] = {
        "chunks": lambda: chunked_forward(model, text),
        "windows": lambda: windows_forward(model, text),
    }
    again = {name: timed(forward)[0] for name, forward in forwards.items()}
    fastest = min(again, key=lambda name: again[name])
    lines = []
    found: dict[str, Any] = {"read again": again, "measured": measured}
    for name, values in measured.items():
        taken = statistics.median(values)
        found[name] = {"seconds": taken, "times_faster": again[fastest] / taken}
        lines.append([name, f"{1000 * taken:.0f} ms", f"{again[fastest] / taken:.0f}x"])
    lines.append([f"reading again, in {fastest}", f"{again[fastest]:.1f} s", ""])
    head = [f"first token, {tokens_text(len(text))} tokens", "time", "faster than reading again"]
    print(table(head, lines) + "\n", flush=True)
    return found


def chunked_forward(model: LandmarkModel, ids: np.ndarray) -> None:
    """Read ids in a session's chunks, storing nothing."""
    step = model.lookup.chunk_blocks * model.config.block_size
    with (
        MemoryStore.in_memory(model.signature) as store,
        LandmarkSession(model, model.lookup, store, [], retrieve=False) as session,
    ):
        for start in range(0, len(ids), step):
            session.feed(ids[start : start + step].tolist())


def windows_forward(model: LandmarkModel, ids: np.ndarray, blocks: int = 8, batch: int = 8) -> None:
    """Read ids in windows that attend to nothing outside themselves."""
    size = model.config.block_size
    content = torch.from_numpy(ids[: len(ids) // (blocks * size) * blocks * size])
    content = content.view(-1, blocks, size)
    landmarks = torch.full((len(content), blocks, 1), model.config.landmark_id)
    windows = torch.cat([content, landmarks], -1).flatten(1)
    with torch.inference_mode():
        for some in windows.split(batch):
            encode_windows(model.transformer, some)


def ingest(
    model: LandmarkModel, text: np.ndarray, directory: Path, options: argparse.Namespace
) -> dict[str, Any]:
    written = model.tokenizer.decode(text.tolist())

    def stored(repeat: int) -> float:
        path = directory / f"ingest {repeat}"
        with MemoryStore.create(path, model.signature) as store:
            seconds, _ = timed(lambda: model.ingest(written, store, name="book"))
        shutil.rmtree(path)
        return len(text) / seconds

    def forgotten(_: int) -> float:
        def read() -> None:
            ids = model.tokenizer.encode(written)
            chunked_forward(model, np.asarray(ids))

        return len(text) / timed(read)[0]

    return rates_of(interleaved({"stored": stored, "not stored": forgotten}, options.repeats))


def opening(model: LandmarkModel, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    memory = directory / "large"
    blocks = write_random_memory(model, memory, round(options.gigabytes * 1e9))
    size = data_file(memory).stat().st_size

    def seconds(cold: bool, _: int) -> float:
        if cold:
            drop_cache(memory)
        began = time.perf_counter()
        with MemoryStore.open(memory, model.signature, read_only=True):
            return time.perf_counter() - began

    seconds(False, 0)  # warm up
    runs = {"cold": partial(seconds, True), "warm": partial(seconds, False)}
    measured = interleaved(runs, options.repeats)
    shutil.rmtree(memory)
    lines = [[name, f"{1000 * statistics.median(of):.0f} ms"] for name, of in measured.items()]
    print(table([f"opening {size / 1e9:.2f} GB", "time"], lines) + "\n", flush=True)
    return {"bytes": size, "blocks": blocks, "measured": measured}


def write_random_memory(model: LandmarkModel, memory: Path, size: int) -> int:
    """Write a memory of about `size` bytes of random blocks, and return their number."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    n, dtype = 64, getattr(torch, config.kv_dtype)
    shape = (n, config.num_kv_heads, config.block_size, config.head_dim)
    k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    landmarks = torch.randn(shape[0], shape[1], shape[3], generator=generator).to(dtype)
    chunk_bytes = 2 * k.nbytes * len(model.signature.memory_layers)
    ids = np.random.default_rng(0).integers(0, config.landmark_id, n * config.block_size)
    settings = IngestSettings(chunk_blocks=n, top_k=config.top_k)
    with MemoryStore.create(memory, model.signature, codec="raw") as store:
        writer = store.write_document("random", source_hash="random", settings=settings)
        assert writer is not None
        with writer:
            for chunk in range(-(-size // chunk_bytes)):
                blocks = {
                    layer: (k.roll(chunk + layer, 0), v.roll(chunk, 2), landmarks.roll(chunk, 0))
                    for layer in range(config.num_layers)
                }
                writer.add_chunk(ids, chunk * len(ids), blocks)
            return writer.finish().blocks


def peaks(
    model: LandmarkModel, books: Books, directory: Path, options: argparse.Namespace
) -> list[dict[str, int]]:
    found = []
    for times in (0.25, 1, 4):
        ids = books.run(Random("peak"), round(options.memory_tokens * times))
        path, memory = directory / f"text {times}.txt", directory / f"peak {times}"
        path.write_text(model.tokenizer.decode(ids.tolist()), encoding="utf-8")
        found.append(in_fresh_process(weigh, options.model, path, memory, options.threads))
        shutil.rmtree(memory)
    print(peaks_table(found))
    return found


def weigh(model_path: str | None, text: Path, memory: Path, threads: int) -> dict[str, int]:
    """In a fresh process: peak resident bytes of ingesting a file."""
    prepare(threads)
    model = load_model(model_path)
    with MemoryStore.create(memory, model.signature) as store:
        return weigh_ingest(model, store, text)


if __name__ == "__main__":
    main()
