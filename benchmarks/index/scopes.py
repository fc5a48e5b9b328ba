"""What does searching some of a memory's documents cost?

One query row a head, beside the search of an index of these documents only; by exact search, and by
an engine with a FAISS selector. A hit outside its scope is counted.

    python -m benchmarks.index.scopes --captured landmarks/
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.common.tables import spread, table
from benchmarks.common.timing import interleaved, paired_ratio
from benchmarks.index.data import (
    ENGINE,
    TOP_K,
    Data,
    asked,
    clock,
    documents,
    fill,
    in_parts,
    make,
    ms,
    quality,
    run,
    searched,
)
from memstore.index import Hits, PackedIndex, Scope
from memstore.index.faiss import faiss_candidates
from memstore.index.faiss.faiss_index import FaissIndex


def measure(data: Data, options: argparse.Namespace) -> list[dict[str, Any]]:
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
            index.queries.kept = data.samples(layer)
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


def shown(rows: list[dict[str, Any]]) -> str:
    head = (
        "scope | documents | landmarks | alone ms | packed ms | auto ms | selector ms | "
        "packed / alone | auto / alone | selector / packed | engine asked by auto | "
        "recall auto | recall selector | outside"
    )
    return "\nscopes, one query row a head\n\n" + table(
        head,
        [
            f"{row['scope']} | {row['documents']} | {row['landmarks']:,} | "
            + " | ".join(
                ms(row["seconds"][name]) for name in ("alone", "packed", "auto", "selector")
            )
            + f" | {spread(row['packed_to_alone'])} | {spread(row['auto_to_alone'])} | "
            f"{spread(row['selector_to_packed'])} | {row['auto_asked']:.0%} | "
            f"{row['recall']['auto']:.3f} | {row['recall']['selector']:.3f} | {row['outside']}"
            for row in rows
        ],
    )


if __name__ == "__main__":
    run(__doc__, "scopes", measure, shown)
