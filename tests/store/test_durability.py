"""SIGKILL at random instants, flipped bytes and truncated files: committed data is never lost, and
a wrong block is never returned.

MEMSTORE_KILLS (4) and MEMSTORE_FLIPS (24) set the number of trials; `make soak` sets more.
MEMSTORE_SEED chooses other instants.
"""

import os
import random
import shutil
import signal
import time
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch

from memstore.disk.lmdb.database import Database, Transaction
from memstore.disk.lmdb.transaction import record_range
from memstore.errors import CorruptMemory, MemoryNotFound
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer import export_document
from memstore.store.verify import verify_memory
from support import passage_documents
from support.fork_server import (
    NAMED_ERROR,
    RIGHT,
    TOKENS,
    ForkServer,
    changes_job,
    index_job,
    ingest_job,
)
from support.selected_documents import create as create_selected
from support.synthetic_documents import (
    BUDGET,
    CHUNK,
    SIGNATURE,
    check_content,
    ingest,
    opened,
    stored,
)

KILLS = int(os.environ.get("MEMSTORE_KILLS", "4"))
FLIPS = int(os.environ.get("MEMSTORE_FLIPS", "24"))
SEED = int(os.environ.get("MEMSTORE_SEED", "0"))

pytestmark = pytest.mark.timeout(3600 if KILLS > 20 or FLIPS > 200 else 900)


def new_memory(path: Path) -> Path:
    MemoryStore.create(path, SIGNATURE, host_budget=BUDGET).close()
    return path


def check_memory(children: ForkServer, path: Path) -> None:
    """Verify is clean, and every visible document holds a prefix of its text, bit for bit."""
    assert children.run("verify_job", path) == RIGHT
    with opened(path) as store:
        for document in store.documents():
            check_content(store, document, text=int(document.source_hash.split(":")[0]))
            assert document.state == "ready" or document.tokens % CHUNK == 0


def seconds_of(children: ForkServer, job: str, path: Path, *arguments: object) -> float:
    """How much of a processor a job takes; it is done in `path`."""
    assert children.run(job, path, *arguments) == RIGHT
    return children.processor_seconds


