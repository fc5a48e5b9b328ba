"""Files of FAISS engines in a memory's directory, one a layer.

A file is a cache: it is read only if it is whole and of this kind, and used for those of its keys
that the memory still holds. Deleting it loses nothing.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from memstore.decode import Block, Count, Layer, Positive
from memstore.disk.files import sweep
from memstore.errors import InvalidInput, ReadOnlyMemory, StorageFull
from memstore.index.block_rows import Rows, Run
from memstore.index.faiss.faiss_candidates import Built
from memstore.index.faiss.faiss_head import Calibration, HeadIndex, QueryMetric, has_faiss
from memstore.index.faiss.faiss_index import FaissIndex
from memstore.index.index_file import Parts, Unusable, read_file, refusals, understood, write_file


def file_of(directory: Path, layer: int) -> Path:
    """Where a layer's engines are kept."""
    return directory / f"layer-{layer}.idx"


def write_engines(directory: Path, index: FaissIndex, layer: int) -> None:
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
        "trained": built.trained,
        "end": built.rows.end,
        "runs": runs,
        "calibrations": [asdict(head.calibration) for head in built.heads],
        "metrics": [_packed(head.metric) for head in built.heads],
    }
    write_file(file_of(directory, layer), header, [head.dump() for head in built.heads])


def read_engines(directory: Path, index: FaissIndex, layer: int) -> Built:
    """A layer's engines, for those of the keys they hold that the memory still has. Raises
    Unusable, FileNotFoundError.
    """
    path = file_of(directory, layer)
    header, parts = read_file(path, _Header)
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


PAYING = 65_536  # landmarks of a layer from where on `update` finds an engine worth building

log = logging.getLogger("memstore")


class FaissFiles:
    """The files of a FaissIndex in one directory."""

    def __init__(
        self, index: FaissIndex, layers: Sequence[int], directory: Path | None, *, read_only: bool
    ) -> None:
        """directory: None for a memory without one. read_only: what is built is not written."""
        self.index, self.layers = index, layers
        self.directory, self.read_only = directory, read_only
        self._opened: set[int] = set()
        self._opening = threading.RLock()

    def open(self, layer: int) -> None:
        """Take a layer's engines from their file, the first time it is asked for.

        They are rebuilt where the file is damaged, stale or unreadable, or, unless the index is
        "auto", missing.
        """
        if layer in self._opened:
            return
        with self._opening:
            if layer in self._opened:
                return
            self._opened.add(layer)
            if self.directory is None:
                return
            try:
                self.index.install(layer, read_engines(self.directory, self.index, layer))
                return
            except FileNotFoundError:
                if self.index.auto:
                    return
            except InvalidInput as error:  # no FAISS here
                log.warning("%s; searching exactly", error)
                return
            except (Unusable, OSError) as problem:
                log.warning(
                    "%s: %s; building it again from the landmark keys", self.directory, problem
                )
            self._take_samples()
            if self.index.auto and not self.index.queries.kept:
                log.warning(
                    "%s: no sample of queries; searching exactly until `memstore index` is run",
                    self.directory,
                )
                return
            self.index.build(layer)
            if not self.read_only:
                try:
                    self._write(layer)
                except (StorageFull, ReadOnlyMemory) as error:
                    log.warning("%s", error)

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Sample the queries of the searches in the block, all of them exact."""
        self._opened.update(self.layers)
        self.index.built.clear()
        with self.index.queries.sampled():
            yield

    def drop(self) -> None:
        """Drop all engines; the next search reads the files again."""
        with self._opening:
            self.index.drop_engines()
            self._opened.clear()

    def build(self, top_k: int, progress: Callable[[int, int], None] | None) -> dict[str, Any]:
        """Rebuild every layer's engines and write them; return their description. See
        MemoryStore.build_index.
        """
        self._opened.update(self.layers)
        if self.directory is not None and not self.directory.is_symlink():
            sweep(self.directory)
        if not self.index.queries.kept:
            self._take_samples()
        for done, layer in enumerate(self.layers):
            if progress is not None:
                progress(done, len(self.layers))
            self.index.build(layer, top_k)
            self._write(layer)
        if self.directory is not None and self.index.queries.kept:
            with refusals(self.directory):
                write_samples(self.directory, self.index.queries.kept)
        if progress is not None:
            progress(len(self.layers), len(self.layers))
        return self.index.describe()

    def update(self) -> bool:
        """Add new documents to the files; return whether an engine should be (re)built: where an
        "auto" index has enough landmarks and no engine, or an outgrown one. Raises StorageFull,
        ReadOnlyMemory.
        """
        if self.directory is None or self.read_only:
            return False
        due = False
        for layer in self.layers:
            self.open(layer)
            if layer not in self.index.built:
                due |= self.index.auto and self.index.landmarks(layer) >= PAYING and has_faiss()
            elif self.index.built[layer].stale:
                due = True
            elif self.index.join(layer):
                self._write(layer)
        return due

    @property
    def file_bytes(self) -> int:
        """Of the files of every layer."""
        files = [] if self.directory is None else self.directory.glob("*.idx")
        return sum(file.stat().st_size for file in files)

    def _take_samples(self) -> None:
        """The queries that were saved, if there are any."""
        if self.directory is None or self.index.queries.kept:
            return
        try:
            self.index.queries.kept = read_samples(self.directory)
        except FileNotFoundError:
            pass
        except (Unusable, OSError) as problem:
            log.warning("%s: %s", self.directory, problem)

    def _write(self, layer: int) -> None:
        if self.directory is None or layer not in self.index.built:
            return
        with refusals(self.directory):
            write_engines(self.directory, self.index, layer)
