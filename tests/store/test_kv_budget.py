"""Keys and values of passages are a cache with a budget: what is asked seldom is dropped, what a
question computed is stored behind its answer, and no answer depends on what is kept.
"""

import fcntl
import os
import shutil
from pathlib import Path
from random import Random

import pytest
import torch

from memstore.block import BlockKey
from memstore.disk.files import WRITER
from memstore.disk.tables.passage_rows import StoredPassage
from memstore.errors import InvalidInput, MissingBlock
from memstore.store.memory_store import MemoryStore
from memstore.store.verify.verify_memory import verify_memory
from memstore.tiers.lookup_trace import read_trace
from support.fork_server import PASSAGES, RIGHT, ForkServer
from support.passage_documents import LAYERS, add, ask, check_content, ingest, ingest_known
from support.selected_documents import create
from support.synthetic_documents import is_whole

KILLS = int(os.environ.get("MEMSTORE_KILLS", "6"))
SECONDS = int(os.environ.get("MEMSTORE_LOAD_SECONDS", "2"))
PROCESSES = 8 if SECONDS > 60 else 4
COUNT = 40
TURNS = int(os.environ.get("MEMSTORE_BUDGET_TURNS", "60"))


def told(store: MemoryStore) -> list[StoredPassage]:
    catalog = store._on_disk().catalog
    with catalog.database.read() as txn:
        return list(catalog.passages.all(txn))


def stored(store: MemoryStore) -> set[int]:
    """Blocks of the passages that have records."""
    return {row.home[1] for row in told(store) if row.bytes}


def bytes_of(store: MemoryStore) -> int:
    return store.stats()["passages"]["bytes"]


def memory(path: Path, budget: int | None = None, **options) -> MemoryStore:
    return create(path, codec="raw", kv_budget=budget, **options)


