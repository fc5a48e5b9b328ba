"""Ingesting a library: files in batches to the workers of a cluster, and one manifest at the end
that names everything they staged.

A text that is published or staged is not ingested again, so the same command continues where an
earlier one ended, whichever of its processes did.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from memstore.documents.converted import LIMITS
from memstore.documents.folder import File
from memstore.errors import InvalidInput
from memstore.library.batch import Batch, Given, Job, Outcome, Progress
from memstore.library.ray_engine import RayEngine
from memstore.share.manifest import Entry
from memstore.share.object_store import ObjectStore
from memstore.share.open_object_store import open_object_store
from memstore.share.publish import check_form
from memstore.share.published import Published
from memstore.share.staging import find_staged, publish_staged, read_all, remove_staged
from memstore.store.memory_store import MemoryStore

_BATCH = 128 << 10  # bytes of files in a batch at most, but for one that is larger
_LEAST = 4 << 10
_DOCUMENTS = 256  # in a batch
_EACH = 8  # batches for every worker at least, so that none is waited for long


OnProgress = Callable[[Progress, list[Outcome]], None]
"""Takes the progress, and the outcomes that are new in it."""


def ingest_library(
    files: Sequence[File], job: Job, engine: RayEngine, on_progress: OnProgress
) -> tuple[Progress, int]:
    """Ingest files and publish them; return the progress, and the number of the manifest.

    engine: any object with RayEngine's methods. Raises WrongModel, StoreUnavailable, and what
    read_batch and the engine raise; then what is staged stays, and the same call continues.
    """
    return _Ingest(files, job, engine, on_progress).run()


def index_library(url: str, progress: Callable[[int, int], None]) -> bool:
    """Make the lists of a published library for search in two stages, where it is large enough;
    return whether it was. progress: called with (tokens done, tokens). Raises what MemoryStore.open
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
        self._objects: ObjectStore = open_object_store(job.url, make=True)
        self._first = engine.describe(job)
        newest = Published.newest(self._objects)
        check_form(self._first, newest, job.url)
        names = [file.name for file in files]
        self._before = {} if newest is None else newest.entries(names)
        self._staged = find_staged(self._objects, self._first)
        self._digests: dict[str, str] = {}  # of texts that are to be published, by name
        self._progress = Progress(len(files), sum(_size(file) for file in files))

    def run(self) -> tuple[Progress, int]:
        sent: list[str] = []
        for done in self._engine.read(self._job, self._batches()):
            if done.staged is not None:
                sent.append(done.staged)
            self._add(done.documents)
        self._staged += read_all(self._objects, self._first, sent)
        wanted = {n: d for n, d in self._digests.items() if d not in self._published(n)}
        outcome = publish_staged(
            self._objects,
            self._first,
            wanted,
            self._found(wanted),
            self._before,
            replace=self._job.replace,
        )
        names = {file.name for file in self._files}
        remove_staged(self._objects, self._staged, names)
        self._say_refused(outcome.refused)
        return self._progress, outcome.number

    def _add(self, documents: list[Outcome]) -> None:
        for outcome in documents:
            self._progress.add(outcome)
            if outcome.status != "refused":
                self._digests[outcome.name] = outcome.digest
        self._on_progress(self._progress, documents)

    def _found(self, wanted: Mapping[str, str]) -> dict[str, Entry]:
        """Staged entries of texts, by name and digest."""
        return {
            name: entry
            for held in self._staged
            for name, entry in held.entries.items()
            if wanted.get(name) == entry.row.source_hash and self._as_kept(entry)
        }

    def _say_refused(self, names: Sequence[str]) -> None:
        """Report documents under whose names others published other content."""
        url = self._job.url
        for name in names:
            self._progress.documents.subtract(["read"])
            self._progress.documents["refused"] += 1
            why = f"document {name!r} was published at {url} by another process"
            self._on_progress(
                self._progress, [Outcome(name, "refused", 0, error=("DocumentExists", why))]
            )

    # Published and staged texts

    def _published(self, name: str) -> tuple[str, ...]:
        """The digest of the text that is published under a name, if it is kept as wanted."""
        entry = self._before.get(name)
        if entry is None or not self._as_kept(entry):
            return ()
        return (entry.row.source_hash,)

    def _as_kept(self, entry: Entry) -> bool:
        if self._job.keep is None:
            return True
        records = any(piece.kind == "records" for piece in entry.pieces)
        return not entry.row.of_passages or records == (self._job.keep == "kv")

    def _known(self, name: str) -> tuple[str, ...]:
        """The digests of texts of this name that are not ingested again."""
        staged = [held.entries[name] for held in self._staged if name in held.entries]
        if name in self._before and not self._job.replace:
            staged = []
        return (
            *self._published(name),
            *(entry.row.source_hash for entry in staged if self._as_kept(entry)),
        )

    # Batches

    def _batches(self) -> Iterator[Batch]:
        """Batches of files, read as workers ask for them."""
        most = self._progress.bytes // (_EACH * self._engine.workers)
        most = min(_BATCH, max(_LEAST, most))
        batch: list[Given] = []
        for file in self._files:
            try:
                batch.append(self._given(file))
            except InvalidInput as error:
                refused = Given(file.name, str(file.path), b"", ())
                self._add([Outcome.refused(refused, error)])
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
        taken = self._before.get(file.name)
        return Given(
            file.name,
            str(file.path),
            data,
            self._known(file.name),
            None if taken is None else taken.row.source_hash,
        )


def _size(file: File) -> int:
    with suppress(OSError):
        return file.path.stat().st_size
    return 0
