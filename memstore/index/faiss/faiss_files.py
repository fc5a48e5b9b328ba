"""The files of a memory's FAISS engines: opened when a layer is first searched, built anew where
that is needed.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memstore.disk.files import sweep
from memstore.errors import InvalidInput, ReadOnlyMemory, StorageFull
from memstore.index.faiss import faiss_format
from memstore.index.faiss.faiss_head import has_faiss
from memstore.index.faiss.faiss_index import FaissIndex
from memstore.index.index_file import Unusable, refusals

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

        They are built anew where the file is damaged, stale or unreadable, or, for an index but
        "auto", missing; what cannot be written then is only missing again the next time.
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
                self.index.install(layer, faiss_format.read(self.directory, self.index, layer))
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
        """Keep the queries of the searches made meanwhile, all of them exact."""
        self._opened.update(self.layers)
        self.index.built.clear()
        with self.index.queries.sampled():
            yield

    def drop(self) -> None:
        """Hold nothing that was built; what is in the files is read again when it is searched."""
        with self._opening:
            self.index.drop_engines()
            self._opened.clear()

    def build(self, top_k: int, progress: Callable[[int, int], None] | None) -> dict[str, Any]:
        """Build every layer's engines anew and write them; return what was built. See
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
                faiss_format.write_samples(self.directory, self.index.queries.kept)
        if progress is not None:
            progress(len(self.layers), len(self.layers))
        return self.index.describe()

    def update(self) -> bool:
        """Bring the files up to the documents that came since; is it time to build anew (or for the
        first time)?

        That is where an "auto" index holds as many landmarks as pay for an engine, and has none or
        an outgrown one. Raises StorageFull, ReadOnlyMemory.
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
            self.index.queries.kept = faiss_format.read_samples(self.directory)
        except FileNotFoundError:
            pass
        except (Unusable, OSError) as problem:
            log.warning("%s: %s", self.directory, problem)

    def _write(self, layer: int) -> None:
        if self.directory is None or layer not in self.index.built:
            return
        with refusals(self.directory):
            faiss_format.write(self.directory, self.index, layer)
