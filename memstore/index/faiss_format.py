"""Index files: what was built over a layer's keys, kept beside a memory so that it need not be
built again.

A file is a cache. It is read only if it is whole, of this kind, and then for exactly those of its
keys that the memory still holds; deleting it loses nothing.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import msgspec
import numpy as np
import xxhash

from memstore.decode import Block, Count, Layer, Positive, unpack
from memstore.disk.files import DATA, mode_of, open_regular, replacement
from memstore.errors import InvalidInput
from memstore.index.block_rows import Rows, Run
from memstore.index.faiss_candidates import Built
from memstore.index.faiss_head import Calibration, HeadIndex
from memstore.index.faiss_index import FaissIndex
from memstore.index.metric import QueryMetric

_MAGIC = b"memstore index 2\n"
_FIXED = len(_MAGIC) + 16  # then the header's length and its checksum


class Unusable(Exception):
    """An index file that is damaged, of another kind, or of other keys; says which."""


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
        for document, of_document in built.rows.runs.items()
        for run in of_document
    ]
    header = {
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

    An index of which no recall was asked takes what there is. Raises Unusable, FileNotFoundError.
    """
    path = file_of(directory, layer)
    header, parts = _read(path, _Header)
    if index.wanted_recall not in (None, header.recall):
        raise Unusable(f"{path.name} is calibrated for a recall of {header.recall}")
    with _understood(path):
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
            runs = rows.runs.setdefault(document, [])
            if runs and runs[-1].end_block != first_block:
                raise ValueError("its runs are not in order")
            runs.append(Run(first_block, start, size))
            rows.live += size
    if not len(parts) == len(header.metrics) == len(header.calibrations) == index.num_kv_heads:
        raise ValueError(f"{len(parts)} heads instead of {index.num_kv_heads}")
    heads = []
    for calibration, stored, part in zip(header.calibrations, header.metrics, parts):
        metric = _unpacked(stored, index.head_dim)
        head = HeadIndex.load(metric, calibration, part)
        head.check(index.head_dim, rows.end)
        heads.append(head)
    return Built(heads, rows, header.trained)


@contextmanager
def _understood(path: Path) -> Iterator[None]:
    """Whatever goes wrong over a file's content, in our code or in FAISS, it is Unusable; but what
    is InvalidInput (no FAISS here) stays so.
    """
    try:
        yield
    except (Unusable, InvalidInput):
        raise
    except Exception as error:
        raise Unusable(f"{path.name} is not understood ({error})") from error


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
    path = directory / "queries.idx"
    header, parts = _read(path, _Samples)
    with _understood(path):
        samples = {
            (layer, head): part.view(np.float32).reshape(n, dim)
            for (layer, head, n, dim), part in zip(header.heads, parts, strict=True)
        }
        if not all(np.isfinite(queries).all() for queries in samples.values()):
            raise ValueError("it has numbers that are not finite")
        return samples


def _write(path: Path, header: dict[str, Any], parts: Sequence[np.ndarray]) -> None:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part.data)
    packed = msgpack.packb(
        header | {"lengths": [part.nbytes for part in parts], "payload": digest.digest()}
    )
    data = path.parent.with_name(DATA)  # the index is as private as what it is of
    if not path.parent.exists():
        mode = mode_of(data) or 0o600
        path.parent.mkdir(mode=0o700)
        path.parent.chmod(mode | 0o100 | (mode & 0o044) >> 2)
    if path.parent.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "it is a link", str(path.parent))
    with replacement(path, like=data) as file:
        file.write(
            _MAGIC + len(packed).to_bytes(8, "little") + xxhash.xxh3_64(packed).digest() + packed
        )
        for part in parts:
            file.write(part.data)


class _Parts(msgspec.Struct):
    lengths: list[Count]
    payload: bytes


class _Header(_Parts):
    recall: float
    trained: Positive
    end: Positive
    runs: list[tuple[int, Block, Count, Positive, bytes]]
    calibrations: list[Calibration]
    metrics: list[tuple[bytes, bytes, bytes]]


class _Samples(_Parts):
    heads: list[tuple[Layer, Layer, Count, Positive]]


H = TypeVar("H", bound=_Parts)


def _read(path: Path, form: type[H]) -> tuple[H, list[np.ndarray]]:
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
    with _understood(path):
        header, payload = unpack(packed, form), content[end:]
        if (
            len(payload) != sum(header.lengths)
            or xxhash.xxh3_64(payload.data).digest() != header.payload
        ):
            raise Unusable(f"{path.name} is damaged")
        return header, np.split(payload, np.cumsum(header.lengths)[:-1])


def _packed(metric: QueryMetric) -> list[Any]:
    return [metric.mean.tobytes(), metric.of_keys.tobytes(), metric.of_queries.tobytes()]


def _unpacked(stored: tuple[bytes, bytes, bytes], dim: int) -> QueryMetric:
    mean, of_keys, of_queries = (np.frombuffer(part, dtype=np.float32) for part in stored)
    if not all(np.isfinite(part).all() for part in (mean, of_keys, of_queries)):
        raise ValueError("its metric is not finite")
    return QueryMetric(mean.reshape(dim), of_keys.reshape(dim, dim), of_queries.reshape(dim, dim))
