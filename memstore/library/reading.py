"""The work of one worker: ingests a batch of documents into a temporary memory, and uploads them to
the object store of the library.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from memstore.compute import Compute
from memstore.documents import read
from memstore.errors import DocumentExists, InvalidInput
from memstore.hf.models_by_name import reader_named
from memstore.library.batch import Batch, Done, Given, Job, Outcome
from memstore.model.model_api import ModelAPI
from memstore.model.source_text import Text
from memstore.share.open_object_store import open_object_store
from memstore.share.upload import PublishOptions
from memstore.store.memory_store import MemoryStore
from memstore.store.open_options import on_device

_BUDGET = 128 << 20  # bytes of the host tier, of which an ingest reads its latest blocks alone
_PREFIX = "memstore-library-"


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
            text = _text(given)
        except InvalidInput as error:
            outcomes.append(Outcome.refused(given, error))
            continue
        if given.there == text.digest and given.as_wanted:
            outcomes.append(Outcome(given.name, "there", len(given.data)))
        elif given.there not in (None, text.digest) and not job.replace:
            outcomes.append(Outcome.refused(given, _other_content(given.name, job.url)))
        else:
            texts.append((given, text))
    if not texts:
        return Done(outcomes)
    reader = _reader(job.model, job.compute)
    with _scratch() as path, _memory(job, reader, path) as memory:
        for given, text in texts:
            outcomes.append(_ingest(job, reader, memory, given, text))
        if not memory.ready():
            return Done(outcomes)
        objects = open_object_store(job.url, make=True)
        # what is not to be replaced was refused above
        options = PublishOptions(keep=job.keep or "kv", replace=True)
        return Done(outcomes, memory.send(objects, options))


def _text(given: Given) -> Text:
    """Raises InvalidInput."""
    text = Text(read(given.data, given.path), given.name)
    text.check()
    return text


def _ingest(job: Job, reader: ModelAPI, memory: MemoryStore, given: Given, text: Text) -> Outcome:
    try:
        document = reader.ingest(text, memory, keep=job.keep)
    except (InvalidInput, DocumentExists) as error:
        if memory.has(given.name):  # what was read of it
            memory.forget(given.name)
        return Outcome.refused(given, error)
    size = len(given.data)
    return Outcome(given.name, "read", size, document.blocks, document.tokens, notes=text.notes)


def _other_content(name: str, url: str) -> DocumentExists:
    return DocumentExists(
        f"document {name!r} is published at {url} with other content; give --replace to put this "
        "in its place"
    )


@cache
def _reader(model: str, compute: Compute) -> ModelAPI:
    """One model for all batches of a process."""
    return reader_named(model, compute=compute)


def _memory(job: Job, reader: ModelAPI, path: Path) -> MemoryStore:
    return MemoryStore.create(
        path / "memory",
        reader.signature,
        codec=job.codec or reader.codec,
        selector=reader.keeps,
        **on_device({"host_budget": _BUDGET}, job.compute.device),
    )


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