def test_a_budget_is_never_exceeded_while_a_document_is_read_in(tmp_path) -> None:
    with memory(tmp_path / "whole") as whole:
        ingest(whole, "book", COUNT)
        size = bytes_of(whole)
    with memory(tmp_path / "m", size // 3) as store:

        def check(blocks: int) -> None:
            assert bytes_of(store) <= size // 3

        document = ingest(store, "book", COUNT, after_batch=check)
        assert 0 < bytes_of(store) <= size // 3 and document.state == "ready"
        assert document.bytes == bytes_of(store)
        check_content(store, document, 1, whole=False)
        assert ingest_known(store, "copy", COUNT) == 0  # nothing of it is read in again
        assert is_whole(store.path)


def test_a_budget_is_kept_changed_and_lifted(tmp_path) -> None:
    with memory(tmp_path / "m") as store:
        ingest(store, "book", COUNT)
        size = bytes_of(store)
        store.set_kv_budget(size // 2)
        assert 0 < bytes_of(store) <= size // 2
    with MemoryStore.open(tmp_path / "m", host_budget=1 << 20) as store:
        assert store.kv_budget == size // 2 == store.stats()["passages"]["kv_budget"]
        store.set_kv_budget(0)
        assert not stored(store) and store.document("book").state == "ready"
        store.set_kv_budget(None)
        assert store.kv_budget is None
        ingest(store, "again", COUNT + 1, source_hash="again")
        assert len(stored(store)) == COUNT + 1 and is_whole(store.path)
        for budget in (-1, 1 << 62, "some"):
            with pytest.raises(InvalidInput, match="a kv budget is a whole number of bytes"):
                store.set_kv_budget(budget)


def test_what_is_asked_stays_and_what_is_not_goes(tmp_path) -> None:
    with memory(tmp_path / "m") as store:
        document = ingest(store, "book", COUNT)
        sizes = {row.home[1]: row.bytes for row in told(store)}
        popular = [3, 17, 30]
        store.set_kv_budget(sum(sizes.values()))
        for _ in range(40):
            for block in popular:
                assert not ask(store, document, 1, block)
    with MemoryStore.open(tmp_path / "m", host_budget=1 << 20) as store:
        store.set_kv_budget(sum(sizes[block] for block in popular) + max(sizes.values()))
        assert stored(store) >= set(popular)
        for block in range(COUNT):  # what is asked once does not take their place
            ask(store, document, 1, block)
        assert stored(store) >= set(popular) and is_whole(store.path)


def test_uses_long_ago_count_less_and_less(tmp_path) -> None:
    with memory(tmp_path / "m") as store:
        document = ingest(store, "book", COUNT)
        rows = {row.home[1]: row for row in told(store)}
        store.set_kv_budget(sum(rows[block].bytes for block in range(3)))
        for _ in range(100):
            ask(store, document, 1, 0)
        for block in [1, 2] * 300:
            ask(store, document, 1, block)
        for _ in range(300):
            for block in (5, 6, 7):  # no more than two of them fit, if the first one stays
                store._retrieval.tiers.drop_document(rows[block].number)
                ask(store, document, 1, block)
        assert 0 not in stored(store)


def test_what_was_computed_is_held_and_stored_behind_the_answer(tmp_path) -> None:
    with memory(tmp_path / "m", 0) as store:
        document = ingest(store, "book", COUNT)
        assert not stored(store)
        assert ask(store, document, 1, 5) and not ask(store, document, 1, 5)  # in the host tier
        assert not stored(store)
        store.set_kv_budget(1 << 20)
        assert ask(store, document, 1, 6)
        assert stored(store) == {6}
        counts = store.tier_stats()["computed"]
        assert counts["hits"] == 2 * 2 * len(LAYERS) and counts["seconds"] == pytest.approx(0.2)
        assert store.tiers.layers()["computed"][LAYERS[0]].hits == 4
    with MemoryStore.open(tmp_path / "m", read_only=True, host_budget=1 << 20) as store:
        assert not ask(store, document, 1, 6)  # another process reads it
        assert ask(store, document, 1, 7) and stored(store) == {6}


def test_text_alone_is_held_and_not_stored_without_a_budget(tmp_path) -> None:
    with memory(tmp_path / "m", 0) as store:
        document = ingest(store, "book", COUNT)
        store.set_kv_budget(None)
        assert ask(store, document, 1, 5) and not ask(store, document, 1, 5)
        assert not stored(store) and not any(row.worth for row in told(store))


def test_asking_never_waits_for_who_writes(tmp_path) -> None:
    with memory(tmp_path / "m", 1 << 20) as store:
        document = ingest(store, "book", COUNT)
        store.set_kv_budget(0)
        store.set_kv_budget(1 << 20)
    with MemoryStore.open(tmp_path / "m", host_budget=1 << 20) as store:
        with open(tmp_path / "m" / WRITER, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert ask(store, document, 1, 5) and not stored(store)
        writer = store.write_document(
            "other", source_hash="", settings=document.settings, commit_bytes=1
        )
        with writer:
            add(writer, 2, 0, 3)
            assert ask(store, document, 1, 6)
        assert 6 not in {row.home[1] for row in told(store) if row.bytes and row.home[0] == 1}
        assert ask(store, document, 1, 7)
        assert 7 in {row.home[1] for row in told(store) if row.bytes}


def test_what_is_dropped_while_it_is_looked_for_is_missing_and_no_other_error(tmp_path) -> None:
    with memory(tmp_path / "m") as store:
        document = ingest(store, "book", COUNT)
        ((number, _),) = store.stored_at([(document.id, 2)])
        with MemoryStore.open(tmp_path / "m", host_budget=1 << 20) as other:
            other.set_kv_budget(0)
        with pytest.raises(MissingBlock):
            store.lease([BlockKey(number, LAYERS[0], 0, 0)])


def test_random_storing_asking_dropping_and_forgetting_keeps_to_the_budget(tmp_path) -> None:
    rng, path = Random(7), tmp_path / "m"
    budget: int | None = 30_000
    with create(path, codec="zstd", kv_budget=budget) as store:
        held: dict[str, tuple[int, int]] = {}
        for turn in range(TURNS):
            name, what = rng.choice("abcd"), rng.random()
            if what < 0.2 or not held:
                text, count = rng.randint(1, 2), rng.randint(1, 25)
                mode = "replace" if name in held else "new"
                ingest_known(store, name, count, text=text, mode=mode)
                held[name] = text, count
            elif what < 0.25 and name in held:
                store.forget(name)
                del held[name]
            elif what < 0.35:
                budget = rng.choice([None, 0, 5_000, 20_000, 60_000])
                store.set_kv_budget(budget)
            else:
                name = rng.choice(list(held))
                text, count = held[name]
                for _ in range(5):
                    block = min(int(rng.expovariate(0.2)), count - 1)
                    ask(store, store.document(name), text, block)
            assert budget is None or bytes_of(store) <= budget
            if turn % 10 == 0:
                assert is_whole(path)
        for name, (text, _) in held.items():
            check_content(store, store.document(name), text, whole=False)
        assert is_whole(path)


@pytest.mark.parametrize("spoilt", ["worth", "kv"])
def test_a_lost_order_or_count_is_told_and_made_anew(tmp_path, spoilt) -> None:
    with memory(tmp_path / "m", 1 << 20) as store:
        document = ingest(store, "book", COUNT)
        catalog = store._on_disk().catalog

        def spoil(txn) -> None:
            if spoilt == "kv":
                txn.put("meta", b"kv", b"no count at all")
            else:
                txn.delete("worth", next(key for key, _ in txn.scan("worth")))

        catalog.database.write(spoil)
        assert not store.verify().clean
        assert not store.verify(repair=True).dropped and store.verify().clean
        check_content(store, document, 1)


@pytest.mark.timeout(900)
def test_kills_while_dropping_and_counting_lose_nothing(
    children: ForkServer, tmp_path: Path
) -> None:
    rng, origin = Random(3), tmp_path / "origin"
    with create(origin, codec="zstd", kv_budget=40_000) as store:
        ingest(store, "book", PASSAGES)
    undisturbed = shutil.copytree(origin, tmp_path / "undisturbed")
    assert children.run("budget_job", undisturbed) == RIGHT
    seconds = children.processor_seconds
    for kill in range(KILLS):
        path = shutil.copytree(origin, tmp_path / str(kill))
        children.kill(rng.uniform(0, seconds), "budget_job", path)
        assert children.run("check_job", path, "read_passages_job") == RIGHT
        with MemoryStore.open(path, host_budget=1 << 20) as store:
            store.compact()
            assert bytes_of(store) <= store.kv_budget
            assert {row.references for row in told(store)} <= {1} and is_whole(path)
        shutil.rmtree(path)


@pytest.mark.timeout(3600 if SECONDS > 60 else 300)
def test_processes_that_ask_write_drop_and_forget_harm_no_document(
    children: ForkServer, tmp_path: Path
) -> None:
    path = tmp_path / "memory"
    create(path, codec="zstd", kv_budget=20_000).close()
    assert children.run("crowd_job", path, SECONDS, PROCESSES) == RIGHT
    assert children.run("read_passages_job", path) == RIGHT
    assert verify_memory(path).clean
    with MemoryStore.open(path, host_budget=1 << 20) as store:
        assert bytes_of(store) <= store.kv_budget
        for document in store.documents():
            store.forget(document.name)
        store.compact()
        assert not told(store) and not bytes_of(store)


def test_the_units_of_a_passage_are_admitted_once(tmp_path) -> None:
    with memory(tmp_path / "m", 0) as store:
        document = ingest(store, "book", 3)
        tiers = store._retrieve().tiers
        held = tiers.host.bytes
        k = torch.zeros(len(LAYERS), 2, 1, store.signature.head_dim, dtype=torch.float16)
        for _ in range(2):
            store.take_computed(document.id, 0, k, k, 0.0)
        assert tiers.host.bytes - held == 2 * len(LAYERS) * tiers.host.unit_bytes


def test_what_is_computed_of_a_document_that_is_gone_is_read_and_not_held(tmp_path) -> None:
    with memory(tmp_path / "m", 1 << 20) as store:
        document = ingest(store, "book", 3)
        with MemoryStore.open(tmp_path / "m", host_budget=1 << 20) as other:
            other.forget("book")
        k = torch.ones(len(LAYERS), 2, 1, store.signature.head_dim, dtype=torch.float16)
        for half in store.take_computed(document.id, 0, k, k, 0.0):
            assert torch.equal(half, k)
        store.store_computed()
        assert not told(store)


def test_a_trace_has_what_was_computed_as_missed(tmp_path) -> None:
    with memory(tmp_path / "m", 0) as store:
        document = ingest(store, "book", 3)
    with MemoryStore.open(
        tmp_path / "m", read_only=True, host_budget=1 << 20, trace=tmp_path / "trace"
    ) as store:
        ask(store, document, 1, 0)
        ask(store, document, 1, 0)
    lookups = [(len(one.units), len(one.missed)) for one in read_trace(tmp_path / "trace")]
    assert lookups == [(2, 2)] * len(LAYERS) + [(2, 0)] * len(LAYERS)
