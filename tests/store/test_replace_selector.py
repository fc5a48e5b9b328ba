"""Another selector takes the place of a memory's own: all at once for whoever reads, and again from
where it was interrupted.
"""

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from memstore.disk.format.document import Document
from memstore.disk.format.index_spec import IndexSpec
from memstore.disk.lmdb.database import Database
from memstore.errors import InvalidInput, MemoryLocked, WrongModel
from memstore.store.memory_store import MemoryStore
from memstore.store.verify.verify_memory import verify_memory
from support.fork_server import RIGHT, ForkServer
from support.selected_documents import (
    FORM,
    OTHER,
    QUESTION,
    SETTINGS,
    check_content,
    create,
    find,
    ingest,
    selected,
)
from support.synthetic_documents import CHUNK, SIGNATURE, is_whole

KILLS = int(os.environ.get("MEMSTORE_KILLS", "6"))
SEED = int(os.environ.get("MEMSTORE_SEED", "0"))
SIZES = {"1": 30 * CHUNK + 3, "2": 5 * CHUNK, "3": 12 * CHUNK + 1}


def filled(path: Path, form: IndexSpec = FORM) -> Path:
    with create(path, form) as store:
        for name, tokens in SIZES.items():
            ingest(store, name, tokens, text=int(name), commit_bytes=1 << 20)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return filled(tmp_path / "memory")


def by_key(path: Path) -> tuple[object, list[bytes]]:
    """What a memory's documents are found by, whatever the generation of the keys."""
    held = selected(path)
    return held["form"], list(held["landmarks"].values())


def check_all(store: MemoryStore) -> None:
    for document in store.documents():
        check_content(store, document, text=int(document.name))


@pytest.mark.parametrize("form", [OTHER, replace(FORM, digest="new")])
def test_a_replaced_memory_is_as_if_read_with_the_new_selector(
    path: Path, tmp_path: Path, form: IndexSpec
) -> None:
    with MemoryStore.open(path) as store:
        check_all(store)
        seen: list[tuple[int, int]] = []
        store.replace_selector(form, find(form), lambda *at: seen.append(at))
        assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)] and store.selector == form
        check_all(store)
        ingest(store, "1", 40 * CHUNK, mode="append")
        check_all(store)
    assert is_whole(path)
    with MemoryStore.open(path) as store:
        check_all(store)
        store.replace_selector(FORM, find(FORM))
        check_all(store)
    direct = filled(tmp_path / "direct")
    with MemoryStore.open(direct) as store:
        ingest(store, "1", 40 * CHUNK, mode="append")
    again, at_once = selected(path), selected(direct)
    assert again["form"] == at_once["form"]
    values = [[value[8:] for value in held["landmarks"].values()] for held in (again, at_once)]
    assert values[0] == values[1]


def test_others_are_told_to_open_the_memory_anew(path: Path, tmp_path: Path) -> None:
    with MemoryStore.open(path) as store, MemoryStore.open(path) as other:
        check_all(other)
        old = other.token_maxima(QUESTION, 0, [(1, 0, 8)])

        def checking(document: Document) -> object:
            assert torch.equal(other.token_maxima(QUESTION, 0, [(1, 0, 8)]), old)
            check_all(other)
            return find(OTHER)(document)

        store.replace_selector(OTHER, checking)
        for use in (
            lambda: other.token_maxima(QUESTION, 0, [(1, 0, 8)]),
            lambda: other.word_scores({7: 1.0}, [(2, 0, 8)]),
            lambda: ingest(other, "4", CHUNK, text=4),
            lambda: ingest(other, "1", 40 * CHUNK, mode="append"),
            lambda: other.export_document("1", tmp_path / "file"),
        ):
            with pytest.raises(WrongModel, match="open the memory anew"):
                use()
    with MemoryStore.open(path) as store:
        check_all(store)
    assert is_whole(path)


def test_an_interrupted_one_is_unseen_and_goes_on(path: Path) -> None:
    asked: list[str] = []

    def until_the_third(document: Document) -> object:
        asked.append(document.name)
        if document.name == "3":
            raise KeyboardInterrupt
        return find(OTHER)(document)

    with MemoryStore.open(path) as store:
        with pytest.raises(KeyboardInterrupt):
            store.replace_selector(OTHER, until_the_third)
        assert store.selector == FORM
        check_all(store)
    assert verify_memory(path).clean
    with MemoryStore.open(path) as store:  # and is written meanwhile
        check_all(store)
        ingest(store, "1", 31 * CHUNK, mode="append")
        ingest(store, "4", 2 * CHUNK, text=4)
        check_all(store)
        asked.clear()
        store.replace_selector(OTHER, lambda row: asked.append(row.name) or find(OTHER)(row))
        assert asked == ["1", "3", "4"]
        check_all(store)
    assert verify_memory(path).clean


