"""What do the engines of the landmark index find, how fast, and what do they cost to build, keep
and open?

Keys and queries are a model's own, as benchmarks/landmarks.py captures them. Landmarks are dealt
out to documents of equal length. Of a head's queries the first half, in the order of reading,
trains and calibrates engines (as many as an index keeps), and the second half is searched with; a
measurement draws fresh ones. Kinds and their denominators are measured in turns; times are medians,
ratios medians of the ratios within a repeat.

engines  Every kind at every size, all heads of one layer. Recall: share of the exact top 4 that is
found; mass: the sum
         of exp(score) of what is found over that of the exact top 4; regret: exact minus found
         score, mean of the 4 (both as attention sees them). One query row a head, and 64. A kind
         whose build would take longer than --build-limit, by its time at the size before, is left
         out.
metric   Inverted lists as FAISS makes them (keys of a list by product) over the keys as they are
and centred; and as
         memstore does (by distance) over the keys as they are, centred, and scaled by the queries
         (memstore/index/metric.py): as many lists, as many of them probed. Beside it, 8-bit
         rounding.
packed   Exact search for one query row a head, beside a sum over its keys (what reading them once
takes) and a loop
         over FAISS flat indexes, one a head. Random keys where no shape is captured: only bytes
         matter.
scopes   Searches of some of 1,000 documents, one query row a head, beside the search of an index of
these documents
         only; by exact search, and by an engine with a FAISS selector.
growth   Landmarks that come in 64 steps after an engine was built at half the size, and documents
that go. open     From files and landmark keys in main memory to the first search of every layer.

    python benchmarks/landmarks.py --text books-train-*.jsonl.zst --query-text books-val.jsonl.zst
    --to landmarks/ python benchmarks/index.py --captured landmarks/ --out results/index.json

Parts that are not asked for stay in --out as they are.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import common
import numpy as np
import torch
from common import interleaved, paired_ratio, table, timed, tokens_number, tokens_text
from landmarks import Captured
from torch import Tensor

from memstore.index import (
    INDEX_KINDS,
    Hits,
    PackedIndex,
    Scope,
    faiss_candidates,
    faiss_format,
    make_index,
)
from memstore.index.faiss_head import RESCORED, HeadIndex, _inverted_lists, faiss
from memstore.index.faiss_index import RECALL, FaissIndex
from memstore.index.metric import QueryMetric

TOP_K = 4
KEPT = 2048  # queries of a head that an index keeps to train with
ROWS = (1, 64)  # query rows a head
ENGINE = "faiss-ivf-sq8"
PROBES = (1, 2, 4, 8, 16, 32, 64, 128)


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
            {key: spread(first, min(KEPT, len(first))) for key, (first, _) in halves.items()},
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
        return torch.from_numpy(np.stack([spread(of_head, rows) for of_head in heads]))

    def samples(self, *layers: int) -> dict[tuple[int, int], np.ndarray]:
        """What engines of these layers are trained with."""
        return {key: queries for key, queries in self.train.items() if key[0] in layers}


def spread(rows: np.ndarray, count: int) -> np.ndarray:
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


# Engines


def engines(data: Data, options: argparse.Namespace) -> dict[str, Any]:
    seconds_a_key: dict[str, float] = {}  # that building a kind took at the size before
    sizes = []
    for size in options.sizes:
        sizes.append(engines_at(size, data, seconds_a_key, options))
        print(engines_table(sizes[-1]), flush=True)
    return {"layer": options.layer, "sizes": sizes}


def engines_at(
    size: int, data: Data, seconds_a_key: dict[str, float], options: argparse.Namespace
) -> dict[str, Any]:
    layer = options.layer
    keys, lengths = data.keys[layer][:size], documents(size, options.documents)
    rows: dict[str, dict[str, Any]] = {}
    indexes: dict[str, PackedIndex] = {}
    for kind in options.kinds:
        expected = size * seconds_a_key.get(kind, 0.0)
        if expected > options.build_limit:
            print(
                f"{kind} at {tokens_text(size)} left out: building it would take {expected:.0f} s",
                flush=True,
            )
            continue
        index = indexes[kind] = make(kind, keys)
        rows[kind], scope = built(index, layer, keys, lengths, data, options)
        seconds_a_key[kind] = rows[kind].get("build_seconds", 0.0) / size
        print(f"{kind} at {tokens_text(size)} is ready", flush=True)
    q = data.evenly(layer, options.queries)
    exact = in_parts(lambda some: indexes["packed"].search(layer, some, scope, TOP_K), q)
    for kind, index in indexes.items():
        # The others find the same however many rows come at once; "auto" chooses anew.
        search = partial(searched, index, layer, scope)
        rows[kind] |= quality(in_parts(search, q, 1 if kind == "auto" else 32), exact)
    for count in ROWS:
        name, burst = f"rows_{count}", max(1, min(16, (1 << 18) // (size * count)))
        repeats = options.repeats if count == 1 or size < 1 << 19 else max(3, options.repeats // 3)
        clocks = {
            kind: clock(data, layer, index, scope, count, burst, options.seed)
            for kind, index in indexes.items()
        }
        before = {kind: (index.searches, asked(index)) for kind, index in indexes.items()}
        measured = interleaved(clocks, repeats)
        for kind, index in indexes.items():
            searches = index.searches - before[kind][0]
            rows[kind][name] = {
                "seconds": statistics.median(measured[kind]),
                "to_packed": paired_ratio(measured[kind], measured["packed"]),
                "asked": (asked(index) - before[kind][1]) / searches,
            }
        if "auto" in rows:
            good = [kind for kind in rows if kind != "auto" and rows[kind]["recall"] >= RECALL]
            best = min((statistics.median(measured[kind]), kind) for kind in good)[1]
            rows["auto"][name] |= {
                "best": best,
                "to_best": paired_ratio(measured["auto"], measured[best]),
            }
    return {"landmarks": size, "documents": len(lengths), "kinds": rows}


def searched(index: PackedIndex, layer: int, scope: Scope, q: Tensor) -> Hits:
    return index.search(layer, q, scope, TOP_K)


def asked(index: PackedIndex) -> int:
    """Searches that an engine answered."""
    return index.asked if isinstance(index, FaissIndex) else 0


def built(
    index: PackedIndex,
    layer: int,
    keys: Tensor,
    lengths: Sequence[int],
    data: Data,
    options: argparse.Namespace,
) -> tuple[dict[str, Any], Scope]:
    """Fill, build, save and open again one index; what that took, and the scope of all
    documents.
    """
    adding, scope = timed(lambda: fill(index, layer, keys, lengths))
    row: dict[str, Any] = {"add_seconds": adding, "keys_bytes": index.bytes}
    if isinstance(index, FaissIndex):
        index.samples = data.samples(layer)
        row["build_seconds"], _ = timed(lambda: index.build(layer, TOP_K))
        row["effort"] = [head.calibration.effort for head in index.built[layer].heads]
        with tempfile.TemporaryDirectory(dir=options.work) as place:
            directory = Path(place)
            row["save_seconds"], _ = timed(lambda: faiss_format.write(directory, index, layer))
            row["file_bytes"] = faiss_format.file_of(directory, layer).stat().st_size
            row["open_seconds"], _ = timed(
                lambda: index.install(layer, faiss_format.read(directory, index, layer))
            )
    row["bytes"] = index.bytes
    return row, scope


# The metric


def metric(data: Data, options: argparse.Namespace) -> dict[str, Any]:
    layer = options.layer
    results: dict[str, Any] = {"layer": layer, "heads": []}
    for size in options.sizes[-2:] if len(options.sizes) > 1 else options.sizes:
        for number in range(data.keys[layer].shape[1]):
            keys = data.keys[layer][:size, number].float().numpy()
            train, test = (
                data.train[layer, number],
                spread(data.test[layer, number], options.queries),
            )
            mean, none = keys.mean(0), np.zeros((0, keys.shape[1]), np.float32)
            eye = np.eye(keys.shape[1], dtype=np.float32)
            raw = QueryMetric(np.zeros_like(mean), eye, eye)
            coordinates = {
                "faiss_raw": raw,
                "faiss_centred": QueryMetric.of(keys, none),
                "raw": raw,
                "centred": QueryMetric.of(keys, none),
                "queries": QueryMetric.of(keys, train),
            }
            scores = torch.from_numpy(test) @ torch.from_numpy(keys).T
            best = scores.topk(TOP_K, -1).indices
            row: dict[str, Any] = {"landmarks": size, "head": number, **directions(keys, train)}
            for name, of_name in coordinates.items():
                lists = HeadIndex(
                    "ivf", of_name, _inverted_lists(faiss(), of_name.keys(keys), False)
                )
                if name.startswith("faiss"):
                    lists = as_faiss_does(of_name, of_name.keys(keys), int(lists.index.nlist))
                else:
                    lists.add(keys)
                row["lists"] = int(lists.index.nlist)
                row[name] = {"ivf": [], "sq8": rounded(of_name, keys, test, scores, best)}
                for probes in (probe for probe in PROBES if probe <= row["lists"]):
                    found = lists.search(test, RESCORED * TOP_K, probes)
                    share = looked_at(lists, test, probes)
                    row[name]["ivf"].append(
                        {"nprobe": probes, "recall": recall(found, scores, best), "share": share}
                    )
            results["heads"].append(row)
            print(f"metric: {tokens_text(size)}, head {number} measured", flush=True)
    return results


def as_faiss_does(coordinates: QueryMetric, keys: np.ndarray, lists: int) -> HeadIndex:
    """IndexIVFFlat for products, trained and filled by FAISS itself; keys in these coordinates."""
    library = faiss()
    quantizer = library.IndexFlatIP(keys.shape[1])
    index = library.IndexIVFFlat(quantizer, keys.shape[1], lists, library.METRIC_INNER_PRODUCT)
    index.own_fields = True  # the index frees the quantizer, not Python
    quantizer.this.disown()
    index.cp.max_points_per_centroid, index.cp.niter = 64, 8  # as memstore's
    index.train(keys)
    index.add(keys)
    return HeadIndex("ivf", coordinates, index)


def directions(keys: np.ndarray, queries: np.ndarray) -> dict[str, float]:
    """How far the keys' mean outweighs their spread, and how few directions hold the queries'
    second moment.
    """
    mean = keys.mean(0)
    moment = np.linalg.eigvalsh(queries.T.astype(np.float64) @ queries)
    return {
        "mean_of_keys": float(np.linalg.norm(mean) / np.sqrt(((keys - mean) ** 2).sum(1).mean())),
        "directions_of_queries": float(moment.sum() ** 2 / (moment**2).sum()),
    }


def recall(found: np.ndarray, scores: Tensor, best: Tensor) -> float:
    """Share of `best` [n, k] among the k of `found` [n, c] with the highest scores [n, N]."""
    ids = torch.from_numpy(found)
    of_found = scores.gather(-1, ids.clamp_min(0)).masked_fill(ids < 0, -torch.inf)
    chosen = ids.gather(-1, of_found.topk(best.shape[1], -1).indices)
    return float((chosen[:, :, None] == best[:, None, :]).any(1).double().mean())


def rounded(
    coordinates: QueryMetric, keys: np.ndarray, test: np.ndarray, scores: Tensor, best: Tensor
) -> dict[str, float]:
    """8 bits a number: recall of the 4 best by rounded keys alone, and of the 16 best scored
    exactly.
    """
    library, moved = faiss(), coordinates.keys(keys)
    index = library.IndexScalarQuantizer(
        keys.shape[1], library.ScalarQuantizer.QT_8bit, library.METRIC_INNER_PRODUCT
    )
    index.train(moved)
    index.add(moved)
    found = index.search(coordinates.queries(test), RESCORED * TOP_K)[1]
    return {"of_4": recall(found[:, :TOP_K], scores, best), "of_16": recall(found, scores, best)}


def looked_at(lists: HeadIndex, queries: np.ndarray, probes: int) -> float:
    """The mean share of all keys that lie in the probed lists."""
    assert lists.metric is not None
    sizes = np.array(
        [lists.index.invlists.list_size(number) for number in range(lists.index.nlist)]
    )
    probed = lists.index.quantizer.search(lists.metric.queries(queries), probes)[1]
    return float(sizes[probed].sum(1).mean() / lists.size)


# Packed search


def packed(data: Data, options: argparse.Namespace) -> list[dict[str, Any]]:
    captured = data.keys[options.layer]
    shapes = [(size, 8, dim) for dim in (64, 128) for size in (4096, 65536)]
    shapes += [(size, *captured.shape[1:]) for size in (4096, 65536) if size <= len(captured)]
    return [packed_at(*shape, data, options) for shape in shapes]


def packed_at(
    size: int, heads: int, dim: int, data: Data, options: argparse.Namespace
) -> dict[str, Any]:
    captured = data.keys[options.layer]
    real = (heads, dim) == tuple(captured.shape[1:])
    index = PackedIndex(heads, dim)
    scope = fill(
        index, 0, captured[:size].float() if real else torch.randn(size, heads, dim), [size]
    )
    stored = index.keys(0, scope)
    flat = [faiss().IndexFlatIP(dim) for _ in range(heads)]
    for number, of_head in enumerate(flat):
        of_head.add(stored[number].numpy())
    turns = 16 if size < 1 << 14 else 1

    def queries(repeat: int) -> list[Tensor]:
        if real:
            return [
                data.fresh(options.layer, 1, options.seed, repeat, turn) for turn in range(turns)
            ]
        return [torch.randn(heads, 1, dim) for _ in range(turns)]

    def search(repeat: int) -> float:
        some = queries(repeat)
        return timed(lambda: [index.search(0, q, scope, TOP_K) for q in some])[0] / turns

    def stream(repeat: int) -> float:
        return timed(lambda: [float(stored.sum()) for _ in range(turns)])[0] / turns

    def loop(repeat: int) -> float:
        some = [q.numpy() for q in queries(repeat)]
        return (
            timed(
                lambda: [
                    of_head.search(q[number], TOP_K)
                    for q in some
                    for number, of_head in enumerate(flat)
                ]
            )[0]
            / turns
        )

    runs = {"packed": search, "stream": stream, "faiss_flat": loop}
    for run in runs.values():
        run(1 << 20)
    measured = interleaved(runs, max(15, 2 * options.repeats))
    return {
        "landmarks": size,
        "heads": heads,
        "dim": dim,
        "real": real,
        "bytes": stored.nbytes,
        "seconds": {name: statistics.median(seconds) for name, seconds in measured.items()},
        "to_stream": paired_ratio(measured["packed"], measured["stream"]),
        "to_faiss_flat": paired_ratio(measured["packed"], measured["faiss_flat"]),
    }


# Scopes


def scopes(data: Data, options: argparse.Namespace) -> list[dict[str, Any]]:
    layer, size = options.layer, options.sizes[-1]
    keys, lengths = data.keys[layer][:size], documents(size, options.documents)
    count = len(lengths)
    indexes = {
        "packed": make("packed", keys),
        "auto": make("auto", keys),
        "selector": make(ENGINE, keys),
    }
    for index in indexes.values():
        everything = fill(index, layer, keys, lengths)
        if isinstance(index, FaissIndex):
            index.samples = data.samples(layer)
            index.build(layer, TOP_K)
    chosen = {"one": everything[count // 2 : count // 2 + 1]}
    chosen |= {
        f"every {step}th": everything[step // 2 :: step] for step in (100, 10) if step < count
    }
    chosen |= {
        "every second": everything[::2],
        "first half": everything[: count // 2],
        "all": everything,
    }
    starts = np.cumsum([0, *lengths])
    rows = []
    for name, scope in chosen.items():
        held = torch.cat(
            [keys[starts[document - 1] : starts[document]] for document, _, _ in scope]
        )
        rows.append({"scope": name, **scope_at(indexes, scope, held, data, options)})
    return rows


def scope_at(
    indexes: dict[str, PackedIndex],
    scope: Scope,
    held: Tensor,
    data: Data,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """held: the keys [n, Hkv, D] of the scope."""
    layer, q, auto = options.layer, data.evenly(options.layer, options.queries), indexes["auto"]
    alone = make("packed", held)
    of_alone = fill(alone, layer, held, [length for _, _, length in scope])
    burst = 16 if len(held) < 1 << 14 else 1
    # the engine is asked however small the scope
    at_any_size = mock.patch.object(faiss_candidates, "_COVERED", 0)

    def timer(index: PackedIndex, where: Scope) -> Callable[[int], float]:
        return clock(data, layer, index, where, 1, burst, options.seed)

    clocks = {
        "alone": timer(alone, of_alone),
        "packed": timer(indexes["packed"], scope),
        "auto": timer(auto, scope),
    }
    with at_any_size:
        of_selector = timer(indexes["selector"], scope)

    def selected(repeat: int) -> float:
        with at_any_size:
            return of_selector(repeat)

    before = auto.searches, asked(auto)
    measured = interleaved(clocks | {"selector": selected}, options.repeats)
    share = (asked(auto) - before[1]) / (auto.searches - before[0])
    # of an index that has nothing else
    exact = in_parts(partial(searched, alone, layer, of_alone), q)
    hits = {
        "packed": in_parts(partial(searched, indexes["packed"], layer, scope), q),
        "auto": in_parts(partial(searched, auto, layer, scope), q, 1),
    }
    with at_any_size:
        hits["selector"] = in_parts(partial(searched, indexes["selector"], layer, scope), q)
    recalls = {kind: quality(of_kind, exact)["recall"] for kind, of_kind in hits.items()}
    outside = sum(leaked(of_kind, q, held) for of_kind in hits.values())
    return {
        "documents": len(scope),
        "landmarks": len(held),
        "outside": outside,
        "auto_asked": share,
        "recall": recalls,
        "seconds": {kind: statistics.median(seconds) for kind, seconds in measured.items()},
        "packed_to_alone": paired_ratio(measured["packed"], measured["alone"]),
        "auto_to_alone": paired_ratio(measured["auto"], measured["alone"]),
        "selector_to_packed": paired_ratio(measured["selector"], measured["packed"]),
    }


def leaked(hits: Hits, q: Tensor, held: Tensor) -> int:
    """Hits that are not blocks of the scope: their scores are not those of the scope's keys held
    [n, H, D].
    """
    inside = (hits.candidates >= 0) & (hits.candidates < len(held))
    heads = torch.arange(len(q))[:, None, None]
    keys = held[hits.candidates.clamp(0, len(held) - 1), heads].float()  # (H, T, k, D)
    same = ((keys @ q[..., None])[..., 0] - hits.scores).abs() <= 1e-3
    return int((~(inside & same)).sum())


# Growth


def growth(data: Data, options: argparse.Namespace) -> dict[str, Any]:
    layer, size = options.layer, options.sizes[-1]
    keys, q = data.keys[layer][:size], data.evenly(layer, options.queries)
    half, steps = size // 2, 64
    index, alone = make(ENGINE, keys), make("packed", keys)
    assert isinstance(index, FaissIndex)
    scope = list(fill(index, layer, keys[:half], documents(half, options.documents // 2)))
    fill(alone, layer, keys[:half], documents(half, options.documents // 2))
    index.samples = data.samples(layer)
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
    result["remove_seconds"], _ = timed(lambda: [index.remove(document) for document, _, _ in gone])
    kept = [run for run in scope if run not in set(gone)]
    result["after_removal"] = recall_of(index, layer, kept, q)
    result["rebuild_seconds"], _ = timed(lambda: index.build(layer, TOP_K))
    result["rebuilt"] = recall_of(index, layer, kept, q)
    return result


# Opening


def opening(data: Data, options: argparse.Namespace) -> dict[str, Any]:
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
            index.samples = data.samples(*layers)
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


# Showing


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"


def ratio(value: dict[str, float]) -> str:
    return f"{value['median']:.2f} ({value['least']:.2f}-{value['greatest']:.2f})"


def engines_table(at: dict[str, Any]) -> str:
    head = [
        "kind",
        "recall@4",
        "worst head",
        "mass",
        "regret",
        *(f"{n} row, ms" for n in ROWS),
        *(f"{n} row / packed" for n in ROWS),
        "engine asked",
        "memory MB",
        "build s",
        "file MB",
        "save s",
        "open s",
    ]
    lines = []
    for kind, row in at["kinds"].items():
        of_engine = ["-"] * 4
        if "build_seconds" in row:
            of_engine = [
                f"{row['build_seconds']:.2f}",
                f"{row['file_bytes'] / 1e6:.1f}",
                f"{row['save_seconds']:.2f}",
                f"{row['open_seconds']:.2f}",
            ]
        lines.append(
            [
                kind,
                f"{row['recall']:.3f}",
                f"{row['worst_head']:.3f}",
                f"{row['mass']:.4f}",
                f"{row['regret']:.4f}",
                *(ms(row[f"rows_{n}"]["seconds"]) for n in ROWS),
                *(ratio(row[f"rows_{n}"]["to_packed"]) for n in ROWS),
                "/".join(f"{row[f'rows_{n}']['asked']:.0%}" for n in ROWS),
                f"{row['bytes'] / 1e6:.0f}",
                *of_engine,
            ]
        )
    text = (
        f"\nengines, {at['landmarks']:,} landmarks a head in {at['documents']} documents\n\n"
        + table(head, lines)
    )
    if "auto" in at["kinds"]:
        for n in ROWS:
            row = at["kinds"]["auto"][f"rows_{n}"]
            best = f"{row['best']}, the best with a recall of {RECALL}"
            text += f"\nauto / {best}, {n} row: {ratio(row['to_best'])}"
    return text


METRICS = {
    "faiss_raw": "FAISS",
    "faiss_centred": "FAISS, centred",
    "raw": "by distance",
    "centred": "by distance, centred",
    "queries": "by distance, scaled",
}


def metric_table(result: dict[str, Any]) -> str:
    head = [
        "landmarks",
        "head",
        "mean / spread of keys",
        "directions of queries",
        "lists",
        "nprobe",
        *METRICS.values(),
    ]
    lines, eight = [], []
    for row in result["heads"]:
        about = [tokens_text(row["landmarks"]), row["head"]]
        eight.append(
            [
                *about,
                *(
                    f"{row[name]['sq8']['of_4']:.3f} / {row[name]['sq8']['of_16']:.3f}"
                    for name in ("raw", "centred", "queries")
                ),
            ]
        )
        for turn, at in enumerate(row["raw"]["ivf"]):
            if at["nprobe"] in (4, 16, 64):
                found = [row[name]["ivf"][turn] for name in METRICS]
                lines.append(
                    [
                        *about,
                        f"{row['mean_of_keys']:.2f}",
                        f"{row['directions_of_queries']:.1f}",
                        row["lists"],
                        at["nprobe"],
                        *(f"{some['recall']:.3f} ({some['share']:.1%})" for some in found),
                    ]
                )
    text = f"\nmetric, layer {result['layer']}: recall@4 (share of the keys looked at)\n\n" + table(
        head, lines
    )
    text += "\n\n8 bits a number: recall@4 of the best 4 / of the best 16, scored exactly\n\n"
    return text + table(["landmarks", "head", "as they are", "centred", "scaled"], eight)


def packed_table(rows: list[dict[str, Any]]) -> str:
    head = [
        "landmarks",
        "heads x dim",
        "MB",
        "packed ms",
        "reading ms",
        "FAISS flat ms",
        "packed / reading",
        "packed / FAISS",
    ]
    return "\npacked, one query row a head\n\n" + table(
        head,
        [
            [
                tokens_text(row["landmarks"]),
                f"{row['heads']} x {row['dim']}" + (" (captured)" if row["real"] else ""),
                f"{row['bytes'] / 1e6:.1f}",
                *(ms(row["seconds"][name]) for name in ("packed", "stream", "faiss_flat")),
                ratio(row["to_stream"]),
                ratio(row["to_faiss_flat"]),
            ]
            for row in rows
        ],
    )


def scopes_table(rows: list[dict[str, Any]]) -> str:
    head = [
        "scope",
        "documents",
        "landmarks",
        "alone ms",
        "packed ms",
        "auto ms",
        "selector ms",
        "packed / alone",
        "auto / alone",
        "selector / packed",
        "engine asked by auto",
        "recall auto",
        "recall selector",
        "outside",
    ]
    return "\nscopes, one query row a head\n\n" + table(
        head,
        [
            [
                row["scope"],
                row["documents"],
                f"{row['landmarks']:,}",
                *(ms(row["seconds"][name]) for name in ("alone", "packed", "auto", "selector")),
                ratio(row["packed_to_alone"]),
                ratio(row["auto_to_alone"]),
                ratio(row["selector_to_packed"]),
                f"{row['auto_asked']:.0%}",
                f"{row['recall']['auto']:.3f}",
                f"{row['recall']['selector']:.3f}",
                row["outside"],
            ]
            for row in rows
        ],
    )


def growth_table(row: dict[str, Any]) -> str:
    def found(name: str) -> str:
        return f"{row[name]['recall']:.3f}"

    quarter = next(name for name in row if name.startswith("after_") and name != "after_removal")
    return (
        f"\ngrowth of {ENGINE}, {row['landmarks'][0]:,} to {row['landmarks'][1]:,} landmarks a "
        "head\n\n"
        + table(
            ["what", "seconds", "recall@4"],
            [
                ["built at half", f"{row['build_seconds']:.2f}", found("at_half")],
                [f"{quarter.removeprefix('after_')} steps added", "", found(quarter)],
                [
                    f"{row['steps']} steps added, {row['joins']} times to the engine, "
                    f"{row['beside']:,} keys beside",
                    f"{row['add_seconds']:.2f}",
                    found(f"after_{row['steps']}"),
                ],
                [
                    "  a step, median / slowest",
                    f"{row['median_step']:.4f} / {row['slowest_step']:.2f}",
                    "",
                ],
                ["  the same into a packed index", f"{row['packed_seconds']:.2f}", ""],
                [
                    f"{row['removed']} documents removed",
                    f"{row['remove_seconds']:.4f}",
                    found("after_removal"),
                ],
                ["built again", f"{row['rebuild_seconds']:.2f}", found("rebuilt")],
            ],
        )
    )


def opening_table(row: dict[str, Any]) -> str:
    lines = [
        ["landmark keys added", f"{row['seconds']['adding']:.2f}", f"{row['key_bytes'] / 1e6:.0f}"],
        [
            "engines read from files",
            f"{row['seconds']['files']:.2f}",
            f"{row['file_bytes'] / 1e6:.0f}",
        ],
        ["first search of every layer", f"{row['seconds']['first_search']:.3f}", ""],
        ["(engines built)", f"{row['build_seconds']:.1f}", ""],
        ["(engines saved)", f"{row['save_seconds']:.2f}", ""],
    ]
    size = f"{row['landmarks']:,} landmarks a head"
    title = f"opening auto, {size}, {row['layers']} layers x {row['heads']} heads"
    return f"\n{title}, page cache warm\n\n" + table(["what", "seconds", "MB"], lines)


def draw(figure: Any, results: dict[str, Any]) -> None:
    """Recall against the time of a search, a panel a size."""
    sizes = results["engines"]["sizes"]
    panels = figure.subplots(1, len(sizes), squeeze=False, sharey=True)[0]
    for axes, at in zip(panels, sizes):
        for number, (kind, row) in enumerate(at["kinds"].items()):
            for count, marker in zip(ROWS, "os"):
                axes.plot(
                    1000 * row[f"rows_{count}"]["seconds"],
                    row["recall"],
                    marker,
                    color=f"C{number}",
                    alpha=0.75,
                    label=kind if count == 1 else None,
                )
        axes.axhline(RECALL, color="grey", linewidth=0.7, linestyle="--")
        axes.set(
            title=f"{tokens_text(at['landmarks'])} landmarks a head",
            xscale="log",
            xlabel="ms a search",
        )
    panels[0].set_ylabel("recall@4 (circle: 1 query row a head, square: 64)")
    figure.legend(
        *panels[0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncol=8
    )


MEASURES: dict[str, Callable[[Data, argparse.Namespace], Any]] = {
    "engines": engines,
    "metric": metric,
    "packed": packed,
    "scopes": scopes,
    "growth": growth,
    "open": opening,
}
TABLES: dict[str, Callable[[Any], str]] = {
    "engines": lambda found: "\n".join(map(engines_table, found["sizes"])),
    "metric": metric_table,
    "packed": packed_table,
    "scopes": scopes_table,
    "growth": growth_table,
    "open": opening_table,
}


def main() -> None:
    options = read_options()
    common.prepare(options.threads)
    torch.manual_seed(options.seed)
    data = Data.load(options.captured)
    options.layer = (
        sorted(data.keys)[len(data.keys) // 2] if options.layer is None else options.layer
    )
    available = len(data.keys[options.layer])
    options.sizes = sorted(size for size in options.sizes if size <= available)
    content: dict[str, Any] = {}
    if options.out is not None and options.out.exists():
        content = json.loads(options.out.read_text())
    given = {
        name: value.name if isinstance(value, Path) else value
        for name, value in vars(options).items()
    }
    for part in options.parts:
        found = MEASURES[part](data, options)
        content[part] = {"options": given, "machine": common.machine(), "found": found}
        print(TABLES[part](found), flush=True)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(content, indent=1))
    if "engines" in options.parts:
        common.plot(
            options,
            lambda figure: draw(figure, {"engines": content["engines"]["found"]}),
            (12, 4.5),
        )


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--captured", type=Path, required=True, help="directory that benchmarks/landmarks.py wrote"
    )
    parser.add_argument("--parts", nargs="+", choices=list(MEASURES), default=list(MEASURES))
    parser.add_argument("--kinds", nargs="+", choices=INDEX_KINDS, default=list(INDEX_KINDS))
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=tokens_number,
        default=[1 << 12, 1 << 16, 1 << 20],
        help="landmarks a head",
    )
    parser.add_argument(
        "--layer", type=int, help="the layer that is searched (default: the middle one)"
    )
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument(
        "--queries", type=int, default=256, help="query rows a head that quality is measured with"
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--build-limit", type=float, default=3600, help="seconds that building one kind may take"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, help="write the results here as JSON, and a plot beside it as PNG"
    )
    parser.add_argument(
        "--work", type=Path, help="keep files in this directory (default: a temporary one)"
    )
    options = parser.parse_args()
    if "packed" not in options.kinds:
        parser.error("--kinds must have packed: it is what the others are compared with")
    return options


if __name__ == "__main__":
    main()
