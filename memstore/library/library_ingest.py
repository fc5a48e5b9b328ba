"""Ingest a library: send files in batches to the workers of a cluster, which ingest and upload
them, and write the manifests that name the uploaded documents.

A published text is not ingested again, so the same command resumes after any of its processes
ended.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from memstore.documents.converted import LIMITS
from memstore.documents.folder import File
from memstore.errors import InvalidInput
from memstore.library.ray_engine import RayEngine
from memstore.library.reading import Batch, Done, Given, Job, Outcome, Status
from memstore.share.contents import Entry
from memstore.share.manifest import Manifest, find_newest
from memstore.share.open_object_store import open_object_store
from memstore.share.publish import Sent, publish_sent
from memstore.store.memory_store import MemoryStore

_BATCH = 128 << 10  # most bytes of files in a batch, unless one file is larger
_LEAST = 4 << 10
_DOCUMENTS = 256  # most documents in a batch
_EACH = 8  # least batches for each worker, so that all finish at about the same time
_COMMIT_SECONDS = 30.0  # seconds between two manifests


@dataclass
class Progress:
    """The progress of all workers."""

    files: int
    bytes: int  # bytes of all files
    done: int = 0  # bytes of finished files
    documents: Counter[Status] = field(default_factory=Counter)
    passages: int = 0
    tokens: int = 0  # tokens ingested by this command
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    @property
    def tokens_per_second(self) -> float:
        """Tokens that all workers ingest in a second."""
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float:
        """Estimated remaining seconds, from the speed so far."""
        return self.seconds * (self.bytes - self.done) / max(1, self.done)

    def add(self, outcome: Outcome) -> None:
        """Count a finished document."""
        self.done += outcome.size
        self.documents[outcome.status] += 1
        self.passages += outcome.passages
        self.tokens += outcome.tokens


OnProgress = Callable[[Progress, list[Outcome]], None]
"""Takes the progress, and its new outcomes."""


def ingest_library(
    files: Sequence[File], job: Job, engine: RayEngine, on_progress: OnProgress
) -> tuple[Progress, int]:
    """Ingest files and publish them; return the progress, and the number of the newest manifest (0:
    none).

    Finished batches are published twice a minute, and stay published if the ingest fails later.
    engine: any object with RayEngine's methods. Raises WrongModel, StoreUnavailable, and what
    read_batch and the engine raise.
    """
    return _Ingest(files, job, engine, on_progress).run()


def index_library(url: str, progress: Callable[[int, int], None]) -> bool:
    """Build the lists of a published library for search in two stages, if it is large enough;
    return whether it is. progress: called with (tokens done, tokens). Raises what MemoryStore.open
    and build_index raise.
    """
    with MemoryStore.open(url, read_only=True) as memory:
        due = memory.update_index()
        if due:
            memory.build_index(progress=progress)
        return due


class _Ingest:
    def __init__(
        self, files: Sequence[File], job: Job, engine: RayEngine, on_progress: OnProgress
    ) -> None:
        self._files, self._job, self._engine, self._on_progress = files, job, engine, on_progress
        self._objects = open_object_store(job.url, make=True)
        newest = find_newest(self._objects)
        self._number = 0 if newest is None else newest.number
        self._before: Mapping[str, Entry] = {} if newest is None else newest.entries
        self._first: Manifest | None = None  # the manifest to start from if nothing is published
        self._entries: dict[str, Entry] = {}  # uploaded documents that no manifest names yet
        self._committed = time.monotonic()
        self._progress = Progress(len(files), sum(_size(file) for file in files))

    def run(self) -> tuple[Progress, int]:
        try:
            for done in self._engine.read(self._job, self._batches()):
                self._add(done)
                if time.monotonic() - self._committed > _COMMIT_SECONDS:
                    self._commit()
        finally:
            self._commit()
        return self._progress, self._number

    def _add(self, done: Done) -> None:
        if done.sent is not None:
            self._first = done.sent.first
            self._entries |= done.sent.entries
        for outcome in done.documents:
            self._progress.add(outcome)
        self._on_progress(self._progress, done.documents)

    def _commit(self) -> None:
        """Publish uploaded documents, except under names with other content published by others."""
        if self._first is not None and self._entries:
            sent, self._entries = Sent(self._first, self._entries, self._before, []), {}
            self._number, refused = publish_sent(self._objects, sent, replace=self._job.replace)
            for name in refused:
                self._progress.documents.subtract(["read"])
                self._progress.documents["refused"] += 1
                why = f"document {name!r} was published at {self._job.url} by another process"
                outcome = Outcome(name, "refused", 0, error=("DocumentExists", why))
                self._on_progress(self._progress, [outcome])
        self._committed = time.monotonic()

    def _as_kept(self, entry: Entry) -> bool:
        """Is a document published with or without keys and values, as this ingest would?"""
        if self._job.keep is None:
            return True
        return not entry.row.of_passages or (entry.records > 0) == (self._job.keep == "kv")

    # Batches

    def _batches(self) -> Iterator[Batch]:
        """Batches of files, read when a worker asks for one."""
        most = self._progress.bytes // (_EACH * self._engine.workers)
        most = min(_BATCH, max(_LEAST, most))
        batch: list[Given] = []
        for file in self._files:
            try:
                batch.append(self._given(file))
            except InvalidInput as error:
                refused = Given(file.name, str(file.path), b"")
                self._add(Done([Outcome.refused(refused, error)]))
            if sum(len(one.data) for one in batch) >= most or len(batch) == _DOCUMENTS:
                yield batch
                batch = []
        if batch:
            yield batch

    def _given(self, file: File) -> Given:
        try:
            with Path(file.path).open("rb") as opened:
                data = opened.read(LIMITS.file_bytes + 1)
        except OSError as error:
            raise InvalidInput(f"cannot read {file.path}: {error.strerror}") from None
        there = self._before.get(file.name)
        if there is None:
            return Given(file.name, str(file.path), data)
        return Given(file.name, str(file.path), data, there.row.source_hash, self._as_kept(there))


def _size(file: File) -> int:
    with suppress(OSError):
        return file.path.stat().st_size
    return 0
