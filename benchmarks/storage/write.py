"""What does writing documents cost, beyond writing as many bytes in a row?

A document written through MemoryStore.write_document, and records through BlockTable.put alone,
every commit synced. Beside them: as many bytes of one file written in a row and synced as often.

Fresh random bytes, codec raw, records of three sizes. Measurements are taken in turns: medians of
all repeats, ratios within a repeat.

    python -m benchmarks.storage.write
"""

import argparse
import os
import random
import shutil
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.memories import workplace
from benchmarks.common.results import write_part
from benchmarks.common.tables import spread, table
from benchmarks.common.timing import interleaved, paired_ratio
from benchmarks.storage.records import (
    CHUNK_BLOCKS,
    SHAPES,
    Memory,
    Shape,
    begin,
    gigabytes,
    number,
    random_tensor,
    reading_parser,
)
from memstore import MemoryStore
from memstore.disk.format.document import IngestSettings
from memstore.store.write.writer import COMMIT_BYTES


def measure(work: Path, shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """One row: a shape, in new memories."""
    size = min(options.megabytes << 20, 128 << 20)
    signature = shape.signature
    n = max(1, size // (shape.record * CHUNK_BLOCKS))  # chunks
    size = n * shape.record * CHUNK_BLOCKS
    kinds = 1 + (64 << 20) // (shape.record * CHUNK_BLOCKS)
    chunks = [
        random_tensor(2, CHUNK_BLOCKS, shape.heads, shape.rows, shape.dim)
        for _ in range(min(n, kinds))
    ]
    landmarks = random_tensor(CHUNK_BLOCKS, shape.heads, shape.dim)
    ids = np.arange(CHUNK_BLOCKS * shape.rows)
    noise = memoryview(random.randbytes(COMMIT_BYTES))
    place = work / "ingest"

    def store(_: int) -> float:
        shutil.rmtree(place, ignore_errors=True)
        with MemoryStore.create(place, signature, codec="raw", host_budget=256 << 20) as store:

            def run() -> None:
                settings = IngestSettings(chunk_blocks=CHUNK_BLOCKS, top_k=4)
                writer = store.write_document("noise", source_hash="1", settings=settings)
                assert writer is not None
                with writer:
                    for number in range(n):
                        k, v = chunks[number % len(chunks)]
                        writer.add_chunk(ids, 0, {0: (k, v, landmarks)})
                    writer.finish()

            return gigabytes(size, run)

    def tier(_: int) -> float:
        shutil.rmtree(place, ignore_errors=True)
        memory = Memory(place, shape)
        blocks = [
            (k[i], v[i])
            for k, v in chunks[: max(1, COMMIT_BYTES // (shape.record * CHUNK_BLOCKS))]
            for i in range(CHUNK_BLOCKS)
        ]
        rate = gigabytes(size, lambda: memory.write(size, blocks))
        memory.close()
        return rate

    def device(_: int) -> float:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        file = os.open(place / "file", os.O_WRONLY | os.O_CREAT)

        def run() -> None:
            for start in range(0, size, COMMIT_BYTES):
                os.write(file, noise[: min(COMMIT_BYTES, size - start)])
                os.fdatasync(file)

        rate = gigabytes(size, run)
        os.close(file)
        return rate

    runs = {"store": store, "tier": tier, "device": device}
    for run in runs.values():
        run(0)
    found = interleaved(runs, options.repeats)
    shutil.rmtree(place, ignore_errors=True)
    return {
        "record": shape.name,
        **{f"{name}_gb_s": statistics.median(rates) for name, rates in found.items()},
        "store_to_device": paired_ratio(found["store"], found["device"]),
        "tier_to_device": paired_ratio(found["tier"], found["device"]),
    }


def main() -> None:
    options = reading_parser(__doc__).parse_args()
    begin(options)
    rows = []
    with workplace(options) as directory:
        for shape in SHAPES:
            rows.append(measure(directory, shape, options))
            print(f"{shape.name} measured", flush=True)
    head = ["record", "write_document", "BlockTable.put", "device", "document : device"]
    lines = [
        [
            row["record"],
            *(number(row[f"{name}_gb_s"]) for name in ("store", "tier", "device")),
            spread(row["store_to_device"]),
            spread(row["tier_to_device"]),
        ]
        for row in rows
    ]
    print(f"\nA commit every {COMMIT_BYTES >> 20} MB, each synced (GB/s)\n")
    print(table([*head, "tier : device"], lines))
    write_part(options, "ingest", rows)


if __name__ == "__main__":
    main()
