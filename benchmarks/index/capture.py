"""Capture landmark keys and queries of a model from books, for the benchmarks of the index.

Keys: windows of 8 blocks, as long as a chunk of an ingest, go through the model by grouped-softmax
attention; their landmark keys are stored as an ingest stores them, in the KV dtype and rotated by
their offset only. (Those of an ingest have seen up to 4 blocks before the chunk as well.) Queries:
sessions that remember a stretch of books read other text, and questions for what nobody told them;
of every lookup that the context miss gate lets through, the query is kept as the index gets it:
scaled, and rotated to the fixed distance of old blocks.

    python -m benchmarks.index.capture --to landmarks/ --text books-train-*.jsonl.zst \\
        --query-text books-val.jsonl.zst

Continues where it was interrupted.
"""

import argparse
import time
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.common.needle_writer import Writer
from benchmarks.common.options import add, load, parser
from benchmarks.common.text import Books
from memstore import LandmarkModel, MemoryStore
from memstore.devices import fast_dtype
from memstore.kernels.api import grouped_softmax_attention
from memstore.training.corpus import TokenCorpus

BLOCKS = 8  # of a window
BATCH = 16  # windows


def landmark_keys(model: LandmarkModel, content: Tensor) -> dict[int, Tensor]:
    """Landmark keys [W * n, Hkv, D] of every memory layer; content: int64 [W, n * block_size],
    windows of text.
    """
    config, rope = model.config, model.transformer.rope
    size, layers = config.block_size, config.memory_layers or ()
    blocks = content.view(len(content), -1, size)
    landmarks = torch.full((*blocks.shape[:2], 1), config.landmark_id)
    positions = torch.arange(blocks.shape[1] * config.shape.stride)
    cmt_keys = model.cmt_keys
    found: dict[int, Tensor] = {}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in layers:
            # (W * n, Hkv, D)
            at_landmarks = k[:, :, size :: config.shape.stride].transpose(1, 2).flatten(0, 1)
            found[layer] = rope(at_landmarks.float(), torch.tensor(size))
        if layer == max(layers):
            return torch.zeros_like(q)  # what comes after the last keys is nobody's
        k_cmt = None if cmt_keys is None else cmt_keys[layer]
        q, k = rope(q * config.head_dim**-0.5, positions), rope(k, positions)
        return grouped_softmax_attention(q, k, v, size, k_cmt=k_cmt)

    half = fast_dtype() == torch.bfloat16
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=half):
        model.transformer.hidden(torch.cat([blocks, landmarks], -1).flatten(1), attend)
    return found


def capture_keys(model: LandmarkModel, tokens: np.ndarray, count: int, directory: Path) -> None:
    """Write the landmark keys of `count` blocks of consecutive text, a file a memory layer."""
    config = model.config
    shape = (count, config.num_kv_heads, config.head_dim)
    done_file = directory / "done.txt"
    done = int(done_file.read_text()) if done_file.exists() else 0
    mode: Any = "r+" if done else "w+"
    files = {
        layer: np.lib.format.open_memmap(
            directory / f"keys-{layer}.npy", mode=mode, dtype=config.kv_dtype, shape=shape
        )
        for layer in config.memory_layers or ()
    }
    began, first = time.perf_counter(), done
    while done < count:
        text = tokens[
            done * config.block_size : (done + BATCH * BLOCKS) * config.block_size
        ].astype(np.int64)
        keys = landmark_keys(model, torch.from_numpy(text).view(BATCH, -1))
        take = min(BATCH * BLOCKS, count - done)
        for layer, file in files.items():
            file[done : done + take] = keys[layer][:take].numpy()
        done += take
        if done // (BATCH * BLOCKS) % 256 == 0 or done == count:
            for file in files.values():
                file.flush()
            done_file.write_text(str(done))
            rate = (done - first) / (time.perf_counter() - began)
            print(f"{done:,} of {count:,} landmarks, {rate:,.0f} a second", flush=True)


def lookups(
    model: LandmarkModel, books: Books, rng: Random, *, memory: int, turns: int
) -> list[tuple[int, int, Tensor]]:
    """(layer, head, queries [n, D]) of every step of a session that remembers `memory` tokens.

    It reads, `turns` times, 256 tokens of a book and a question about something it never read.
    """
    group = model.config.num_heads // model.config.num_kv_heads
    writer = Writer(model.tokenizer, books, rng)
    found: list[tuple[int, int, Tensor]] = []

    with MemoryStore.in_memory(model.signature) as store, model.session(store, []) as session:
        session.feed(books.place(rng, memory).tolist())
        search = store.retrieval.index.search

        def noted(layer: int, q: Tensor, *arguments: Any, **options: Any) -> Any:
            for head, rows in enumerate(options["open_rows"]):  # those whose gate is open
                found.append((layer, head // group, q[head, rows].clone()))
            return search(layer, q, *arguments, **options)

        with patch.object(store.retrieval.index, "search", noted):
            for _ in range(turns):
                session.feed(books.place(rng, 256).tolist())
                session.feed(model.tokenizer.encode(" " + writer.ask(writer.fact()).prompt))
    return found


def capture_queries(
    model: LandmarkModel, books: Books, sessions: int, rng: Random, directory: Path
) -> None:
    """Write the queries of every (memory layer, KV head); heads whose gate opens rarely have
    few.
    """
    config = model.config
    held: dict[tuple[int, int], list[Tensor]] = {
        (layer, head): []
        for layer in config.memory_layers or ()
        for head in range(config.num_kv_heads)
    }
    for session in range(sessions):
        for layer, head, queries in lookups(model, books, rng, memory=16_384, turns=10):
            held[layer, head].append(queries)
        counts = sorted(sum(map(len, queries)) for queries in held.values())
        print(
            f"session {session + 1} of {sessions}: {counts[0]:,} to {counts[-1]:,} queries a head",
            flush=True,
        )
    arrays: dict[str, Any] = {
        f"{layer}-{head}": torch.cat(x).numpy() for (layer, head), x in held.items() if x
    }
    np.savez(directory / "queries.npz", **arrays)


def main() -> None:
    options = read_options()
    model = load(options)
    options.to.mkdir(parents=True, exist_ok=True)
    if not (options.to / "queries.npz").exists():
        books = Books.read(options.query_text, model.tokenizer, options.work or options.to)
        capture_queries(model, books, options.sessions, Random(options.seed), options.to)
    tokens = TokenCorpus.build(options.text, model.tokenizer, options.work or options.to).tokens
    needed = (options.landmarks + BATCH * BLOCKS) * model.config.block_size
    if len(tokens) < needed:
        raise SystemExit(
            f"{options.landmarks:,} landmarks need {needed:,} tokens of text, there are "
            f"{len(tokens):,}"
        )
    capture_keys(model, tokens, options.landmarks, options.to)


def read_options() -> argparse.Namespace:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--query-text", nargs="+", required=True, help="files that queries come from; other books"
    )
    add(arguments, "--landmarks", 1 << 20, "blocks whose landmark keys are captured", type=int)
    add(arguments, "--sessions", 20, "sessions that queries are taken from")
    arguments.add_argument("--to", type=Path, required=True, help="directory for what is captured")
    return arguments.parse_args()


if __name__ == "__main__":
    main()
