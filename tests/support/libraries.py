"""Folders to ingest as libraries, an engine that ingests them in this process, and checks of what
is published.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from memstore.closing import Closing
from memstore.compute import Compute
from memstore.documents.folder import find
from memstore.library import library_ingest, reading
from memstore.library.library_ingest import Progress, ingest_library
from memstore.library.reading import Batch, Done, Job, Outcome
from memstore.model.model_api import ModelAPI
from memstore.share.manifest import MANIFESTS, read_newest
from memstore.share.object_store import ObjectStore
from memstore.share.open_object_store import open_object_store
from memstore.share.publish import prune
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer import publish_memory, pull_document
from memstore.store.verify import verify_published
from support.passage_reader import reader_of
from support.synthetic_documents import stored

_WORDS = ("the", "old", "mill", "red", "fox", "river", "copper", "anchor", "orchard", "kettle")
_WORDS += ("ladder", "lies", "near", "under", "harbour", "boats", "night", "wind", "bridge", "door")


def sentences(seed: int, count: int) -> str:
    chance = random.Random(seed)
    lines = [" ".join(chance.choices(_WORDS, k=9)) for _ in range(count)]
    return "".join(f"{line.capitalize()}.\n" for line in lines)


def folder(path: Path, documents: int, lines: int = 6) -> Path:
    """A folder of texts; each second one has the sentences of the one before it, too."""
    path.mkdir()
    for number in range(documents):
        text = sentences(number, lines) + (sentences(number - 1, lines) if number % 2 else "")
        (path / f"{number:03}.txt").write_text(text)
    return path


class Here(Closing):
    """Runs batches one after the other in this process, as an engine with `workers` would."""

    def __init__(self, workers: int = 2) -> None:
        self.workers = workers
        self.before: Callable[[int], object] = lambda batch: None

    def read(self, job: Job, batches: Iterable[Batch]) -> Iterator[Done]:
        for number, batch in enumerate(batches):
            self.before(number)
            yield reading.read_batch(job, batch)

    def close(self) -> None:
        """It has nothing to close."""


@cache
def tiny() -> ModelAPI:
    """One for all tests: a passage model of random weights."""
    return reader_of()


@pytest.fixture
def passages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a few documents are read by the tiny passage model."""
    monkeypatch.setattr(reading, "_reader", lambda model, compute: tiny())
    monkeypatch.setattr(library_ingest, "_LEAST", 1000)
    monkeypatch.setattr(library_ingest, "_COMMIT_SECONDS", 3600.0)


def job(url: str, **more: Any) -> Job:
    return replace(Job(url, "tiny", Compute()), **more)


def ingest(
    path: Path, job: Job, engine: Here | None = None
) -> tuple[Progress, int, dict[str, Outcome]]:
    """What came of a folder: in all, the manifest, and of each document by its name."""
    told: dict[str, Outcome] = {}

    def on_progress(progress: Progress, documents: list[Outcome]) -> None:
        told.update((one.name, one) for one in documents)

    files = find([str(path)]).files
    return *ingest_library(files, job, engine or Here(), on_progress), told


def one_process(path: Path, memory: Path, url: str, **options: Any) -> None:
    """Ingests and publishes the same folder with one process."""
    made = MemoryStore.create(
        memory, tiny().signature, selector=tiny().keeps, codec=options.pop("codec", tiny().codec)
    )
    with made as store:
        for file in find([str(path)]).files:
            tiny().ingest(file.path, store, name=file.name, **options)
        publish_memory(store, url, keep=options.get("keep", "kv"))


def content(url: str, tmp_path: Path) -> dict[str, dict[bytes, bytes]]:
    """All that is published, without times and ids of writes: pulled in order of names."""
    manifest = read_newest(open_object_store(url))
    number = len([*tmp_path.glob("pulled-*")])
    path = tmp_path / f"pulled-{number}"
    made = MemoryStore.create(
        path, manifest.signature, codec=manifest.codec, selector=manifest.selector
    )
    with made as store:
        for name in manifest.entries:
            pull_document(store, name, url)
    return stored(path)


def clean(url: str) -> None:
    """All of it is whole, and pruning leaves only what the newest manifest names."""
    objects: ObjectStore = open_object_store(url)
    assert verify_published(url).clean
    prune(objects, grace=0.0)
    there = {found.name for found in objects.names("segments")}
    assert there == read_newest(objects).segments
    assert len([*objects.names(MANIFESTS)]) == 1
