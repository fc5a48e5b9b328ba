"""What is measured of the memories that are compared: perplexity by the length of the past, recall,
and cost. All of it is stored with each model.
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.baselines.reading import BaselineModel
from benchmarks.common.needle_memory import ask, ask_streamed, build
from benchmarks.common.needles import Plan
from benchmarks.common.reading import TARGETS
from benchmarks.paper.measures import Bench, Losses, Measured
from benchmarks.paper.runs import Run
from benchmarks.paper.scoring import NUMBER, Way, score
from memstore import MemoryStore

TASKS = ("passkey", "fact", "of_20")
_PASSAGE = 256  # tokens around a needle
_CHUNKS = 4  # that are timed
SLOW = 1 << 17  # longest past that a memorizing model is timed behind: every token is searched

Losses_ = list[Losses]  # one a seed


def by_past(bench: Bench, runs: Sequence[Run], pasts: Sequence[int]) -> dict[str, list[Losses_]]:
    """By memory, of every length of the past: the same 256 tokens, after so many."""
    reach = max(pasts) + TARGETS
    return {
        run.memory: [bench.by_seed(run, Way(), past + TARGETS, reach=reach) for past in pasts]
        for run in runs
    }


def trials_of(length: int, most: int, tokens: int) -> int:
    """Questions that are asked at a length: as many as read `tokens` in all, 5 at least."""
    return max(5, min(most, tokens // length))


def recall(bench: Bench, run: Run, length: int, trials: int) -> list[dict[str, Any]]:
    """A row a task: the same questions for every model, needles in the same texts."""
    measured, options = bench.measured(run), bench.options
    settings = {"length": length, "trials": trials, "seed": options.seed, "tasks": list(TASKS)}

    def compute() -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory(prefix="memstore-benchmark-") as work:
            return _ask_all(measured, Path(work), settings, options.threads)

    rows: list[dict[str, Any]] = measured.kept("recall", settings, compute)
    return rows


def _ask_all(
    measured: Measured, work: Path, settings: dict[str, Any], threads: int
) -> list[dict[str, Any]]:
    length, trials, seed = settings["length"], settings["trials"], settings["seed"]
    _ = measured.books  # or: texts are missing
    about: dict[str, Any] = {
        "model": str(measured.directory),
        "text": [str(path) for path in measured.texts],
    }
    about |= {"threads": threads, "seed": seed, "trials": trials, "tasks": sorted(TASKS)}
    build(work, about | {"longest": length, "passage": _PASSAGE})
    model, given = measured.model, {"trials": trials, "seed": seed}
    if isinstance(model, BaselineModel):
        rows = [ask_streamed(model, work, task, length, **given) for task in TASKS]
    else:
        plan = Plan.load(work)
        assert plan is not None
        with MemoryStore.open(work / "memory", model.signature, read_only=True) as store:
            rows = [ask(model, store, plan, task, length, **given) for task in TASKS]
    kept = ("task", "length", "trials", "right", "seconds")
    return [{name: row[name] for name in kept} for row in rows if row is not None]


def cost(bench: Bench, run: Run, past: int) -> dict[str, float]:
    """What reading costs behind `past` tokens, a multiple of a chunk: tokens a second (of the
    CPU's time) over four chunks and over the whole past, bytes of the state, bytes of it that a
    token reads, and bytes of keys that are searched for it; at two bytes a number.
    """
    measured = bench.measured(run)

    def compute() -> dict[str, float]:
        model = measured.model
        shape = model.shape
        chunk = model.lookup.chunk_blocks * shape.block_size
        ids = measured.books.run(Random(f"cost {bench.options.seed}"), past + _CHUNKS * chunk + 1)
        began = time.process_time()
        found = score(model, Way(), ids, past + 1)
        before = time.process_time() - began - found.seconds
        values = shape.head_dim * NUMBER
        remembered = found.attended - (chunk + 1) / 2
        read, searched = float(found.state), 0.0
        if isinstance(model, BaselineModel):
            memory = model.transformer.memory_config
            if memory.kind == "memorizing":
                cached = shape.num_layers * (memory.cache or 0) * shape.hidden_size * NUMBER
                tokens = min(past, memory.tokens or past)
                read = cached + min(memory.top_k, tokens) * shape.num_heads * 2 * values
                searched = float(tokens * shape.num_kv_heads * values)
        else:
            read = remembered * shape.num_layers * shape.num_heads * 2 * values
            keys = past // shape.block_size * shape.num_kv_heads
            searched = float(keys * len(shape.memory_layers) * values)
        return {
            "past": past,
            "tokens_per_second": _CHUNKS * chunk / found.seconds,
            "whole": past / before,
            "state": float(found.state),
            "read": read,
            "searched": searched,
        }

    settings = {"past": past, "chunks": _CHUNKS, "seed": bench.options.seed}
    found: dict[str, float] = measured.kept("cost", settings, compute)
    return found


def matrix(every: Losses_) -> np.ndarray:
    """Losses [seeds, texts]."""
    return np.stack([one.values for one in every])
