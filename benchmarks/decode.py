"""What memory costs and saves in time, each as a ratio of measurements taken in turns in one run.

decode   tokens a second while generating from a memory of 128K tokens on disk, against the same
model with no
         memory.
first    seconds from opening that memory, with a question of 16 tokens, to the first answer token:
cold (the file's
         pages are dropped from the page cache first) and warm, against reading the whole text again
         with the fastest forward that stores nothing. Candidates: a session that keeps only its
         latest blocks (chunks of several sizes), and windows of 8 and 12 blocks in batches that
         attend to nothing outside themselves, each in float32 and, where the CPU is faster at it,
         bfloat16; a short stretch finds
         the fastest. Text is tokens already on that side; the model is loaded on both.
ingest   tokens a second into a new memory on disk, against the same chunks through the same session
without
         storage; both tokenise.
open     seconds to open a memory of 1 GB (random blocks), cold and warm. peak     peak resident
memory of a process that ingests a document of a quarter, one and four times the length. Medians; a
ratio is the median over repeats of the ratio within a repeat.

    python benchmarks/decode.py --text books-test.jsonl.zst --out results/decode.json
"""

import argparse
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import common
import numpy as np
import torch
from common import Books, interleaved, paired_ratio, table, timed, tokens_number, tokens_text

from memstore import LandmarkModel, MemoryStore
from memstore.devices import fast_dtype
from memstore.model.session import ScratchSession
from memstore.training.objectives import encode_windows

PARTS = ("decode", "first", "ingest", "open", "peak")
PROMPT = 32  # tokens before generation begins
QUESTION = 16


# decode


def generate(
    model: LandmarkModel,
    store: MemoryStore,
    documents: list[str],
    prompt: Sequence[int],
    tokens: int,
    *,
    seed: int = 0,
    cmt_cutoff: float | None = None,
) -> tuple[float, dict[str, int]]:
    """Tokens a second while `tokens` are generated after a prompt, and the lookups (token, head,
    layer) done and skipped.
    """
    with model.session(store, documents, cmt_cutoff=cmt_cutoff) as session:
        state = session.feed(list(prompt))[-1]
        before = (session.attention.lookups.done, session.attention.lookups.skipped)
        seconds, _ = timed(
            lambda: list(session.generate(state, tokens + 1, temperature=0.8, seed=seed))
        )
        after = session.attention.lookups
        return tokens / seconds, {
            "done": after.done - before[0],
            "skipped": after.skipped - before[1],
        }


