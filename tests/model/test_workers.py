"""Ingesting by several processes: they store what one process stores, to rounding, and none of them
outlives the ingest, however it ends.
"""

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from support.commands import STORY, refused, run, start, whole, write_model
from support.processes import TELLS_CHILDREN, children_of, runs
from support.tiny_decoder import decoder, learned_selector, saved, tokenizer

pytest.importorskip("transformers")

from memstore import MemoryStore, load_model, load_reader, wrap
from memstore.disk.files import DATA
from memstore.disk.format.runs import TokenRun
from memstore.disk.lmdb.transaction import TABLES
from memstore.disk.tables.passage_table import Digest
from memstore.errors import InvalidInput, InvalidWeights, MemstoreError, WrongModel
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.hf.weights import made_here
from memstore.model.passages import worker_pool as by_workers
from memstore.model.passages.adaptation import Adaptation, save_selector
from memstore.model.passages.passage_encoding import compute
from memstore.model.passages.selector import Selector
from memstore.model.passages.worker_pool import Workers
from memstore.model.passages.worker_process import Worker
from memstore.model.texts.source_text import Text
from memstore.tiers.raw_bits import from_raw
from support.forked_workers import forked_workers
from support.rounding import assert_same_to_rounding

WORDS = ["mill", "ferry", "captain", "lantern", "orchard", "harbour", "anchor", "letter", "river"]


def prose(sentences: int, seed: int = 0) -> str:
    rng = Random(seed)
    return " ".join(
        f"The {' '.join(rng.choice(WORDS) for _ in range(rng.randint(3, 20)))} has number {at}."
        for at in range(sentences)
    )


@cache
def long_prose() -> str:
    return prose(20_000)


