"""What the benchmarks of the index share: captured keys and queries, and indexes over them.

Keys and queries are a model's own, as capture.py writes them. Landmarks are dealt out to documents
of equal length. Of a head's queries the first half, in the order of reading, trains and calibrates
engines, and the second half is searched with; a measurement draws fresh ones. Times are medians of
measurements in turns, ratios medians of the ratios within a repeat.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common.options import add, plain_parser, prepare
from benchmarks.common.results import write_part
from benchmarks.common.tables import tokens_number
from benchmarks.common.timing import timed
from memstore.index import Hits, PackedIndex, Scope, make_index
from memstore.index.faiss.faiss_index import FaissIndex

SHARED = (__doc__ or "").partition("\n\n")[2]  # true of each of them
TOP_K = 4
ENGINE = "faiss-ivf-sq8"  # what `auto` builds
KEPT = 2048  # queries of a head that an index keeps to train with


@dataclass(frozen=True)
class Captured:
    """Landmark keys and queries of a model.

    keys: layer -> float16 [N, Hkv, D], a memory map. queries: (layer, head) -> float32 [n, D], in
    the order of reading.
    """

    keys: dict[int, np.ndarray]
    queries: dict[tuple[int, int], np.ndarray]

    @classmethod
    def load(cls, directory: Path) -> "Captured":
        """What `capture_keys` and `capture_queries` wrote."""
        keys = {
            int(path.stem.split("-")[1]): np.load(path, mmap_mode="r")
            for path in directory.glob("keys-*.npy")
        }
        stored = np.load(directory / "queries.npz")
        queries = {
            (int(layer), int(head)): stored[name]
            for name in stored.files
            for layer, head in [name.split("-")]
        }
        return cls(dict(sorted(keys.items())), queries)


@dataclass(frozen=True)
class Data:
    """Captured landmarks and queries, the latter divided for training and testing."""

    keys: dict[int, Tensor]  # layer -> float16 [N, Hkv, D]
    train: dict[tuple[int, int], np.ndarray]  # (layer, head) -> float32 [n, D]
    test: dict[tuple[int, int], np.ndarray]

    @classmethod
    def load(cls, directory: Path) -> "Data":
        captured = Captured.load(directory)
        halves = {key: np.array_split(queries, 2) for key, queries in captured.queries.items()}
        return cls(
            {layer: torch.from_numpy(np.array(keys)) for layer, keys in captured.keys.items()},
            {
                key: evenly_spread(first, min(KEPT, len(first)))
                for key, (first, _) in halves.items()
            },
            {key: second for key, (_, second) in halves.items()},
        )

    def fresh(self, layer: int, rows: int, *seed: int) -> Tensor:
        """Test queries [H, rows, D], chosen at random."""
        rng = np.random.default_rng([rows, *seed])
        heads = [self.test[layer, head] for head in range(self.keys[layer].shape[1])]
        return torch.from_numpy(
            np.stack([of_head[rng.integers(len(of_head), size=rows)] for of_head in heads])
        )

    def evenly(self, layer: int, rows: int) -> Tensor:
        """Test queries [H, rows, D], evenly spread; of a head with fewer each counts as often as
        the others.
        """
        heads = [self.test[layer, head] for head in range(self.keys[layer].shape[1])]
        return torch.from_numpy(np.stack([evenly_spread(of_head, rows) for of_head in heads]))

    def samples(self, *layers: int) -> dict[tuple[int, int], np.ndarray]:
        """What engines of these layers are trained with."""
        return {key: queries for key, queries in self.train.items() if key[0] in layers}


def evenly_spread(rows: np.ndarray, count: int) -> np.ndarray:
    """`count` rows, evenly spread."""
    return np.ascontiguousarray(rows[np.linspace(0, len(rows) - 1, count).astype(np.int64)])


def documents(landmarks: int, count: int) -> list[int]:
    """The lengths of `count` documents, as equal as may be."""
    edges = np.linspace(0, landmarks, min(count, landmarks) + 1).astype(np.int64)
    return np.diff(edges).tolist()


def fill(
    index: PackedIndex, layer: int, keys: Tensor, lengths: Sequence[int], first: int = 1
) -> Scope:
    """Add keys [n, Hkv, D] as documents first, first + 1, ..; returns the scope of them all."""
    scope, at = [], 0
    for document, length in enumerate(lengths, first):
        index.add(document, layer, 0, keys[at : at + length])
        scope.append((document, 0, length))
        at += length
    return scope


def make(kind: str, keys: Tensor) -> PackedIndex:
    return make_index(kind, keys.shape[1], keys.shape[2])


def in_parts(search: Callable[[Tensor], Hits], q: Tensor, rows: int = 32) -> Hits:
    """The hits of q [H, T, D], `rows` at a time."""
    hits = [search(part) for part in q.split(rows, 1)]
    return Hits(
        torch.cat([hit.scores for hit in hits], 1),
        torch.cat([hit.candidates for hit in hits], 1),
        None,
    )


def quality(found: Hits, exact: Hits) -> dict[str, float]:
    """How good the found blocks are: see the module's docstring."""
    same = (found.candidates[..., :, None] == exact.candidates[..., None, :]) & (
        found.candidates >= 0
    )[..., None]
    mass = (found.scores.double().logsumexp(-1) - exact.scores.double().logsumexp(-1)).exp()
    by_head = same.any(-2).double().mean((1, 2))
    return {
        "recall": float(by_head.mean()),
        "worst_head": float(by_head.min()),
        "mass": float(mass.mean()),
        "regret": float((exact.scores - found.scores).mean()),
    }


