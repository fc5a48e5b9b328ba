"""What does each kind of index find, how fast is it, and what does it take to build?

Every kind at every size, over all heads of one layer, with keys and queries of a model as
index.capture wrote them. Landmarks are divided among documents of equal length. Of a head's queries
the first half, in the order of reading, trains and calibrates engines, and the second half is
searched with; a measurement draws fresh ones. Recall is the share of the exact top 4 that is found.
Times are medians of measurements in turns, of one query row a head and of 64; ratios are to
`packed`, within a repeat. A kind whose build would take longer than --build-limit, by its time at
the size before, is left out.

    python -m benchmarks.index.engines --captured landmarks/
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common.options import add, plain_parser, prepare
from benchmarks.common.results import write_part
from benchmarks.common.tables import spread, table, tokens_number, tokens_text
from benchmarks.common.timing import interleaved, paired_ratio, timed
from memstore.index import INDEX_KINDS, LandmarkIndex, Scope

TOP_K = 4
ROWS = (1, 64)  # query rows a head
KEPT = 2048  # queries of a head that an index keeps to train with


def main() -> None:
    options = read_options()
    prepare(options.threads)
    torch.manual_seed(options.seed)
    data = Data.load(options.captured, options.layer)
    sizes = [size for size in sorted(options.sizes) if size <= len(data.keys)]
    if not sizes:
        raise SystemExit(f"only {len(data.keys):,} landmarks were captured: give smaller --sizes")
    seconds_a_key: dict[str, float] = {}  # of building a kind at the size before
    found = []
    for size in sizes:
        found.append(engines_at(size, data, seconds_a_key, options))
        print(report(found[-1]), flush=True)
    write_part(options, "engines", {"layer": data.layer, "sizes": found})


def read_options() -> argparse.Namespace:
    options = plain_parser(__doc__)
    options.add_argument("--captured", type=Path, required=True, help="what index.capture wrote")
    sizes = [1 << 12, 1 << 16, 1 << 20]
    add(options, "--sizes", sizes, "landmarks a head", type=tokens_number)
    add(options, "--layer", None, "the layer to search (default: the middle one)", type=int)
    add(options, "--documents", 1000)
    add(options, "--queries", 256, "query rows a head that recall is measured with")
    add(options, "--repeats", 15)
    options.add_argument("--kinds", nargs="+", choices=INDEX_KINDS, default=list(INDEX_KINDS))
    add(options, "--build-limit", 3600, "seconds that building one kind may take", type=float)
    given = options.parse_args()
    if "packed" not in given.kinds:
        options.error("--kinds must have packed: it is what the others are compared with")
    return given


@dataclass(frozen=True)
class Data:
    """Landmark keys [N, Hkv, D] float16 of one layer, and queries [n, D] float32 of every head to
    train and to test with.
    """

    layer: int
    keys: Tensor
    train: dict[tuple[int, int], np.ndarray]  # by (layer, head)
    test: list[np.ndarray]

    @classmethod
    def load(cls, directory: Path, layer: int | None) -> "Data":
        """layer: None for the middle one of those that were captured."""
        files = {int(path.stem.split("-")[1]): path for path in directory.glob("keys-*.npy")}
        layer = sorted(files)[len(files) // 2] if layer is None else layer
        keys = torch.from_numpy(np.load(files[layer]))
        stored = np.load(directory / "queries.npz")
        halves = [np.array_split(stored[f"{layer}-{head}"], 2) for head in range(keys.shape[1])]
        train = {(layer, n): evenly(one, min(KEPT, len(one))) for n, (one, _) in enumerate(halves)}
        return cls(layer, keys, train, [second for _, second in halves])

    def fresh(self, rows: int, *seed: int) -> Tensor:
        """Test queries [H, rows, D], chosen at random."""
        rng = np.random.default_rng([rows, *seed])
        drawn = [of_head[rng.integers(len(of_head), size=rows)] for of_head in self.test]
        return torch.from_numpy(np.stack(drawn))


def evenly(rows: np.ndarray, count: int) -> np.ndarray:
    """`count` rows, evenly spread."""
    return np.ascontiguousarray(rows[np.linspace(0, len(rows) - 1, count).astype(np.int64)])


def fill(index: LandmarkIndex, layer: int, keys: Tensor, lengths: Sequence[int]) -> Scope:
    """Add keys [n, Hkv, D] as documents 1, 2, ..; returns the scope of them all."""
    scope, at = [], 0
    for document, length in enumerate(lengths, 1):
        index.add(document, layer, 0, keys[at : at + length])
        scope.append((document, 0, length))
        at += length
    return scope


def engines_at(
    size: int, data: Data, seconds_a_key: dict[str, float], options: argparse.Namespace
) -> dict[str, Any]:
    """Measures every kind of index with `size` landmarks a head."""
    layer, keys = data.layer, data.keys[:size]
    edges = np.linspace(0, size, min(options.documents, size) + 1).astype(np.int64)
    lengths = np.diff(edges).tolist()
    rows: dict[str, dict[str, Any]] = {}
    indexes: dict[str, LandmarkIndex] = {}
    for kind in options.kinds:
        expected = size * seconds_a_key.get(kind, 0.0)
        if expected > options.build_limit:
            print(f"{kind} at {tokens_text(size)} left out: a build of {expected:.0f} s")
            continue
        index = indexes[kind] = LandmarkIndex(*keys.shape[1:], kind=kind)
        scope = fill(index, layer, keys, lengths)
        rows[kind] = {"build_seconds": 0.0}
        if index.kind == "auto":
            index.samples = {at: [torch.from_numpy(some)] for at, some in data.train.items()}
            rows[kind]["build_seconds"], _ = timed(partial(index.build, [layer], TOP_K))
        rows[kind]["bytes"] = index.bytes
        seconds_a_key[kind] = rows[kind]["build_seconds"] / size
    q = torch.from_numpy(np.stack([evenly(of_head, options.queries) for of_head in data.test]))
    exact = hits(indexes["packed"], layer, scope, q)
    for kind, index in indexes.items():
        found = hits(index, layer, scope, q)
        same = (found[..., :, None] == exact[..., None, :]) & (found >= 0)[..., None]
        rows[kind]["recall"] = float(same.any(-2).double().mean())
    for count in ROWS:
        burst = max(1, min(16, (1 << 18) // (size * count)))
        repeats = options.repeats if count == 1 or size < 1 << 19 else max(3, options.repeats // 3)
        clocks = {
            kind: clock(data, index, scope, count, burst, options.seed)
            for kind, index in indexes.items()
        }
        measured = interleaved(clocks, repeats)
        for kind, times in measured.items():
            rows[kind][f"rows_{count}"] = {
                "seconds": statistics.median(times),
                "to_packed": paired_ratio(times, measured["packed"]),
            }
    return {"landmarks": size, "documents": len(lengths), "kinds": rows}


def hits(index: LandmarkIndex, layer: int, scope: Scope, q: Tensor) -> Tensor:
    """Candidates [H, T, top k] for q [H, T, D], 32 rows at a time."""
    found = [index.search(layer, some, scope, TOP_K).candidates for some in q.split(32, 1)]
    return torch.cat(found, 1)


def clock(
    data: Data, index: LandmarkIndex, scope: Scope, rows: int, burst: int, seed: int
) -> Callable[[int], float]:
    """Seconds a search, of `burst` searches in a row for fresh rows; for `interleaved`."""

    def run(repeat: int) -> float:
        batches = [data.fresh(rows, seed, repeat, turn) for turn in range(burst)]
        search = timed(lambda: [index.search(data.layer, q, scope, TOP_K) for q in batches])
        return search[0] / burst

    run(1 << 20)  # warm up: scopes are looked up, memory is allocated
    return run


def report(at: dict[str, Any]) -> str:
    """The table of one size: a kind a line."""
    times = [f"{n} row, {what}" for what in ("ms", "of packed") for n in ROWS]
    lines = []
    for kind, row in at["kinds"].items():
        of = [row[f"rows_{n}"] for n in ROWS]
        line: list[object] = [kind, f"{row['recall']:.3f}"]
        line += [f"{1000 * one['seconds']:.3g}" for one in of]
        line += [spread(one["to_packed"]) for one in of]
        lines.append([*line, f"{row['bytes'] / 1e6:.0f}", f"{row['build_seconds']:.1f}"])
    head = ["kind", f"recall@{TOP_K}", *times, "memory MB", "build s"]
    count = f"{at['landmarks']:,} landmarks a head in {at['documents']} documents"
    return f"\n{count}\n\n" + table(head, lines)


if __name__ == "__main__":
    main()
