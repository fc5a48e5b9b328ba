"""How near is exact search to reading its keys once?

One query row a head, beside a sum over its keys (what reading them once takes) and a loop over
FAISS flat indexes, one a head. Random keys where no shape is captured: only bytes matter.

    python -m benchmarks.index.packed --captured landmarks/
"""

import argparse
import statistics
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.tables import spread, table, tokens_text
from benchmarks.common.timing import interleaved, paired_ratio, timed
from benchmarks.index.data import TOP_K, Data, fill, ms, run
from memstore.index import PackedIndex
from memstore.index.faiss_head import faiss


def measure(data: Data, options: argparse.Namespace) -> list[dict[str, Any]]:
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
    for once in runs.values():
        once(1 << 20)
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


def shown(rows: list[dict[str, Any]]) -> str:
    head = (
        "landmarks | heads x dim | MB | packed ms | reading ms | FAISS flat ms | packed / "
        "reading | packed / FAISS"
    )
    return "\npacked, one query row a head\n\n" + table(
        head,
        [
            [
                tokens_text(row["landmarks"]),
                f"{row['heads']} x {row['dim']}" + (" (captured)" if row["real"] else ""),
                f"{row['bytes'] / 1e6:.1f}",
                *(ms(row["seconds"][name]) for name in ("packed", "stream", "faiss_flat")),
                spread(row["to_stream"]),
                spread(row["to_faiss_flat"]),
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    run(__doc__, "packed", measure, shown)