BOOK = prose(110)
Other = Callable[[HuggingFacePassageModel, MemoryStore, "Workers | int"], None]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A decoder, for which a selector of landmarks and words was made."""
    path = tmp_path_factory.mktemp("workers")
    saved(path / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMSTORE_CACHE", str(path / "cache"))
        plain = load_reader(path / "model", dtype=torch.float32)
        assert isinstance(plain, HuggingFacePassageModel)
        weights = plain.made_for.weights
        made = Adaptation(learned_selector(plain, word_weight=1.0), top_k=3, weights=weights)
        where = made_here(weights)
        where.parent.mkdir(parents=True)
        save_selector(made, plain.made_for, where)
        yield path / "model"


@pytest.fixture(scope="module")
def reader(directory: Path) -> HuggingFacePassageModel:
    loaded = load_reader(directory)
    assert isinstance(loaded, HuggingFacePassageModel) and loaded.keeps.heads and loaded.keeps.words
    return loaded


@pytest.fixture(scope="module")
def crews(reader: HuggingFacePassageModel) -> "Iterator[dict[int, Workers | int]]":
    """Workers by their number, that have begun."""
    with reader.workers(2) as two, reader.workers(3) as three:
        two.start()
        with forked_workers():
            three.start()
        yield {1: 1, 2: two, 3: three}


def create(reader: HuggingFacePassageModel, path: Path, codec: str = "int8") -> MemoryStore:
    return MemoryStore.create(path, reader.signature, codec=codec, selector=reader.keeps)


class Content(NamedTuple):
    """All that a memory holds, but for what is drawn anew or told by a clock."""

    exact: dict[str, Any]
    keys_values: dict[tuple[Digest, int], Tensor]  # by passage and layer; in int8
    landmarks: list[Tensor]  # float16

    @classmethod
    def of(cls, store: MemoryStore) -> "Content":
        rows = [
            replace(row, created=0.0, writes=tuple(one._replace(id=b"") for one in row.writes))
            for row in store.documents()
        ]
        exact: dict[str, Any] = {"rows": rows, "runs": []}
        keys_values, landmarks = {}, []
        catalog = store._on_disk().catalog
        with catalog.database.read() as txn:
            for table in set(TABLES) - {"documents", "meta", "blocks", "landmarks"}:
                exact[table] = [(bytes(key), bytes(value)) for key, value in txn.scan(table)]
            for _, run in (one for row in rows for one in catalog.runs.runs(txn, row.id)):
                if isinstance(run, TokenRun):
                    landmarks.append(torch.tensor(run.landmarks))
                    run = run._replace(landmarks=np.zeros_like(run.landmarks))
                exact["runs"].append(catalog.runs.form.encode(run))
            for row in rows:
                for _, passage in catalog.passages_of(txn, row):
                    for key, record in catalog.blocks.walk(txn, passage.number):
                        k, v, _ = catalog.blocks.decode(record, key, passage.digest)
                        both = from_raw(np.stack((k, v)), catalog.signature.kv_dtype)
                        keys_values[passage.digest, key.layer] = both
        assert all(exact.values()) and keys_values and landmarks
        return cls(exact, keys_values, landmarks)


def assert_same(found: Content, expected: Content) -> None:
    """The same texts, and the same numbers to rounding: who computes a passage, and with which
    others, decides the last bits, and so a step of int8 here and there.
    """
    assert found.exact == expected.exact
    assert_same_keys_and_values(found, expected)
    for one, other in zip(found.landmarks, expected.landmarks, strict=True):
        assert_same_to_rounding(one, other)


def assert_same_keys_and_values(found: Content, expected: Content) -> None:
    assert found.keys_values.keys() == expected.keys_values.keys()
    for place, both in expected.keys_values.items():
        step = 1.1 * float(both.abs().max()) / 127
        torch.testing.assert_close(found.keys_values[place], both, rtol=0, atol=step)


def plain(reader: HuggingFacePassageModel, store: MemoryStore, crew: "Workers | int") -> None:
    reader.ingest(BOOK, store, name="book", workers=crew)


def text_alone(reader: HuggingFacePassageModel, store: MemoryStore, crew: "Workers | int") -> None:
    reader.ingest(BOOK, store, name="book", workers=crew, keep="text")
    reader.ingest(BOOK + prose(40, 1), store, name="more", workers=crew)


def replaced(reader: HuggingFacePassageModel, store: MemoryStore, crew: "Workers | int") -> None:
    reader.ingest(BOOK, store, name="book", workers=crew)
    edited = BOOK.replace("number 50.", "number fifty.").replace("number 90.", "no number.")
    reader.ingest(edited, store, name="book", workers=crew, mode="replace")


def appended(reader: HuggingFacePassageModel, store: MemoryStore, crew: "Workers | int") -> None:
    reader.ingest(BOOK, store, name="book", workers=crew)
    reader.ingest(prose(70, 2), store, name="book", workers=crew, mode="append")


def resumed(reader: HuggingFacePassageModel, store: MemoryStore, crew: "Workers | int") -> None:
    for _ in range(2):
        steps = reader.ingesting(BOOK, store, name="book", workers=crew)
        for _ in range(2):
            next(steps)
        steps.close()
    reader.ingest(BOOK, store, name="book", workers=crew)


def several(reader: HuggingFacePassageModel, store: MemoryStore, crew: "Workers | int") -> None:
    texts = [Text(prose(5, seed % 9), f"{seed}") for seed in range(12)]  # three of them twice
    if isinstance(crew, Workers):
        crew.expect([Text(prose(4, 20), "does not come"), *texts[1:7], texts[9], *texts[7:9]])
    for text in texts:
        reader.ingest(text, store, workers=crew)


@pytest.mark.parametrize("way", [plain, text_alone, replaced, appended, resumed, several])
def test_several_processes_store_what_one_process_stores(
    reader: HuggingFacePassageModel, crews: "dict[int, Workers | int]", tmp_path: Path, way: Other
) -> None:
    found = []
    for number, crew in crews.items():
        with create(reader, tmp_path / f"{number}") as store:
            way(reader, store, crew)
            found.append(Content.of(store))
        assert whole(tmp_path / f"{number}")
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


@pytest.fixture
def forks() -> Iterator[None]:
    with forked_workers():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Many short documents, one that cannot be read, and a long one at the end."""
    path = tmp_path / "folder"
    path.mkdir()
    for at in range(14):
        (path / f"{at:02}.txt").write_text(prose(1 + at % 4, at))
    (path / "05.txt").write_bytes(b"\xff\xfe no text \x00")
    (path / "zz.txt").write_text(BOOK)
    for file in path.iterdir():
        os.utime(file, (1e9, 1e9))  # one that is new is read to see whether it changed
    return path


@pytest.mark.usefixtures("forks")
def test_a_folder_is_read_in_as_by_one_process(
    reader: HuggingFacePassageModel, directory: Path, folder: Path, tmp_path: Path
) -> None:
    found, edited = [], folder / "03.txt"
    for number in (1, 3):
        report: list[Any] = []
        for text in (prose(4, 3), prose(4, 3) + " And this.", prose(4, 3) + " And this."):
            edited.write_text(text)
            os.utime(edited, (1e9 + len(text), 1e9 + len(text)))
            done = run(
                *("ingest", folder, "--recursive", "--sync", "--store", tmp_path / f"{number}"),
                *("--model", directory, "--workers", number, "--json"),
            )
            assert done.status == 1 and "05.txt is UTF-16" in done.err
            report += [done.json["failed"], done.json["documents"]]
            for result in report[-1]:
                del result["seconds"]
        with MemoryStore.open(tmp_path / f"{number}", reader.signature) as store:
            found.append((report, Content.of(store)))
    (expected_report, expected), (report, several) = found
    assert report == expected_report
    assert_same(several, expected)


