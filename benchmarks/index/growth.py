"""What do an engine's recall and speed become while documents come and go?

Landmarks that come in 64 steps after an engine was built at half the size, and documents that go.

    python -m benchmarks.index.growth --captured landmarks/
"""

import argparse
import statistics
from functools import partial
from typing import Any

from benchmarks.common.tables import table
from benchmarks.common.timing import timed
from benchmarks.index.data import ENGINE, TOP_K, Data, documents, fill, make, recall_of, run
from memstore.index.faiss.faiss_index import FaissIndex


def measure(data: Data, options: argparse.Namespace) -> dict[str, Any]:
    layer, size = options.layer, options.sizes[-1]
    keys, q = data.keys[layer][:size], data.evenly(layer, options.queries)
    half, steps = size // 2, 64
    index, alone = make(ENGINE, keys), make("packed", keys)
    assert isinstance(index, FaissIndex)
    scope = list(fill(index, layer, keys[:half], documents(half, options.documents // 2)))
    fill(alone, layer, keys[:half], documents(half, options.documents // 2))
    index.queries.kept = data.samples(layer)
    building, _ = timed(lambda: index.build(layer, TOP_K))
    result: dict[str, Any] = {"landmarks": [half, size], "build_seconds": building, "steps": steps}
    result["at_half"] = recall_of(index, layer, scope, q)
    added, packed_added, joins = [], [], 0
    for number, part in enumerate(keys[half:].chunk(steps)):
        document, held = len(scope) + 1, index.built[layer].rows.end
        added.append(timed(partial(index.add, document, layer, 0, part))[0])
        packed_added.append(timed(partial(alone.add, document, layer, 0, part))[0])
        joins += index.built[layer].rows.end > held
        scope.append((document, 0, len(part)))
        if number in (steps // 4, steps - 1):
            result[f"after_{number + 1}"] = recall_of(index, layer, scope, q)
    result |= {
        "add_seconds": sum(added),
        "slowest_step": max(added),
        "median_step": statistics.median(added),
        "packed_seconds": sum(packed_added),
        "joins": joins,
        "beside": sum(n for _, _, n in scope) - index.built[layer].rows.live,
    }
    gone = scope[::10]
    result["removed"] = len(gone)

    def remove() -> None:
        for document, _, _ in gone:
            index.remove(document)

    result["remove_seconds"], _ = timed(remove)
    kept = [run for run in scope if run not in set(gone)]
    result["after_removal"] = recall_of(index, layer, kept, q)
    result["rebuild_seconds"], _ = timed(lambda: index.build(layer, TOP_K))
    result["rebuilt"] = recall_of(index, layer, kept, q)
    return result


def shown(row: dict[str, Any]) -> str:
    def found(name: str) -> str:
        return f"{row[name]['recall']:.3f}"

    quarter = next(name for name in row if name.startswith("after_") and name != "after_removal")
    after = found(f"after_{row['steps']}")
    size = f"{row['landmarks'][0]:,} to {row['landmarks'][1]:,} landmarks a head"
    lines = [
        f"built at half | {row['build_seconds']:.2f} | {found('at_half')}",
        f"{quarter.removeprefix('after_')} steps added |  | {found(quarter)}",
        f"{row['steps']} steps added, {row['joins']} times to the engine, "
        f"{row['beside']:,} keys beside | {row['add_seconds']:.2f} | {after}",
        f"  a step, median / slowest | {row['median_step']:.4f} / {row['slowest_step']:.2f} | ",
        f"  the same into a packed index | {row['packed_seconds']:.2f} | ",
        f"{row['removed']} documents removed | {row['remove_seconds']:.4f} | "
        f"{found('after_removal')}",
        f"built again | {row['rebuild_seconds']:.2f} | {found('rebuilt')}",
    ]
    return f"\ngrowth of {ENGINE}, {size}\n\n" + table("what | seconds | recall@4", lines)


if __name__ == "__main__":
    run(__doc__, "growth", measure, shown)