def recall_of(index: PackedIndex, layer: int, scope: Scope, q: Tensor) -> dict[str, float]:
    """The quality of an index's hits against its own exact search."""
    exact = in_parts(
        lambda some: PackedIndex.search(index, layer, some, scope, TOP_K, return_lse=True), q
    )
    return quality(in_parts(lambda some: index.search(layer, some, scope, TOP_K), q), exact)


def clock(
    data: Data, layer: int, index: PackedIndex, scope: Scope, rows: int, burst: int, seed: int
) -> Callable[[int], float]:
    """Seconds a search, of `burst` searches in a row for fresh rows; for `interleaved`."""

    def run(repeat: int) -> float:
        batches = [data.fresh(layer, rows, seed, repeat, turn) for turn in range(burst)]
        return timed(lambda: [index.search(layer, q, scope, TOP_K) for q in batches])[0] / burst

    run(1 << 20)  # what is done once: scopes looked up, memory allocated
    return run


def searched(index: PackedIndex, layer: int, scope: Scope, q: Tensor) -> Hits:
    return index.search(layer, q, scope, TOP_K)


def asked(index: PackedIndex) -> int:
    """Searches that an engine answered."""
    return index.asked if isinstance(index, FaissIndex) else 0


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"


def index_parser(doc: str | None) -> argparse.ArgumentParser:
    """The options of every benchmark of the index."""
    options = plain_parser(f"{doc}\n{SHARED}")
    options.add_argument("--captured", type=Path, required=True, help="what capture.py wrote")
    add(
        options,
        "--sizes",
        [1 << 12, 1 << 16, 1 << 20],
        "landmarks a head; where one size is measured the largest",
        type=tokens_number,
    )
    add(options, "--layer", None, "the layer to search (default: the middle one)", type=int)
    add(options, "--documents", 1000)
    add(options, "--queries", 256, "query rows a head that quality is measured with")
    add(options, "--repeats", 15)
    add(options, "--work", None, "where files are written (default: temporary)", type=Path)
    return options


def run(
    doc: str | None,
    part: str,
    measure: Callable[[Data, argparse.Namespace], Any],
    shown: Callable[[Any], str],
) -> None:
    """A benchmark that has no options of its own: measure, print, and write its part of --out."""
    options = index_parser(doc).parse_args()
    found = measure(begin(options), options)
    print(shown(found))
    write_part(options, part, found)


def begin(options: argparse.Namespace) -> Data:
    """What was captured; completes the options that depend on it."""
    prepare(options.threads)
    torch.manual_seed(options.seed)
    data = Data.load(options.captured)
    if options.layer is None:
        options.layer = sorted(data.keys)[len(data.keys) // 2]
    available = len(data.keys[options.layer])
    options.sizes = sorted(size for size in options.sizes if size <= available)
    if not options.sizes:
        raise SystemExit(f"only {available:,} landmarks were captured: give smaller --sizes")
    return data
