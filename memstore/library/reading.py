"""The task of a worker: ingest a batch of documents into a temporary memory, and upload them to the
library's object store.
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

_BUDGET = 128 << 20  # bytes of the host tier; an ingest reads only its latest blocks
_PREFIX = "memstore-library-"

Status = Literal["read", "there", "refused"]


class Given(NamedTuple):
    """A document to ingest."""

    name: str
    path: str  # its file's path, for errors
    data: bytes
    there: str | None = None  # digest of the text published under its name
    as_wanted: bool = False  # is that text published with this ingest's `keep`?


Batch = Sequence[Given]


class Outcome(NamedTuple):
    """The outcome of a document."""

    name: str
    status: Status
    size: int  # bytes of its file
    passages: int = 0  # ingested passages; blocks of a landmark model
    tokens: int = 0  # ingested tokens
    error: tuple[str, str] | None = None  # name and message of an error
    notes: tuple[str, ...] = ()  # notes on parts of its file that were not read

    @classmethod
    def refused(cls, given: Given, error: MemstoreError) -> "Outcome":
        """The outcome of a document that cannot be ingested."""
        return cls(given.name, "refused", len(given.data), error=(type(error).__name__, str(error)))


class Done(NamedTuple):
    """The outcome of a batch."""

    documents: list[Outcome]
    sent: Sent | None = None  # uploaded documents


@dataclass(frozen=True)
class Job:
    """Settings of ingesting and publishing documents."""

    url: str
    model: str
    compute: Compute
    codec: str | None = None  # of a new memory; None: the model's
    keep: Keep | None = None  # None: the model's default
    replace: bool = False


def read_batch(job: Job, batch: Batch) -> Done:
    """Ingest documents and upload them; report those that cannot be ingested.

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
        # documents that must not be replaced were refused above
        how = PublishOptions(keep=job.keep or "kv", replace=True)
        return Done(outcomes, upload(memory.committed.catalog, memory.ready(), objects, how))


def _ingest(job: Job, reader: ModelAPI, memory: MemoryStore, given: Given, text: Text) -> Outcome:
    try:
        document = reader.ingest(text, memory, keep=job.keep)
    except (InvalidInput, DocumentExists) as error:
        if memory.has(given.name):  # the ingested part of it
            memory.forget(given.name)
        return Outcome.refused(given, error)
    size = len(given.data)
    return Outcome(given.name, "read", size, document.blocks, document.tokens, notes=text.notes)


@cache
def _reader(model: str, compute: Compute) -> ModelAPI:
    """The model of this process, loaded once for all batches."""
    return reader_named(model, compute=compute)


@contextmanager
def _scratch() -> Iterator[Path]:
    """A temporary directory; also removes the directories of killed workers."""
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
