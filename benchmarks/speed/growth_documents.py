"""A memory of many documents: what `growth` measures of the model that ships."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speed.growth_limits import Machine, measured
from benchmarks.speed.growth_models import Asked, opening, tokens_through
from benchmarks.speed.growth_weights import Weights, loaded
from memstore import MemoryStore
from memstore.block import RecordKey
from memstore.disk.format.document import Document
from memstore.disk.format.runs import KeyRun
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.catalog import Catalog

NAME = "books-1m"
A_TIME = 500  # documents of a transaction


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
            catalog.texts.put_tokens(txn, number, 0, 0, chance.integers(0, 1000, size))
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
        question = tokens_through(reader, asked.first_token)
        works = {"ask": asked.first_token, "list": store.documents, **machine.works}
        seconds: dict[str, Any] = dict(measured(works, options.repeats))
    fresh = opening(NAME, path, options.repeats)
    limits = machine.limits(seconds) | disk
    shape = reader.shape
    index = len(shape.memory_layers) * count * shape.num_kv_heads * shape.head_dim * 4
    products = 2 * weights.layers * question / limits["flop_per_second"]
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