def test_one_that_was_given_up_leaves_nothing(path: Path) -> None:
    def stop(document: Document) -> object:
        if document.name == "2":
            raise KeyboardInterrupt
        return find(OTHER)(document)

    third = IndexSpec("words", "99" * 16, words=True)
    with MemoryStore.open(path) as store:
        with pytest.raises(KeyboardInterrupt):
            store.replace_selector(OTHER, stop)
        store.replace_selector(third, find(third))
        scores = store.word_scores({1 << 31 | 11: 1.0}, [(1, 0, 20)])
        assert scores.argmax() == 11
    assert is_whole(path)
    assert {len(key) for key in selected(path)["landmarks"]} == {15}
    assert len(selected(path)["landmarks"]) == len(SIZES)  # a run of words each


def test_damage_to_one_that_was_interrupted_costs_no_document(path: Path) -> None:
    def stop(document: Document) -> object:
        if document.name == "3":
            raise KeyboardInterrupt
        return find(OTHER)(document)

    def spoil(table: str, key: bytes) -> None:
        with Database.open(path) as database:
            with database.read() as txn:
                value = bytearray(txn.get(table, key) or b"")
            value[len(value) // 2] ^= 1
            database.write(lambda txn: txn.put(table, key, bytes(value)))

    with MemoryStore.open(path) as store, pytest.raises(KeyboardInterrupt):
        store.replace_selector(OTHER, stop)
    begun = [key for key in selected(path)["landmarks"] if key[8:10] == b"\0\2"]
    spoil("landmarks", begun[0])
    assert verify_memory(path).clean
    spoil("meta", b"selector_next")
    assert [problem.document for problem in verify_memory(path).problems] == [None]
    assert not verify_memory(path, repair=True).dropped
    with MemoryStore.open(path) as store:
        check_all(store)
        store.replace_selector(OTHER, find(OTHER))
        check_all(store)
    assert verify_memory(path).clean


def test_a_document_that_is_partly_read_goes_on_with_the_new_selector(path: Path) -> None:
    def stop(tokens: int) -> None:
        if tokens == 9 * CHUNK:
            raise KeyboardInterrupt

    with MemoryStore.open(path) as store:
        with pytest.raises(KeyboardInterrupt):
            ingest(store, "5", 12 * CHUNK, text=5, after_chunk=stop)
        store.replace_selector(OTHER, find(OTHER))
        ingest(store, "5", 12 * CHUNK, text=5)
        check_all(store)
    assert is_whole(path)


def test_what_does_not_cover_a_document_is_refused(path: Path, tmp_path: Path) -> None:
    before = by_key(path)
    whole = find(OTHER)
    with MemoryStore.open(path) as store:
        for wrong in (
            lambda row: [],
            lambda row: whole(row)[1:],
            lambda row: [*whole(row)[:1], *whole(row)[2:]],
            lambda row: whole(row)[::-1],
            lambda row: find(FORM)(row),
            lambda row: [(0, whole(row)[0][1][:-1], whole(row)[0][2]), *whole(row)[1:]],
        ):
            with pytest.raises(InvalidInput):
                store.replace_selector(OTHER, wrong)
            check_all(store)
    assert by_key(path) == before and is_whole(path)
    plain = MemoryStore.create(tmp_path / "plain", SIGNATURE)
    with plain as store, pytest.raises(InvalidInput, match="new memory"):
        store.replace_selector(FORM, find(FORM))


def test_nothing_is_written_meanwhile(path: Path) -> None:
    with MemoryStore.open(path) as store:

        def writing(document: Document) -> object:
            for write in (
                lambda: ingest(store, "9", CHUNK, text=9),
                lambda: store.forget("2"),
                lambda: store.replace_selector(OTHER, find(OTHER)),
            ):
                with pytest.raises(MemoryLocked):
                    write()
            return find(OTHER)(document)

        store.replace_selector(OTHER, writing)
        check_all(store)
        writer = store.write_document("9", source_hash="9:1", settings=SETTINGS)
        with writer, pytest.raises(MemoryLocked):
            store.replace_selector(FORM, find(FORM))
    assert is_whole(path)


def test_killed_at_random_instants_it_is_the_old_or_the_new(
    children: ForkServer, tmp_path: Path
) -> None:
    chance = random.Random(SEED)
    seconds = float("inf")
    for name in ("first", "second"):
        filled(tmp_path / name)
        assert children.run("replace_selector_job", tmp_path / name) == RIGHT
        seconds = min(seconds, children.processor_seconds)
    expected = by_key(tmp_path / "second")
    assert expected[0] == OTHER
    seen = set()
    for kill in range(KILLS):
        memory = filled(tmp_path / str(kill))
        children.kill(chance.uniform(0, seconds), "replace_selector_job", memory)
        assert is_whole(memory), f"kill {kill} of seed {SEED}"
        with MemoryStore.open(memory) as store:
            seen.add(store.selector)
            check_all(store)
        assert children.run("replace_selector_job", memory) == RIGHT
        assert by_key(memory) == expected, f"kill {kill} of seed {SEED}"
    assert FORM in seen
