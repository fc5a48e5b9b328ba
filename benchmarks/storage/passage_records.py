"""Should a record hold one layer of a passage, or all of them?

Two memories of the same random passages (whole SmolLM2's shape: 30 layers, 3 KV heads of 64, slots
of 128 tokens): one with a record a layer, and one whose records have the heads of all layers, as if
they were heads of one, which is the same code on the same bytes. A few passages, drawn anew, are
read into slots with all layers; cold: the file's pages are dropped first, and the tree's pages of
keys are read again. Measurements are taken in turns: medians, ratios within a repeat.

    python -m benchmarks.storage.passage_records
"""

import argparse
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from benchmarks.common.memories import data_file, drop_cache, fill_cache, workplace
from benchmarks.common.options import add, plain_parser, prepare
from benchmarks.common.results import write_part
from benchmarks.common.tables import spread, table
from benchmarks.common.timing import interleaved, paired_ratio
from memstore.block import BlockKey, RecordKey
from memstore.disk.format.document import Document
from memstore.disk.format.keys import record_key
from memstore.disk.format.signature import Signature
from memstore.disk.tables.catalog import Catalog
from memstore.tiers.disk_tier import DiskTier

LAYERS, HEADS, DIM, BLOCK = 30, 3, 64, 128
FEWEST, MOST = 36, 64  # tokens of a passage
KEPT = ("a layer", "all layers")  # what a record holds


@dataclass
class Memory:
    """One of the two."""

    path: Path
    layers: int
    heads: int

    def units(self, passages: list[int]) -> list[BlockKey]:
        keys = product(passages, range(self.layers), range(self.heads))
        return [BlockKey(1, layer, block, head) for block, layer, head in keys]


def write_memory(memory: Memory, codec: str, passages: int, seed: int) -> None:
    signature = Signature(
        "random", "random", {}, "bfloat16", memory.layers, tuple(range(memory.layers)),
        memory.heads, DIM, BLOCK,
    )  # fmt: skip
    random = np.random.default_rng(seed)
    catalog = Catalog.create(memory.path, signature, codec=codec)
    row = Document(1, "passages", "ready")
    row = row.begin_write(0)
    for first in range(0, passages, 16):
        count = min(16, passages - first)
        lengths = [int(n) for n in random.integers(FEWEST, MOST + 1, count)]
        x = random.standard_normal((2, LAYERS, count, HEADS, BLOCK, DIM), dtype=np.float32)
        bits = (x.view(np.uint32) >> 16).astype(np.uint16).view(np.int16)
        if memory.layers == 1:  # [2, 1, count, LAYERS * HEADS, BLOCK, DIM]
            bits = bits.transpose(0, 2, 1, 3, 4, 5).reshape(2, 1, count, -1, BLOCK, DIM)
        records = {
            (first + at, layer): record
            for layer in range(memory.layers)
            for at, record in enumerate(
                catalog.blocks.encode(
                    RecordKey(1, first, layer), bits[0, layer], bits[1, layer], lengths,
                    row.writes[0].id,
                )
            )
        }  # fmt: skip

        def put(txn: Any, records: dict[tuple[int, int], bytes] = records) -> None:
            for (block, layer), record in sorted(records.items()):
                catalog.blocks.put(txn, RecordKey(1, block, layer), record)

        catalog.database.write(put)
    catalog.database.write(lambda txn: catalog.put_document(txn, replace(row, blocks=passages)))
    catalog.close()


def milliseconds(memory: Memory, passages: list[int], total: int, slab: torch.Tensor) -> float:
    """One read, of a file that was opened for it."""
    catalog = Catalog.open(memory.path, read_only=True)
    tier = DiskTier(catalog)
    try:
        keys = [
            record_key(RecordKey(1, block, layer))
            for block in range(total)
            for layer in range(memory.layers)
        ]
        with catalog.database.read() as txn:
            txn.extents_of("blocks", keys)  # the pages of keys
        units = memory.units(passages)
        began = time.perf_counter()
        tier.read(units, slab, range(len(units)))
        return 1000 * (time.perf_counter() - began)
    finally:
        tier.close()
        catalog.close()


def measure(directory: Path, codec: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    memories = {
        "a layer": Memory(directory / f"{codec}-one", LAYERS, HEADS),
        "all layers": Memory(directory / f"{codec}-all", 1, LAYERS * HEADS),
    }
    for memory in memories.values():
        write_memory(memory, codec, options.passages, options.seed)
    most = max(options.at_once)
    slab = torch.zeros(most * LAYERS * HEADS, 2, BLOCK, DIM, dtype=torch.bfloat16)
    random = Random(options.seed)
    rows = []
    for count, cold in product(options.at_once, (True, False)):
        drawn = [random.sample(range(options.passages), count) for _ in range(options.repeats)]

        def run(
            turn: int, memory: Memory, cold: bool = cold, drawn: list[list[int]] = drawn
        ) -> float:
            (drop_cache if cold else fill_cache)(memory.path)
            return milliseconds(memory, drawn[turn], options.passages, slab)

        runs = {name: partial(run, memory=memory) for name, memory in memories.items()}
        found = interleaved(runs, options.repeats)
        rows.append(
            {
                "codec": codec,
                "passages": count,
                "cache": "cold" if cold else "warm",
                **{name: statistics.median(found[name]) for name in KEPT},
                "ratio": paired_ratio(found["a layer"], found["all layers"]),
                "bytes": {name: data_file(m.path).stat().st_size for name, m in memories.items()},
            }
        )
    return rows


def main() -> None:
    arguments = plain_parser(__doc__)
    add(arguments, "--work", None, "where memories are made (default: temporary)", type=Path)
    add(arguments, "--passages", 240, "that a memory holds")
    arguments.add_argument("--at-once", type=int, nargs="+", default=[1, 2, 4, 8])
    arguments.add_argument("--codecs", nargs="+", default=["raw", "zstd", "int8"])
    add(arguments, "--repeats", 9)
    options = arguments.parse_args()
    prepare(options.threads)
    with workplace(options) as directory:
        found = [row for codec in options.codecs for row in measure(directory, codec, options)]
    lines = [
        [row["codec"], row["passages"], row["cache"], *(f"{row[name]:.1f} ms" for name in KEPT),
         spread(row["ratio"])]
        for row in found
    ]  # fmt: skip
    print(table(["codec", "passages", "cache", *KEPT, "ratio"], lines))
    write_part(options, "passage_records", found)


if __name__ == "__main__":
    main()