def test_documents_that_come_fill_a_forward_pass(
    reader: HuggingFacePassageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [Text(prose(1, seed), f"{seed}") for seed in range(20)]
    passes: list[int] = []

    def counted(reader: HuggingFacePassageModel, passages: Any, layers: Any) -> Any:
        passes.append(len(passages))
        return compute(reader, passages, layers)

    monkeypatch.setattr(by_workers, "compute", counted)
    with create(reader, tmp_path / "m") as store, reader.workers(1) as alone:
        alone.expect(texts[1:])
        for text in texts:
            reader.ingest(text, store, workers=alone)
    assert sum(passes) == 20 and len(passes) < 8


@pytest.mark.usefixtures("forks")
def test_a_file_that_changed_since_it_was_looked_at_is_read_anew(
    reader: HuggingFacePassageModel,
    directory: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ingest, looked_at = HuggingFacePassageModel.ingest, folder / "04.txt"
    text = looked_at.read_text().replace("number", "letter")

    def change(self: HuggingFacePassageModel, source: Text, *args: Any, **more: Any) -> Any:
        document = ingest(self, source, *args, **more)
        if source.name == "01.txt":
            looked_at.write_text(text)
        return document

    monkeypatch.setattr(HuggingFacePassageModel, "ingest", change)
    memory = ("--store", tmp_path / "m", "--model", directory)
    run("ingest", folder, "--recursive", "--workers", 2, *memory)
    with MemoryStore.open(tmp_path / "m", reader.signature) as store:
        (one,) = store.passages("04.txt")
        assert reader.tokenizer.decode(one.ids.tolist()) == text


def test_whoever_cannot_be_helped_is_told_in_one_line(
    reader: HuggingFacePassageModel, directory: Path, tmp_path: Path
) -> None:
    book = tmp_path / "book.txt"
    book.write_text(STORY)
    landmarks = write_model(tmp_path / "landmarks")
    for number, model, why in (
        (0, directory, "at least 1"),
        (-1, directory, "at least 1"),
        (2, landmarks, "leave workers out"),
    ):
        command = ("ingest", book, "--store", tmp_path / f"of_{model.name}", "--workers", number)
        refused(run(*command, "--model", model), why)
    with create(reader, tmp_path / "m") as store:
        for crew in (0, 2.5, "2", None):
            with pytest.raises(InvalidInput, match="at least 1"):
                reader.ingest(STORY, store, name="a", workers=crew)
        wrapped = wrap(decoder("llama"), tokenizer())
        with pytest.raises(InvalidInput, match="load it by name"):
            wrapped.workers(2)
        given = load_reader(directory, adaptation=Adaptation(Selector()))
        with pytest.raises(InvalidInput, match="load it by name"):
            given.workers(2)
    model = load_model(landmarks)
    with (
        MemoryStore.create(tmp_path / "l", model.signature) as store,
        pytest.raises(InvalidInput, match="leave workers out"),
    ):
        model.ingest(STORY, store, name="a", workers=2)


@pytest.mark.usefixtures("forks")
def test_a_model_that_changed_since_is_not_taken_for_the_same(
    directory: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(directory, tmp_path / "model")
    loaded = load_reader(copied)
    other = decoder("llama")
    with torch.no_grad():
        next(other.parameters()).mul_(1.5)
    other.save_pretrained(copied)
    with loaded.workers(2) as crew, pytest.raises(WrongModel, match="changed since"):
        crew.start()
    shutil.rmtree(copied)
    with loaded.workers(2) as crew, pytest.raises(InvalidInput, match="there is no model"):
        crew.start()


@pytest.mark.usefixtures("forks")
def test_what_a_worker_raises_is_raised(directory: Path, tmp_path: Path) -> None:
    model = decoder("llama")
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[:, 0] = 0
        embedding[tokenizer().encode("~")[0], 0] = 9
        model.model.layers[0].self_attn.k_proj.weight[:, 0] = 1e9
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    loaded = load_reader(tmp_path / "model")
    assert loaded.worker is not None
    good, bad = map(tokenizer().encode, ("good", "~"))
    for asked, error, said in (
        (bad, InvalidWeights, "cannot be stored"),
        ([1 << 30], MemstoreError, "worker process failed \\(IndexError"),
    ):
        worker = Worker([*loaded.worker, "1"])
        worker.wait()
        (computed,) = worker.compute([good], None)
        expected = next(compute(loaded, [good])).k
        assert_same_to_rounding(computed.k, expected, dtype=torch.float32)
        with pytest.raises(error, match=said):
            worker.compute([asked], None)
        worker.end()
        worker.close()
    with create(loaded, tmp_path / "m") as store, loaded.workers(2) as crew:
        crew.start()
        loaded.ingest(BOOK, store, name="good", workers=crew)
        with pytest.raises(InvalidWeights, match="cannot be stored"):
            loaded.ingest(prose(100, 1) + " ~~~ ", store, name="bad", workers=crew)
        assert [(row.name, row.state) for row in store.documents()] == [
            ("good", "ready"),
            ("bad", "ingesting"),
        ]
    assert whole(tmp_path / "m")


@pytest.mark.skipif(not TELLS_CHILDREN, reason="the system does not tell which processes there are")
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_is_killed_ends_the_ingest_which_goes_on_later(
    reader: HuggingFacePassageModel, tmp_path: Path, number: signal.Signals
) -> None:
    before = set(children_of(os.getpid()))
    book = prose(700)  # more than all of them are given at once
    with create(reader, tmp_path / "m") as store:
        with reader.workers(3) as crew:
            crew.start()
            begun = set(children_of(os.getpid())) - before
            assert len(begun) == 2
            steps = reader.ingesting(book, store, name="book", workers=crew)
            next(steps)
            os.kill(min(begun), number)
            with pytest.raises(MemstoreError, match=f"ended by signal {number:d}; what was read"):
                for _ in steps:
                    assert store.document("book").state != "ready"
        assert not any(map(runs, begun))
        kept = store.document("book")
        assert kept.state == "ingesting" and kept.blocks > 0
        reader.ingest(book, store, name="book")
        with create(reader, tmp_path / "other") as other:
            reader.ingest(book, other, name="book")
            assert_same_keys_and_values(Content.of(store), Content.of(other))
    assert whole(tmp_path / "m")


@pytest.mark.skipif(not TELLS_CHILDREN, reason="the system does not tell which processes there are")
@pytest.mark.parametrize(
    ("number", "late", "fresh"),
    [
        (signal.SIGINT, False, True),
        (signal.SIGINT, True, False),
        (signal.SIGTERM, False, False),
        (signal.SIGTERM, True, False),
        (signal.SIGKILL, False, False),
        (signal.SIGKILL, True, "MEMSTORE_KILLS" in os.environ),
    ],
)
def test_no_worker_outlives_the_command(
    directory: Path, tmp_path: Path, number: signal.Signals, late: bool, fresh: bool
) -> None:
    """late: when the first passages are stored, and not while the workers load the model. fresh:
    all are Pythons of their own, not forks.
    """
    book, own, workers = tmp_path / "book.txt", tmp_path / "tmp", 2 if fresh else 3
    own.mkdir()
    book.write_text(long_prose())
    with nullcontext() if fresh else forked_workers():
        process = start(
            *("ingest", book, "--store", tmp_path / "m"),
            *("--model", directory, "--workers", workers),
            fresh=fresh,
            env={"TMPDIR": str(own)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    begun: list[int] = []
    while len(begun) < workers - 1 and process.poll() is None:
        begun = children_of(process.pid)
        time.sleep(0.01)
    assert process.stderr is not None
    while late and "tokens a second" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(number)
    _, err = process.communicate()
    expected = -number if number == signal.SIGKILL else 128 + number
    assert process.returncode == expected, err
    while any(map(runs, begun)):
        time.sleep(0.01)
    assert "Traceback" not in err
    if number != signal.SIGKILL:
        assert not list(own.iterdir())
    if late or (tmp_path / "m" / DATA).exists():  # ended early, it may not have made the memory yet
        assert whole(tmp_path / "m")


@pytest.mark.skipif(not TELLS_CHILDREN, reason="the system does not tell which processes there are")
def test_an_interrupt_while_they_begin_ends_all_of_them(
    reader: HuggingFacePassageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, begin = [], threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        begun.append(thread)
        if len(begun) == 2:
            raise KeyboardInterrupt
        begin(thread)

    before = {*children_of(os.getpid())}
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), reader.workers(4) as workers:
        workers.start()
    monkeypatch.undo()
    assert len(begun) == 2 and {*children_of(os.getpid())} == before