def test_killed_ingest_resumes_to_the_bytes_of_an_uninterrupted_one(
    children: ForkServer, tmp_path: Path
) -> None:
    chance = random.Random(SEED)
    once = [new_memory(tmp_path / name) for name in ("first", "second")]
    seconds = min(seconds_of(children, "ingest_job", path) for path in once)

    @cache
    def expected(number: int) -> dict[str, dict[bytes, bytes]]:
        """What is stored of the document with this number: a kill may cost one."""
        memory = new_memory(tmp_path / f"number {number}")
        with opened(memory) as store:
            for _ in range(1, number):
                ingest(store, "other", CHUNK)
                store.forget("other")
        ingest_job(str(memory))
        return stored(memory)

    def check(path: Path) -> None:
        with opened(path) as store:
            check_content(store, store.document("book"), text=1)
            number = store.document("book").id
        assert stored(path) == expected(number), f"kill {kills} of seed {SEED}"

    memory, memories, kills = new_memory(tmp_path / "0"), 1, 0
    reached: Counter[int] = Counter()
    while kills < KILLS:
        if not children.kill(chance.uniform(0, seconds), "ingest_job", memory):
            check(memory)
            memory, memories = new_memory(tmp_path / str(memories)), memories + 1
            continue
        kills += 1
        check_memory(children, memory)
        with MemoryStore.open(memory, read_only=True) as store:
            reached[sum(document.tokens for document in store.documents()) * 10 // TOKENS] += 1
        resumed = shutil.copytree(memory, tmp_path / "resumed")
        ingest_job(str(resumed))
        check(resumed)
        shutil.rmtree(resumed)
    assert len(reached) > 1, "every kill came before the first commit or after the last"
    assert verify_memory(memory).clean


def test_killed_changes_leave_the_old_or_new_state(children: ForkServer, tmp_path: Path) -> None:
    chance = random.Random(SEED + 1)
    origin = new_memory(tmp_path / "origin")
    export = tmp_path / "export"
    with opened(origin) as store:
        ingest(store, "comes", 20 * CHUNK + 5, text=5)
        export_document(store, "comes", export)
        store.forget("comes")
        ingest(store, "grows", 20 * CHUNK + 3, text=2)
        ingest(store, "changes", 20 * CHUNK, text=1)
        ingest(store, "goes", 20 * CHUNK, text=4)
    seconds = seconds_of(
        children, "changes_job", shutil.copytree(origin, tmp_path / "undisturbed"), export
    )
    for kill in range(max(1, KILLS // 2)):
        memory = shutil.copytree(origin, tmp_path / str(kill))
        children.kill(chance.uniform(0, seconds), "changes_job", memory, export)
        check_memory(children, memory)
        with opened(memory) as store:
            names = {document.name for document in store.documents()}
            assert {"grows", "changes"} <= names <= {"grows", "changes", "goes", "comes"}
            assert store.document("changes").state == "ready"
        changes_job(str(memory), str(export))
        check_memory(children, memory)
        with opened(memory) as store:
            done = {
                document.name: (document.state, document.source_hash)
                for document in store.documents()
            }
        assert done == {
            "grows": ("ready", f"2:{40 * CHUNK + 9}"),
            "changes": ("ready", f"3:{25 * CHUNK + 3}"),
            "comes": ("ready", f"5:{20 * CHUNK + 5}"),
        }
        shutil.rmtree(memory)


def test_killed_index_build_is_complete_or_absent(children: ForkServer, tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    chance = random.Random(SEED + 4)
    origin = new_memory(tmp_path / "origin")
    with opened(origin) as store:
        ingest(store, "book", 300 * CHUNK, commit_bytes=1 << 20)
    seconds = min(
        seconds_of(children, "index_job", shutil.copytree(origin, tmp_path / name))
        for name in ("first", "second")
    )
    wanted = {file.name for file in (tmp_path / "second" / "index").iterdir()}
    for kill in range(max(1, KILLS // 2)):
        memory = shutil.copytree(origin, tmp_path / str(kill))
        children.kill(chance.uniform(0, seconds), "index_job", memory)
        with opened(memory) as store:
            check_content(store, store.document("book"), text=1)
            q = torch.ones(SIGNATURE.num_kv_heads, 1, SIGNATURE.head_dim)
            scope = [(store.document("book").id, 0, store.document("book").blocks)]
            for layer in SIGNATURE.memory_layers:
                assert torch.isfinite(
                    store.retrieval.landmarks(scope).search(layer, q, scope, 2).scores
                ).all()
        index_job(str(memory))
        assert {file.name for file in (memory / "index").iterdir()} == wanted
        check_memory(children, memory)
        shutil.rmtree(memory)


def test_killed_repair_can_be_repeated(children: ForkServer, tmp_path: Path) -> None:
    chance = random.Random(SEED + 5)
    origin = new_memory(tmp_path / "origin")
    with opened(origin) as store:
        ingest(store, "kept", 20 * CHUNK + 5, text=1)
        ingest(store, "too", 20 * CHUNK, text=3)
        number = ingest(store, "damaged", 20 * CHUNK, text=2).id

    def spoil(txn: Transaction) -> None:
        found = [(key, bytes(record)) for key, record in txn.scan("blocks", *record_range(number))]
        for key, record in found:
            txn.put("blocks", key, record[:-1] + bytes([record[-1] ^ 255]))

    with Database.open(origin) as database:
        database.write(spoil)
    began = time.perf_counter()
    assert children.run("repair_job", shutil.copytree(origin, tmp_path / "undisturbed")) == RIGHT
    seconds = time.perf_counter() - began
    for kill in range(max(1, KILLS // 4)):
        memory = shutil.copytree(origin, tmp_path / str(kill))
        pid = children.start("repair_job", memory)
        time.sleep(chance.uniform(0, seconds))
        os.kill(pid, signal.SIGKILL)
        assert children.end() in (RIGHT, -signal.SIGKILL)
        verify_memory(memory, repair=True)
        with opened(memory) as store:
            assert [document.name for document in store.documents()] == ["kept", "too"]
            ingest(store, "after", 5 * CHUNK, text=7)
        check_memory(children, memory)
        assert {entry.name for entry in memory.iterdir()} == {
            "data.mdb", "lock.mdb", "writer.lock"
        }  # fmt: skip
        shutil.rmtree(memory)


# Damaged files


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory with zstd records, free pages, and a document that was replaced."""
    path = new_memory(tmp_path_factory.mktemp("sound") / "memory")
    with opened(path) as store:
        ingest(store, "forgotten", 6 * CHUNK, text=3)
        ingest(store, "one", 12 * CHUNK + 5, text=1)
        store.forget("forgotten")
        ingest(store, "two", 3 * CHUNK + 2, text=2)
        ingest(store, "two", 8 * CHUNK + 1, text=2, mode="replace")
    return path


def damaged_copy(path: Path, data: bytes) -> Path:
    path.mkdir()
    (path / "data.mdb").write_bytes(data)
    return path


@pytest.fixture(scope="module")
def sound_passages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory of passages with their landmarks and words, without free pages."""
    path = tmp_path_factory.mktemp("sound") / "passages"
    with create_selected(path) as store:
        passage_documents.ingest(store, "one", 40)
        passage_documents.ingest(store, "one", 60, mode="replace")
        passage_documents.ingest(store, "two", 40, text=2)
        store.compact()
    return path


@pytest.mark.parametrize(
    ("memory", "job", "trials"),
    [("sound", "read_all_job", FLIPS), ("sound_passages", "read_passages_job", 2 * FLIPS)],
)
def test_flipped_bytes_never_give_a_wrong_answer(
    memory: str,
    job: str,
    trials: int,
    children: ForkServer,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    chance = random.Random(SEED + 2)
    whole = (request.getfixturevalue(memory) / "data.mdb").read_bytes()
    assert children.run(job, damaged_copy(tmp_path / "whole", whole)) == RIGHT
    assert children.run("verify_job", tmp_path / "whole") == RIGHT
    outcomes: Counter[str] = Counter()
    for trial in range(trials):
        data = bytearray(whole)
        where = [chance.randrange(len(data)) for _ in range(chance.choice([1, 1, 1, 4]))]
        for at in where:
            data[at] ^= chance.choice([1 << chance.randrange(8), chance.randrange(1, 256)])
        path = damaged_copy(tmp_path / str(trial), bytes(data))
        read = children.run(job, path)
        died = -read in (signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE)
        assert read in (RIGHT, NAMED_ERROR) or died, f"{read} of flips at {where} (seed {SEED})"
        if read != RIGHT:
            assert children.run("verify_job", path) == NAMED_ERROR, f"{where}: verify missed it"
        outcomes[{RIGHT: "right", NAMED_ERROR: "named error"}.get(read, "death")] += 1
        shutil.rmtree(path)
    assert outcomes["named error"] > FLIPS // 10, outcomes


def test_cut_file_is_refused_or_right(children: ForkServer, sound: Path, tmp_path: Path) -> None:
    chance = random.Random(SEED + 3)
    whole = (sound / "data.mdb").read_bytes()
    lengths = [0, 1, 4095, 4096, 8192, len(whole) - 1, len(whole) - 4096]
    lengths += [chance.randrange(len(whole)) for _ in range(FLIPS // 5)]
    outcomes: Counter[int] = Counter()
    for trial, length in enumerate(lengths):
        path = damaged_copy(tmp_path / str(trial), whole[:length])
        outcome = children.run("read_all_job", path)
        assert outcome in (RIGHT, NAMED_ERROR), f"outcome {outcome} of a file cut to {length} bytes"
        if outcome == RIGHT:  # nothing but free pages was cut off
            assert children.run("verify_job", path) == RIGHT
        else:
            with pytest.raises((CorruptMemory, MemoryNotFound)):
                MemoryStore.open(path).close()
        outcomes[outcome] += 1
        shutil.rmtree(path)
    assert outcomes[NAMED_ERROR] > len(lengths) // 2
