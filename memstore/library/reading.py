"""The work of one worker of a library: it ingests a batch of documents into a temporary memory, and
uploads them to the library's object store.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from memstore.compute import Compute
from memstore.disk.tables.texts import Keep
from memstore.documents import read
from memstore.errors import DocumentExists, InvalidInput, MemstoreError
from memstore.hf.models_by_name import reader_named
from memstore.model.model_api import ModelAPI
from memstore.model.source_text import Text
from memstore.share.open_object_store import open_object_store
from memstore.share.publish import PublishOptions, Sent, upload
from memstore.store.memory_store import MemoryStore
from memstore.store.open_options import on_device

_BUDGET = 128 << 20  # bytes of the host tier, of which an ingest reads its latest blocks alone
_PREFIX = "memstore-library-"

Status = Literal["read", "there", "refused"]


class Given(NamedTuple):
    """A document to ingest."""

    name: str
    path: str  # of its file, for errors
    data: bytes
    there: str | None = None  # digest of the text that is published under its name
    as_wanted: bool = False  # is that kept as this ingest keeps texts?


Batch = Sequence[Given]


class Outcome(NamedTuple):
    """The outcome for a document."""

    name: str
    status: Status
    size: int  # bytes of its file
    passages: int = 0  # that were ingested; blocks, of a landmark model
    tokens: int = 0  # that were ingested
    error: tuple[str, str] | None = None  # the name of an error, and its message
    notes: tuple[str, ...] = ()  # what of its file was not read

    @classmethod
    def refused(cls, given: Given, error: MemstoreError) -> "Outcome":
        """The outcome for a document that cannot be ingested."""
        return cls(given.name, "refused", len(given.data), error=(type(error).__name__, str(error)))


class Done(NamedTuple):
    """The outcome for a batch."""

    documents: list[Outcome]
    sent: Sent | None = None  # what was uploaded of them


@dataclass(frozen=True)
class Job:
    """How documents are ingested, and where they are published."""

    url: str
    model: str
    compute: Compute
    codec: str | None = None  # of a new memory; None for the model's
    keep: Keep | None = None  # None: as the model does by itself
    replace: bool = False


def read_batch(job: Job, batch: Batch) -> Done:
    """Ingest documents and upload them. One that cannot be ingested is reported, and does not stop
    the others.

    Raises InvalidWeights, StorageFull (this machine's), WrongModel, StoreUnavailable,
    CorruptMemory.
    """
    outcomes: list[Outcome] = []
    texts: list[tuple[Given, Text]] = []
    for given in batch:
        try:
            text = Text(read(given.data, given.path), given.name)
            text.check()
        except InvalidInput as error:
            outcomes.append(Outcome.refused(given, error))
            continue
        if given.there == text.digest and given.as_wanted:
            outcomes.append(Outcome(given.name, "there", len(given.data)))
        elif given.there not in (None, text.digest) and not job.replace:
            outcomes.append(Outcome.refused(given, DocumentExists.published(given.name, job.url)))
        else:
            texts.append((given, text))
    if not texts:
        return Done(outcomes)
    reader = _reader(job.model, job.compute)
    options = on_device({"host_budget": _BUDGET}, job.compute.device)
    codec, selector = job.codec or reader.codec, reader.keeps
    with (
        _scratch() as path,
        MemoryStore.create(
            path / "memory", reader.signature, codec=codec, selector=selector, **options
        ) as memory,
    ):
        for given, text in texts:
            outcomes.append(_ingest(job, reader, memory, given, text))
        if not memory.ready():
            return Done(outcomes)
        objects = open_object_store(job.url, make=True)
        # what is not to be replaced was refused above
        how = PublishOptions(keep=job.keep or "kv", replace=True)
        return Done(outcomes, upload(memory.committed.catalog, memory.ready(), objects, how))


def _ingest(job: Job, reader: ModelAPI, memory: MemoryStore, given: Given, text: Text) -> Outcome:
    try:
        document = reader.ingest(text, memory, keep=job.keep)
    except (InvalidInput, DocumentExists) as error:
        if memory.has(given.name):  # what was read of it
            memory.forget(given.name)
        return Outcome.refused(given, error)
    size = len(given.data)
    return Outcome(given.name, "read", size, document.blocks, document.tokens, notes=text.notes)


@cache
def _reader(model: str, compute: Compute) -> ModelAPI:
    """One model for all batches of a process."""
    return reader_named(model, compute=compute)


@contextmanager
def _scratch() -> Iterator[Path]:
    """A directory until the block ends. Directories of killed workers are removed."""
    parent = Path(tempfile.gettempdir())
    for left in parent.glob(f"{_PREFIX}*"):
        with suppress(ValueError, OSError):
            process = int(left.name.removeprefix(_PREFIX).partition("-")[0])
            try:
                os.kill(process, 0)
            except ProcessLookupError:
                shutil.rmtree(left, ignore_errors=True)
    prefix = f"{_PREFIX}{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as path:
        yield Path(path)
