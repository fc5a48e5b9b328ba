"""How long from engines in files and landmark keys in main memory to the first search?

All captured layers, page cache warm; medians of three.

    python -m benchmarks.index.opening --captured landmarks/
"""

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.common.tables import table
from benchmarks.common.timing import timed
from benchmarks.index.data import TOP_K, Data, documents, make, run
from memstore.index import faiss_format
from memstore.index.faiss_index import FaissIndex


def measure(data: Data, options: argparse.Namespace) -> dict[str, Any]:
    size, layers = options.sizes[-1], list(data.keys)
    lengths = documents(size, options.documents)
    any_keys = data.keys[layers[0]]

    def filled() -> FaissIndex:
        index = make("auto", any_keys)
        assert isinstance(index, FaissIndex)
        at = 0
        for layer in layers:
            index.reserve(layer, size)
        for document, length in enumerate(lengths, 1):
            for layer in layers:
                index.add(document, layer, 0, data.keys[layer][at : at + length])
            at += length
        return index

    scope = [(document, 0, length) for document, length in enumerate(lengths, 1)]
    times: dict[str, list[float]] = {"adding": [], "files": [], "first_search": []}
    with tempfile.TemporaryDirectory(dir=options.work) as place:
        directory = Path(place)

        def build() -> FaissIndex:
            index = filled()
            index.queries.kept = data.samples(*layers)
            for layer in layers:
                index.build(layer, TOP_K)
            return index

        def read(index: FaissIndex) -> None:
            for layer in layers:
                index.install(layer, faiss_format.read(directory, index, layer))

        def search(index: FaissIndex, queries: dict[int, Tensor]) -> None:
            for layer in layers:
                index.search(layer, queries[layer], scope, TOP_K)

        building, first = timed(build)
        saving = sum(
            timed(partial(faiss_format.write, directory, first, layer))[0] for layer in layers
        )
        del first
        files = sum(faiss_format.file_of(directory, layer).stat().st_size for layer in layers)
        for repeat in range(3):
            seconds, index = timed(filled)
            times["adding"].append(seconds)
            times["files"].append(timed(partial(read, index))[0])
            queries = {layer: data.fresh(layer, 1, options.seed, repeat) for layer in layers}
            times["first_search"].append(timed(partial(search, index, queries))[0])
            del index
    return {
        "landmarks": size,
        "layers": len(layers),
        "heads": any_keys.shape[1],
        "build_seconds": building,
        "save_seconds": saving,
        "file_bytes": files,
        "key_bytes": 2 * sum(keys[:size].numel() for keys in data.keys.values()),
        "seconds": {name: statistics.median(values) for name, values in times.items()},
    }


def shown(row: dict[str, Any]) -> str:
    taken = row["seconds"]
    lines = [
        f"landmark keys added | {taken['adding']:.2f} | {row['key_bytes'] / 1e6:.0f}",
        f"engines read from files | {taken['files']:.2f} | {row['file_bytes'] / 1e6:.0f}",
        f"first search of every layer | {taken['first_search']:.3f} | ",
        f"(engines built) | {row['build_seconds']:.1f} | ",
        f"(engines saved) | {row['save_seconds']:.2f} | ",
    ]
    size = f"{row['landmarks']:,} landmarks a head"
    title = f"opening auto, {size}, {row['layers']} layers x {row['heads']} heads"
    return f"\n{title}, page cache warm\n\n" + table(["what", "seconds", "MB"], lines)


if __name__ == "__main__":
    run(__doc__, "open", measure, shown)
