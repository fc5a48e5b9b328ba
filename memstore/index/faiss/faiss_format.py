"""Index files: what was built over a layer's keys, kept beside a memory so that it need not be
built again.

A file is a cache. It is read only if it is whole, of this kind, and then for exactly those of its
keys that the memory still holds; deleting it loses nothing.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from memstore.decode import Block, Count, Layer, Positive
from memstore.index.block_rows import Rows, Run
from memstore.index.faiss.faiss_candidates import Built
from memstore.index.faiss.faiss_head import Calibration, HeadIndex
from memstore.index.faiss.faiss_index import FaissIndex
from memstore.index.index_file import Parts, Unusable, read_file, understood, write_file
from memstore.index.metric import QueryMetric


def file_of(directory: Path, layer: int) -> Path:
    """Where a layer's engines are kept."""
    return directory / f"layer-{layer}.idx"


def write(directory: Path, index: FaissIndex, layer: int) -> None:
    """Write a layer's engines; the file is replaced whole. Raises OSError."""
    built = index.built[layer]
    runs = [
        [
            document,
            run.first_block,
            run.start,
            run.size,
            index.fingerprint(layer, document, run.first_block, run.size),
        ]
        for document, run in built.rows.all()
    ]
    header = {
        "recall": index.recall,
        "trained": built.trained,
        "end": built.rows.end,
        "runs": runs,
        "calibrations": [asdict(head.calibration) for head in built.heads],
        "metrics": [_packed(head.metric) for head in built.heads],
    }
    write_file(file_of(directory, layer), header, [head.dump() for head in built.heads])


def read(directory: Path, index: FaissIndex, layer: int) -> Built:
    """A layer's engines, for those of the keys they hold that the memory still has.

    An index of which no recall was asked takes what there is. Raises Unusable, FileNotFoundError.
    """
    path = file_of(directory, layer)
    header, parts = read_file(path, _Header)
    if index.wanted_recall not in (None, header.recall):
        raise Unusable(f"{path.name} is calibrated for a recall of {header.recall}")
    with understood(path.name):
        built = _built(header, parts, index, layer)
    if built.stale:
        raise Unusable(f"{path.name} is stale: most of its keys are gone, or have come since")
    return built


def _built(header: "_Header", parts: list[np.ndarray], index: FaissIndex, layer: int) -> Built:
    rows = Rows()
    rows.end = header.end
    spans = sorted((start, start + size) for _, _, start, size, _ in header.runs)
    ends = [0, *(end for _, end in spans)]
    if ends[-1] > rows.end or any(start < end for (start, _), end in zip(spans, ends)):
        raise ValueError("its runs overlap, or lie behind its end")
    for document, first_block, start, size, fingerprint in header.runs:
        first, end = index.span(document, layer)
        there = first <= first_block and first_block + size <= end
        if there and index.fingerprint(layer, document, first_block, size) == fingerprint:
            rows.insert(document, Run(first_block, start, size))
    if not len(parts) == len(header.metrics) == len(header.calibrations) == index.num_kv_heads:
        raise ValueError(f"{len(parts)} heads instead of {index.num_kv_heads}")
    heads = []
    for calibration, stored, part in zip(header.calibrations, header.metrics, parts):
        metric = _unpacked(stored, index.head_dim)
        head = HeadIndex.load(metric, calibration, part)
        head.check(index.head_dim, rows.end)
        heads.append(head)
    return Built(heads, rows, header.trained)


def write_samples(directory: Path, samples: dict[tuple[int, int], np.ndarray]) -> None:
    """Write the queries float32 [n, D] of every (layer, KV head) that engines are trained and
    calibrated with.
    """
    header = {"heads": [[*key, *queries.shape] for key, queries in samples.items()]}
    write_file(
        directory / "queries.idx",
        header,
        [queries.view(np.uint8).ravel() for queries in samples.values()],
    )


def read_samples(directory: Path) -> dict[tuple[int, int], np.ndarray]:
    """The inverse. Raises Unusable, FileNotFoundError."""
    path = directory / "queries.idx"
    header, parts = read_file(path, _Samples)
    with understood(path.name):
        samples = {
            (layer, head): part.view(np.float32).reshape(n, dim)
            for (layer, head, n, dim), part in zip(header.heads, parts, strict=True)
        }
        if not all(np.isfinite(queries).all() for queries in samples.values()):
            raise ValueError("it has numbers that are not finite")
        return samples


class _Header(Parts):
    recall: float
    trained: Positive
    end: Positive
    runs: list[tuple[int, Block, Count, Positive, bytes]]
    calibrations: list[Calibration]
    metrics: list[tuple[bytes, bytes, bytes]]


class _Samples(Parts):
    heads: list[tuple[Layer, Layer, Count, Positive]]


def _packed(metric: QueryMetric) -> list[Any]:
    return [metric.mean.tobytes(), metric.of_keys.tobytes(), metric.of_queries.tobytes()]


def _unpacked(stored: tuple[bytes, bytes, bytes], dim: int) -> QueryMetric:
    mean, of_keys, of_queries = (np.frombuffer(part, dtype=np.float32) for part in stored)
    if not all(np.isfinite(part).all() for part in (mean, of_keys, of_queries)):
        raise ValueError("its metric is not finite")
    return QueryMetric(mean.reshape(dim), of_keys.reshape(dim, dim), of_queries.reshape(dim, dim))
