"""How long does opening a large memory take, cold and warm?

The memory holds random blocks. Cold: the file's pages are dropped from the page cache first.
Medians.

    python -m benchmarks.speed.opening --gigabytes 1
"""

import argparse
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.memories import data_file, drop_cache, workplace
from benchmarks.common.options import add, load, plain_parser
from benchmarks.common.results import write_part
from benchmarks.common.tables import table
from benchmarks.common.timing import interleaved
from memstore import LandmarkModel, MemoryStore
from memstore.disk.format.document import IngestSettings


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
    settings = IngestSettings(chunk_blocks=n, top_k=config.top_k)
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


def measure(model: LandmarkModel, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    memory = directory / "large"
    size = round(options.gigabytes * 1e9)
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
    size = data_file(memory).stat().st_size
    shutil.rmtree(memory)
    return {
        "bytes": size,
        "blocks": blocks,
        "seconds": {name: statistics.median(values) for name, values in measured.items()},
        "measured": measured,
    }


def main() -> None:
    arguments = plain_parser(__doc__)
    add(arguments, "--model", None, "directory of a model (default: the one that ships)")
    add(arguments, "--work", None, "where the memory is made (default: temporary)", type=Path)
    add(arguments, "--gigabytes", 1.0)
    add(arguments, "--repeats", 9)
    options = arguments.parse_args()
    model = load(options)
    with workplace(options) as directory:
        found = measure(model, directory, options)
    what = f"opening {found['bytes'] / 1e9:.2f} GB, {found['blocks']:,} blocks"
    lines = [[what, kind, f"{1000 * seconds:.0f} ms"] for kind, seconds in found["seconds"].items()]
    print(table(["what", "page cache", "time"], lines))
    write_part(options, "open", found)


if __name__ == "__main__":
    main()
