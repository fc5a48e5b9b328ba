"""Index files: what was built over a layer's keys, kept beside a memory so that it need not be
built again.

A file is a cache. It is read only if it is whole, of this kind, and then for exactly those of its
keys that the memory still holds; deleting it loses nothing.
"""

import errno
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import xxhash

from memstore.disk.files import open_regular, replacement
from memstore.errors import InvalidInput
from memstore.index.faiss_candidates import Built
from memstore.index.faiss_head import FAMILIES, Calibration, HeadIndex
from memstore.index.faiss_index import FaissIndex
from memstore.index.metric import QueryMetric
from memstore.index.rows import Rows, Run

_MAGIC = b"memstore index 1\n"
_FIXED = len(_MAGIC) + 16  # then the header's length and its checksum


class Unusable(Exception):
    """An index file that is damaged, of another kind, or of other keys; says which."""


def file_of(directory: Path, layer: int) -> Path:
    """Where a layer's engines are kept, of whichever family."""
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
        for document, of_document in built.rows.runs.items()
        for run in of_document
    ]
    header = {
        "family": built.family,
        "recall": index.recall,
        "trained": built.trained,
        "end": built.rows.end,
        "runs": runs,
        "calibrations": [asdict(head.calibration) for head in built.heads],
        "metrics": [_packed(head.metric) for head in built.heads],
    }
    _write(file_of(directory, layer), header, [head.dump() for head in built.heads])


def read(directory: Path, index: FaissIndex, layer: int) -> Built:
    """A layer's engines, for those of the keys they hold that the memory still has.

    An index that is "auto" takes any family; one of which no recall was asked takes what there is.
    Raises Unusable, FileNotFoundError.
    """
    path = file_of(directory, layer)
    header, parts = _read(path)
    if header["family"] not in FAMILIES or (header["family"] != index.family and not index.auto):
        raise Unusable(f"{path.name} is of another kind, faiss-{header['family']}")
    if index.wanted_recall not in (None, header["recall"]):
        raise Unusable(f"{path.name} is calibrated for a recall of {header['recall']}")
    rows = Rows()
    rows.end = header["end"]
    for document, first_block, start, size, fingerprint in header["runs"]:
        first, end = index.span(document, layer)
        there = first <= first_block and first_block + size <= end
        if there and index.fingerprint(layer, document, first_block, size) == fingerprint:
            rows.runs.setdefault(document, []).append(Run(first_block, start, size))
            rows.live += size
    heads = [
        HeadIndex.load(header["family"], _unpacked(metric), Calibration(**calibration), part)
        for calibration, metric, part in zip(
            header["calibrations"], header["metrics"], parts, strict=True
        )
    ]
    built = Built(heads, rows, header["trained"])
    if built.stale:
        raise Unusable(f"{path.name} is stale: most of its keys are gone, or have come since")
    return built


def write_samples(directory: Path, samples: dict[tuple[int, int], np.ndarray]) -> None:
    """Write the queries float32 [n, D] of every (layer, KV head) that engines are trained and
    calibrated with.
    """
    header = {"heads": [[*key, *queries.shape] for key, queries in samples.items()]}
    _write(
        directory / "queries.idx",
        header,
        [queries.view(np.uint8).ravel() for queries in samples.values()],
    )


def read_samples(directory: Path) -> dict[tuple[int, int], np.ndarray]:
    """The inverse. Raises Unusable, FileNotFoundError."""
    header, parts = _read(directory / "queries.idx")
    return {
        (layer, head): part.view(np.float32).reshape(n, dim)
        for (layer, head, n, dim), part in zip(header["heads"], parts, strict=True)
    }


def _write(path: Path, header: dict[str, Any], parts: Sequence[np.ndarray]) -> None:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part.data)
    packed = msgpack.packb(
        header | {"lengths": [part.nbytes for part in parts], "payload": digest.digest()}
    )
    path.parent.mkdir(exist_ok=True)
    if path.parent.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "it is a link", str(path.parent))
    with replacement(path) as file:
        file.write(
            _MAGIC + len(packed).to_bytes(8, "little") + xxhash.xxh3_64(packed).digest() + packed
        )
        for part in parts:
            file.write(part.data)


def _read(path: Path) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The checked header and the parts, uint8 [n] each."""
    try:
        with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
            content = np.fromfile(file, dtype=np.uint8)
    except InvalidInput as error:
        raise Unusable(str(error)) from error
    if len(content) < _FIXED or content[: len(_MAGIC)].tobytes() != _MAGIC:
        raise Unusable(f"{path.name} is damaged, or of another version")
    end = _FIXED + int.from_bytes(content[len(_MAGIC) : len(_MAGIC) + 8].tobytes(), "little")
    packed = content[_FIXED:end].tobytes()
    if xxhash.xxh3_64(packed).digest() != content[len(_MAGIC) + 8 : _FIXED].tobytes():
        raise Unusable(f"{path.name} is damaged")
    header, payload = msgpack.unpackb(packed), content[end:]
    if (
        len(payload) != sum(header["lengths"])
        or xxhash.xxh3_64(payload.data).digest() != header["payload"]
    ):
        raise Unusable(f"{path.name} is damaged")
    return header, np.split(payload, np.cumsum(header["lengths"])[:-1])


def _packed(metric: QueryMetric) -> list[Any]:
    return [metric.mean.tobytes(), metric.of_keys.tobytes(), metric.of_queries.tobytes()]


def _unpacked(stored: list[Any]) -> QueryMetric:
    mean, of_keys, of_queries = (np.frombuffer(part, dtype=np.float32) for part in stored[:3])
    dim = len(mean)
    return QueryMetric(mean, of_keys.reshape(dim, dim), of_queries.reshape(dim, dim))
