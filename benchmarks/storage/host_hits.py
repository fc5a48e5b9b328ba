"""What does a hit in the host tier cost?

A lease on 32 units that the host tier holds; nothing is copied. Median of the repeats.

    python -m benchmarks.storage.host_hits
"""

import argparse
import random
import statistics
import time
from typing import Any

import torch

from benchmarks.common.options import add, plain_parser
from benchmarks.common.results import write_part
from benchmarks.common.tables import table
from benchmarks.storage.records import BATCH, SHAPES, Shape, begin, number
from memstore import MemoryStore
from memstore.block import BlockKey


def measure(shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """One row: a shape's units, leased in batches of 32 that the host tier holds."""
    signature = shape.signature
    blocks = max(BATCH, 2048 // shape.heads)
    with (
        MemoryStore.in_memory(signature, host_budget=2 * blocks * shape.record) as store,
        store.retrieval.session_document() as scratch,
    ):
        for _ in range(blocks):
            k, v = torch.zeros(2, 1, shape.heads, shape.rows, shape.dim, dtype=torch.float16)
            scratch.add(0, k, v, torch.zeros(1, shape.heads, shape.dim, dtype=torch.float16))
        every = [
            BlockKey(scratch.document, 0, block, head)
            for block in range(blocks)
            for head in range(shape.heads)
        ]

        def once(_: int) -> float:
            batches = [random.sample(every, BATCH) for _ in range(200)]
            began = time.perf_counter()
            for units in batches:
                with store.lease(units):
                    pass
            return (time.perf_counter() - began) / (len(batches) * BATCH) * 1e6

        once(0)
        times = [once(repeat) for repeat in range(options.repeats)]
    return {
        "record": shape.name,
        "microseconds_a_unit": statistics.median(times),
        "least": min(times),
    }


def main() -> None:
    arguments = plain_parser(__doc__)
    add(arguments, "--repeats", 7)
    options = arguments.parse_args()
    begin(options)
    rows = [measure(shape, options) for shape in SHAPES]
    lines = [
        [row["record"], number(row["microseconds_a_unit"]), number(row["least"])] for row in rows
    ]
    print(table(["record", "µs a unit", "least"], lines))
    write_part(options, "host", rows)


if __name__ == "__main__":
    main()
