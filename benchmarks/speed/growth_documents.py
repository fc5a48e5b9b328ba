"""A memory of many documents, and many readers of one: what `growth` measures of the model that
ships.
"""

import multiprocessing
import random
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.options import prepare
from benchmarks.common.timing import end_with_parent
from benchmarks.speed.growth_limits import Machine, measured, resident
from benchmarks.speed.growth_models import Asked, Weights, loaded, opening, question_tokens
from memstore import MemoryStore
from memstore.block import RecordKey
from memstore.disk.format.document import Document
from memstore.disk.format.runs import KeyRun
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.catalog import Catalog

NAME = "books-1m"
A_TIME = 500  # documents of a transaction
WORDS = ("barn", "mare", "ferry", "bridge", "river", "gate", "soup", "shepherd")
ANSWER = 8  # tokens


def fill(path: Path, reader: Any, documents: int) -> None:
    """A memory with so many documents of one block: random landmark keys, all values 0."""
    signature, shape = reader.signature, reader.shape
    catalog = Catalog.create(path, signature, codec=reader.codec)
    chance = np.random.default_rng(0)
    heads, size, dim = shape.num_kv_heads, shape.block_size, shape.head_dim
    bits = np.zeros((1, heads, size, dim), dtype="<i2")

    def work(txn: Transaction, count: int) -> None:
        for _ in range(count):
            number = catalog.new_document_id(txn)
            row = Document(number, f"document {number}", "ready", size, 1).begin_write(0)
            keys = chance.normal(size=(1, heads, dim)).astype("<f2").view("<i2")
            total = 0
            for layer in range(shape.num_layers):
                key = RecordKey(number, 0, layer)
                (record,) = catalog.blocks.encode(key, bits, bits, [size], row.writes[0].id)
                catalog.blocks.put(txn, key, record)
                total += len(record)
                if layer in shape.memory_layers:
                    catalog.runs.put(txn, number, layer, KeyRun(0, keys))
            catalog.put_tokens(txn, number, 0, 0, chance.integers(0, 1000, size))
            catalog.put_document(txn, replace(row, bytes=total))

    for first in range(0, documents, A_TIME):
        catalog.database.write(partial(work, count=min(A_TIME, documents - first)))
    catalog.close()


def of_documents(path: Path, count: int, options: Any, disk: dict[str, float]) -> dict[str, Any]:
    """A point: opening, listing and asking a memory of so many documents."""
    reader: Any = loaded(NAME)
    fill(path, reader, count)
    weights = Weights(reader)
    machine = Machine(weights.width, weights.inner, weights.dtype)
    with MemoryStore.open(path, reader.signature, read_only=True) as store:
        asked = Asked(reader, store, 0)
        works = {"ask": asked.first_token, "list": store.documents, **machine.works}
        seconds: dict[str, Any] = dict(measured(works, options.repeats))
    fresh = opening(NAME, path, options.repeats)
    limits = machine.limits(seconds) | disk
    shape = reader.shape
    index = len(shape.memory_layers) * count * shape.num_kv_heads * shape.head_dim * 4
    products = 2 * weights.layers * question_tokens(reader) / limits["flop_per_second"]
    floor = max(products, weights.generating / limits["bytes_per_second"])
    floor += index / limits["bytes_per_second"]
    cold = fresh["cold"]
    return {
        "x": count,
        "documents": count,
        "index_bytes": index,
        "file_bytes": (path / "data.mdb").stat().st_blocks * 512,
        "seconds": seconds,
        "opening": fresh,
        "limits": limits,
        "shares": {
            "ask": floor / seconds["ask"]["core"],
            "cold": cold["from_disk"] / disk["disk_read"] / (cold["open"] + cold["list"]),
        },
    }


def _read(path: Path, seconds: float, seed: int, barrier: Any, until: Any, told: Any) -> None:
    """A reader in a process of its own: asks until the time is over, and tells what it took."""
    end_with_parent()
    prepare(1)
    reader: Any = loaded(NAME)
    chance, latencies = random.Random(seed), list[float]()
    with MemoryStore.open(path, reader.signature, read_only=True) as store:

        def ask() -> float:
            question = f"What is the price of the {chance.choice(WORDS)} {chance.randrange(99)}?"
            began = time.perf_counter()
            reader.ask(question, store, max_new_tokens=ANSWER)
            return time.perf_counter() - began

        for _ in range(5):
            ask()
        barrier.wait()
        began, busy = time.perf_counter(), time.process_time()
        while time.perf_counter() - began < seconds:
            latencies.append(ask())
        took = time.perf_counter() - began
        told.put(
            {
                "latencies": latencies,
                "clock": took,
                "core": time.process_time() - busy,
                **resident(),
            }
        )
        until.wait()  # what it shares with others is counted while they are there


def of_readers(path: Path, count: int, options: Any) -> dict[str, Any]:
    """A point: so many processes that ask one memory at once."""
    context = multiprocessing.get_context("spawn")
    barrier, until, told = context.Barrier(count), context.Barrier(count), context.Queue()
    processes = [
        context.Process(
            target=_read, args=(path, options.seconds, seed, barrier, until, told), daemon=True
        )
        for seed in range(count)
    ]
    for process in processes:
        process.start()
    found = [told.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    latencies = sorted(one for of in found for one in of["latencies"])
    clock = statistics.median(of["clock"] for of in found)
    core = sum(of["core"] for of in found)
    return {
        "x": count,
        "readers": count,
        "questions": len(latencies),
        "questions_per_second": len(latencies) / clock,
        "core_per_question": core / len(latencies),
        "cores_had": core / clock,
        "latency": {
            "median": statistics.median(latencies),
            "99%": latencies[int(0.99 * (len(latencies) - 1))],
        },
        "resident": statistics.median(of["resident"] for of in found),
        "own_part": statistics.median(of["own_part"] for of in found),
    }
