"""In which coordinates do inverted lists find most?

Lists as FAISS makes them (keys of a list by product) over the keys as they are and centred; and as
memstore does (by distance) over the keys as they are, centred, and scaled by the queries
(memstore/index/faiss/faiss_head.py): as many lists, as many of them probed. Beside it, 8-bit
rounding. Recall is the share of the exact top 4 that is found.

    python -m benchmarks.index.metric --captured landmarks/
"""

import argparse
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common.tables import table, tokens_text
from benchmarks.index.data import TOP_K, Data, evenly_spread, run
from memstore.index.faiss.faiss_head import RESCORED, HeadIndex, QueryMetric, faiss, inverted_lists

PROBES = (1, 2, 4, 8, 16, 32, 64, 128)
METRICS = {
    "faiss_raw": "FAISS",
    "faiss_centred": "FAISS, centred",
    "raw": "by distance",
    "centred": "by distance, centred",
    "queries": "by distance, scaled",
}


def measure(data: Data, options: argparse.Namespace) -> dict[str, Any]:
    layer = options.layer
    results: dict[str, Any] = {"layer": layer, "heads": []}
    for size in options.sizes[-2:] if len(options.sizes) > 1 else options.sizes:
        for number in range(data.keys[layer].shape[1]):
            keys = data.keys[layer][:size, number].float().numpy()
            train, test = (
                data.train[layer, number],
                evenly_spread(data.test[layer, number], options.queries),
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
                lists = HeadIndex(of_name, plain_lists(of_name.keys(keys)))
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


def plain_lists(keys: np.ndarray) -> Any:
    """memstore's inverted lists of keys, empty, that are not rounded."""
    library, of_rounded = faiss(), inverted_lists(faiss(), keys)
    index = library.IndexIVFFlat(
        of_rounded.quantizer, keys.shape[1], of_rounded.nlist, library.METRIC_INNER_PRODUCT
    )
    index.is_trained, index.referenced_objects = True, [of_rounded]  # which has the centroids
    return index


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
    return HeadIndex(coordinates, index)


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


def shown(result: dict[str, Any]) -> str:
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


if __name__ == "__main__":
    run(__doc__, "metric", measure, shown)