def decode_part(
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


# first


def drop_cache(memory: Path) -> None:
    """Let the page cache forget a memory's file; nobody may have it open."""
    os.sync()
    file = os.open(memory / "data.mdb", os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def first_token(model: LandmarkModel, memory: Path, question: list[int], *, cold: bool) -> float:
    """Seconds from opening the memory to the first answer token."""
    if cold:
        drop_cache(memory)
    else:
        (memory / "data.mdb").read_bytes()
    began = time.perf_counter()
    with (
        MemoryStore.open(memory, model.signature, read_only=True) as store,
        model.session(store, ["book"]) as session,
    ):
        state = session.feed(question)[-1]
        session.next_token(state, 0.0, None)
        return time.perf_counter() - began


class Forgetful(ScratchSession):
    """A session that keeps only the blocks that the next chunk attends to: the chunked forward
    pass, with nothing stored.
    """

    def __init__(self, model: LandmarkModel, store: MemoryStore, chunk_blocks: int) -> None:
        settings = model.lookup.changed(chunk_blocks=chunk_blocks)
        super().__init__(model, settings, store, [], retrieve=False)
        self._most = settings.chunk_blocks + settings.top_k


def chunked_forward(model: LandmarkModel, ids: np.ndarray, chunk_blocks: int) -> None:
    """Read ids without storing anything."""
    with (
        MemoryStore.in_memory(model.signature) as store,
        Forgetful(model, store, chunk_blocks) as session,
    ):
        step = chunk_blocks * model.config.block_size
        for start in range(0, len(ids), step):
            session.feed(ids[start : start + step].tolist())


def windows_forward(model: LandmarkModel, ids: np.ndarray, blocks: int, batch: int) -> None:
    """Read ids as windows that attend to nothing outside themselves."""
    size = model.config.block_size
    whole = len(ids) // (blocks * size) * blocks * size
    content = torch.from_numpy(ids[:whole]).view(-1, blocks, size)
    landmarks = torch.full((len(content), blocks, 1), model.config.landmark_id)
    windows = torch.cat([content, landmarks], -1).flatten(1)
    with torch.inference_mode():
        for some in windows.split(batch):
            encode_windows(model.transformer, some)


def forwards(model: LandmarkModel) -> dict[str, Callable[[np.ndarray], None]]:
    """Every storage-free way to read a text."""
    ways: dict[str, Callable[[np.ndarray], None]] = {}
    for blocks in (8, 16):
        ways[f"chunks of {blocks}"] = partial(chunked_forward, model, chunk_blocks=blocks)
    for blocks in (8, 12):
        ways[f"windows of {blocks}"] = partial(windows_forward, model, blocks=blocks, batch=8)

    def in_bfloat16(way: Callable[[np.ndarray], None]) -> Callable[[np.ndarray], None]:
        def run(ids: np.ndarray) -> None:
            with torch.autocast("cpu", torch.bfloat16):
                way(ids)

        return run

    if fast_dtype() != torch.bfloat16:
        return ways  # slower here, and nobody's choice
    windows = {name: way for name, way in ways.items() if name.startswith("windows")}
    return ways | {f"{name}, bfloat16": in_bfloat16(way) for name, way in windows.items()}


def first_part(
    model: LandmarkModel, memory: Path, text: np.ndarray, options: argparse.Namespace
) -> dict[str, Any]:
    ways = forwards(model)
    trial = text[: min(len(text), 16 * 1024)]
    rates = {}
    for name, way in ways.items():
        way(trial[:2048])
        rates[name] = len(trial) / min(timed(partial(way, trial))[0] for _ in range(2))
    best = max(rates, key=lambda name: rates[name])
    question = model.tokenizer.encode(
        " What is the name of the old man who lives in the house near the river? It is"
    )
    question = question[-QUESTION:]
    first_token(model, memory, question, cold=False)  # warm up
    runs: dict[str, Callable[[int], float]] = {
        "cold": lambda _: first_token(model, memory, question, cold=True),
        "warm": lambda _: first_token(model, memory, question, cold=False),
    }
    measured = interleaved(runs, options.repeats)
    reading = [timed(lambda: ways[best](text))[0] for _ in range(2)]
    again = statistics.median(reading)
    return {
        "forward_tokens_per_second": rates,
        "fastest_forward": best,
        "read_again_seconds": again,
        **{
            name: {
                "seconds": statistics.median(values),
                "times_faster": again / statistics.median(values),
            }
            for name, values in measured.items()
        },
        "measured": measured | {"reading": reading},
    }


# ingest


def ingest_part(
    model: LandmarkModel, text: np.ndarray, directory: Path, options: argparse.Namespace
) -> dict[str, Any]:
    piece = text[: max(len(text) // 2, 4096)]
    written = model.tokenizer.decode(piece.tolist())

    def stored(repeat: int) -> float:
        path = directory / f"ingest {repeat} {time.monotonic_ns()}"
        with MemoryStore.create(path, model.signature) as store:
            seconds, _ = timed(lambda: model.ingest(written, store, name="book"))
        shutil.rmtree(path)
        return len(piece) / seconds

    def forgotten(repeat: int) -> float:
        def read() -> None:
            ids = [token for part in model.tokenizer.encode_stream([written]) for token in part]
            chunked_forward(model, np.asarray(ids), model.config.chunk_blocks)

        return len(piece) / timed(read)[0]

    runs = {"stored": stored, "not stored": forgotten}
    measured = interleaved(runs, max(3, options.repeats // 2 + 1))
    return {
        "tokens": len(piece),
        "tokens_per_second": {name: statistics.median(values) for name, values in measured.items()},
        "ratio": paired_ratio(measured["stored"], measured["not stored"]),
        "measured": measured,
    }


# open


def write_random_memory(model: LandmarkModel, memory: Path, size: int) -> int:
    """A memory of about `size` bytes of random blocks; its blocks."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    signature = model.signature
    n, dtype = 64, getattr(torch, config.kv_dtype)
    shape = (n, config.num_kv_heads, config.block_size, config.head_dim)
    k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    landmarks = torch.randn(shape[0], shape[1], shape[3], generator=generator).to(dtype)
    chunk_bytes = 2 * k.nbytes * len(signature.memory_layers)
    ids = np.random.default_rng(0).integers(0, config.landmark_id, n * config.block_size)
    settings = {"chunk_blocks": n, "top_k": config.top_k}
    with MemoryStore.create(memory, signature, codec="raw") as store:
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


def open_part(model: LandmarkModel, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    memory = directory / "large"
    size = round(options.open_gb * 1e9)
    blocks = write_random_memory(model, memory, size)

    def opened(cold: bool) -> float:
        if cold:
            drop_cache(memory)
        began = time.perf_counter()
        with MemoryStore.open(memory, model.signature, read_only=True):
            return time.perf_counter() - began

    opened(False)
    measured = interleaved(
        {"cold": lambda _: opened(True), "warm": lambda _: opened(False)}, options.repeats
    )
    size = (memory / "data.mdb").stat().st_size
    shutil.rmtree(memory)
    return {
        "bytes": size,
        "blocks": blocks,
        "seconds": {name: statistics.median(values) for name, values in measured.items()},
        "measured": measured,
    }


# peak


def ingest_and_weigh(
    model_path: str | None, text: Path, memory: Path, threads: int
) -> dict[str, int]:
    """In a process of its own: peak resident bytes before and after ingesting a file."""
    common.prepare(threads)
    model = common.load_model(model_path)
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
        status = Path("/proc/self/status").read_text()
        return next(
            int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")
        )
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_part(
    model: LandmarkModel, books: Books, tokens: int, directory: Path, options: argparse.Namespace
) -> list[dict[str, Any]]:
    found = []
    for times in (0.25, 1, 4):
        length = round(tokens * times)
        path = directory / f"text {times}.txt"
        path.write_text(
            model.tokenizer.decode(books.run(Random("peak"), length).tolist()), encoding="utf-8"
        )
        memory = directory / f"peak {times}"
        row = common.in_fresh_process(
            ingest_and_weigh, options.model, path, memory, options.threads
        )
        found.append(row | {"file_bytes": (memory / "data.mdb").stat().st_size})
        shutil.rmtree(memory)
    return found


def build_memory(model: LandmarkModel, memory: Path, text: np.ndarray) -> None:
    """Ingest the text as the document "book"."""
    with MemoryStore.create(memory, model.signature) as store:
        model.ingest(model.tokenizer.decode(text.tolist()), store, name="book")


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--memory-tokens", default="128K")
    parser.add_argument("--tokens", type=int, default=200, help="generated in every repeat")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--open-gb", type=float, default=1.0)
    options = parser.parse_args()
    model = common.load(options)
    length = tokens_number(options.memory_tokens)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="memstore-decode-", dir=options.work) as temporary:
        directory = Path(temporary)
        books = Books.read(options.text, model.tokenizer, directory / "tokens")
        text = books.run(Random(f"memory {options.seed}"), length)
        memory = directory / "memory"
        seconds, _ = timed(lambda: build_memory(model, memory, text))
        print(f"memory of {tokens_text(length)} tokens, read in {seconds:.1f} s\n", flush=True)
        parts: dict[str, Callable[[], Any]] = {
            "decode": lambda: decode_part(model, memory, books, options),
            "first": lambda: first_part(model, memory, text, options),
            "ingest": lambda: ingest_part(model, text, directory, options),
            "open": lambda: open_part(model, directory, options),
            "peak": lambda: peak_part(model, books, length, directory, options),
        }
        for name in options.parts:
            results[name] = parts[name]()
            print(
                "\n".join(" ".join(map(str, line)) for line in lines(name, results[name], length)),
                flush=True,
            )
    print(
        "\n"
        + table(
            ["what", "measured", "ratio"],
            [r for name in options.parts for r in lines(name, results[name], length)],
        )
    )
    common.write_results(options, model, results)
    common.plot(options, lambda figure: draw(figure, results), (6, 3))


def lines(name: str, found: Any, length: int) -> list[list[str]]:
    """Rows of the table."""
    size = tokens_text(length)
    if name in ("decode", "ingest"):
        rates, ratio = found["tokens_per_second"], found["ratio"]
        what = f"generating from {size} tokens of memory" if name == "decode" else "ingest"
        against = "no memory" if name == "decode" else "the same forward, not stored"
        first, second = rates.values()
        spread = f"{ratio['median']:.2f} ({ratio['least']:.2f}-{ratio['greatest']:.2f})"
        return [[f"{what} / {against}", f"{first:,.0f} / {second:,.0f} tokens/s", spread]]
    if name == "first":
        again = found["read_again_seconds"]
        return [
            [
                f"first answer token from {size} tokens on disk, {kind} / reading again "
                f"({found['fastest_forward']})",
                f"{found[kind]['seconds'] * 1000:.0f} ms / {again:.1f} s",
                f"{found[kind]['times_faster']:.0f}x faster",
            ]
            for kind in ("cold", "warm")
        ]
    if name == "open":
        seconds = found["seconds"]
        return [
            [f"opening {found['bytes'] / 1e9:.2f} GB, {kind}", f"{seconds[kind] * 1000:.0f} ms", ""]
            for kind in seconds
        ]
    return [
        [
            f"peak memory while ingesting {row['tokens']:,} tokens ({row['file_bytes'] / 1e6:.0f} "
            "MB on disk)",
            f"{row['peak'] / 1e6:.0f} MB, {(row['peak'] - row['before']) / 1e6:.0f} above a short "
            "text",
            f"landmarks {row['landmarks'] / 1e6:.1f} MB",
        ]
        for row in found
    ]


def draw(figure: Any, results: dict[str, Any]) -> None:
    """Ratios as bars."""
    axes = figure.subplots()
    bars = {
        "decode: memory / none": results.get("decode", {}).get("ratio", {}).get("median"),
        "ingest: stored / not stored": results.get("ingest", {}).get("ratio", {}).get("median"),
        "first token, cold: x100 faster": results.get("first", {})
        .get("cold", {})
        .get("times_faster", 0)
        / 100
        or None,
        "first token, warm: x100 faster": results.get("first", {})
        .get("warm", {})
        .get("times_faster", 0)
        / 100
        or None,
    }
    shown = {name: value for name, value in bars.items() if value is not None}
    axes.barh(list(shown), list(shown.values()))
    axes.axvline(1, color="black", linewidth=0.8)


if __name__ == "__main__":
    main()
