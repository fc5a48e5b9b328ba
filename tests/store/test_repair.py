"""What a repair rescues: everything that can be reached in a damaged file, and nothing else."""

import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lmdb
import pytest

from memstore.disk.format.document import Document
from memstore.disk.lmdb.database import Database
from memstore.disk.lmdb.locks import WriterLock
from memstore.disk.lmdb.meta_pages import Tree, read_states
from memstore.disk.lmdb.pages import BRANCH, NO_PAGE
from memstore.disk.salvage import is_sound, salvage
from memstore.errors import CorruptMemory, MemoryLocked, MemstoreError
from memstore.store.memory_store import MemoryStore
from memstore.store.verify.verify_memory import verify_memory
from support import passage_documents, synthetic_documents
from support.fork_server import ForkServer
from support.selected_documents import create as create_selected
from support.synthetic_documents import CHUNK, SIGNATURE, is_whole

PAGES_APART = int(os.environ.get("MEMSTORE_PAGES_APART", "12"))  # of those that are spoiled
BUDGET, PAGE = 1 << 20, 4096
TEXTS = {"one": 1, "two": 2, "three": 3, "four": 4}


def ingest(store: MemoryStore, name: str, tokens: int, **options: Any) -> Document:
    """Read a text of about so many tokens, as the memory holds texts."""
    if store.selector is None:
        return synthetic_documents.ingest(store, name, tokens, **options)
    return passage_documents.ingest(store, name, -(-tokens // 3), **options)


def check_content(store: MemoryStore, document: Document, text: int) -> None:
    """Of passages a repair may leave the text alone."""
    if store.selector is None:
        synthetic_documents.check_content(store, document, text=text)
    else:
        passage_documents.check_content(store, document, text=text, whole=False)


def is_of_passages(path: Path) -> bool:
    with MemoryStore.open(path, read_only=True) as store:
        return store.selector is not None


@pytest.fixture(scope="module", params=["blocks", "passages"])
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory of four documents, with free pages."""
    path = tmp_path_factory.mktemp("repair") / "memory"
    if request.param == "passages":
        made = create_selected(path, host_budget=BUDGET)
    else:
        made = MemoryStore.create(path, SIGNATURE, host_budget=BUDGET)
    with made as store:
        ingest(store, "gone", 5 * CHUNK, text=9)
        for name, text in TEXTS.items():
            ingest(store, name, 9 * CHUNK + text, text=text)
        store.forget("gone")
    return path


@pytest.fixture
def memory(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound, tmp_path / "memory")


def tree_pages(path: Path) -> dict[int, set[tuple[str, int]]]:
    """Every page of keys, with the tables and documents that it has entries of."""
    with open(path / "data.mdb", "rb") as file:
        states = read_states(file.fileno())
        tree = Tree(file.fileno(), states.page_size)
        pages: dict[int, set[tuple[str, int]]] = {states.newest: {("", 0)}}
        for table, root in tree.tables(states.newest).items():
            todo = [] if root == NO_PAGE else [root]
            while todo:
                number = todo.pop()
                page = tree.page(number)
                nodes = page.nodes()
                if page.flags & BRANCH:
                    todo += [node.page for node in nodes]
                    pages[number] = {(table, 0)}
                else:
                    owners = {int.from_bytes(node.key[:8], "big") for node in nodes}
                    pages[number] = {(table, 0 if table == "meta" else at) for at in owners}
    return pages


def spoil(path: Path, offset: int, what: bytes) -> None:
    with open(path / "data.mdb", "r+b") as file:
        file.seek(offset)
        file.write(what)


def check_documents(path: Path) -> set[str]:
    """Names of the documents, of which each is as it was written."""
    assert is_whole(path) and is_sound(path)
    with MemoryStore.open(path, host_budget=BUDGET) as store:
        for document in store.documents():
            check_content(store, document, text=TEXTS[document.name])
        names = {document.name for document in store.documents()}
        written = ingest(store, "new", 3 * CHUNK, text=5)
        check_content(store, written, text=5)
        store.forget("new")
    assert not list(path.glob("*.partial"))
    return names


@pytest.mark.parametrize("what", ["begin", "keys", "all"])
def test_repair_saves_documents_outside_a_damaged_key_page(
    sound: Path, tmp_path: Path, what: str
) -> None:
    with MemoryStore.open(sound) as store:
        names = {document.id: document.name for document in store.documents()}
    pages = tree_pages(sound)
    assert len(pages) > 40
    rescued = 0
    for number, owners in sorted(pages.items())[
        ["begin", "keys", "all"].index(what) :: PAGES_APART
    ]:
        path = shutil.copytree(sound, tmp_path / str(number))
        offset, length = {"begin": (0, 16), "keys": (16, 48), "all": (0, PAGE)}[what]
        spoil(path, number * PAGE + offset, b"\xff" * length)
        hit = {names[at] for _, at in owners if at in names}
        try:
            report = verify_memory(path, repair=True)
        except CorruptMemory:
            assert {table for table, _ in owners} <= {"", "meta"}, (number, owners)
            continue
        whole = check_documents(path)
        if not any(at == 0 for _, at in owners):
            assert whole >= set(names.values()) - hit, (number, owners)
            rescued += 1
        assert len(report.dropped) == len(names) - len(whole), (number, owners)
        shutil.rmtree(path)
    assert rescued > 24 // PAGES_APART - 2


@pytest.mark.parametrize("lost", ["older", "newer", "both"])
def test_repair_rebuilds_meta_pages_without_undoing_commits(memory: Path, lost: str) -> None:
    numbers = [
        struct.unpack_from("<Q", (memory / "data.mdb").read_bytes(), at * PAGE + 144)[0]
        for at in (0, 1)
    ]
    newer = numbers.index(max(numbers))
    for at in {"older": [1 - newer], "newer": [newer], "both": [0, 1]}[lost]:
        spoil(memory, at * PAGE, bytes(PAGE))
    with pytest.raises(CorruptMemory, match=r"meta page|beginning"):
        MemoryStore.open(memory).close()
    report = verify_memory(memory, repair=True)
    assert [problem.document for problem in report.problems] == [None] and not report.dropped
    assert check_documents(memory) == {*TEXTS}  # and not the one that was forgotten last


def test_every_flipped_bit_of_the_meta_pages_is_repaired(memory: Path) -> None:
    with MemoryStore.open(memory, host_budget=BUDGET) as store:
        for name in ("one", "four"):  # less to make anew, each time
            store.forget(name)
        store.compact()
        store.forget("two")
        ingest(store, "three", 9 * CHUNK + 30, text=3, mode="replace")
    whole = (memory / "data.mdb").read_bytes()
    before = rows(memory)
    wrong = 0
    for at in [*range(8, 152), *range(PAGE + 8, PAGE + 152)]:
        for bit in (at % 8, (at + 3) % 8):
            spoil(memory, at, bytes([whole[at] ^ 1 << bit]))
            try:
                assert rows(memory) == before
            except MemstoreError:
                assert salvage(memory) is None
                assert rows(memory) == before, (at, bit)
                wrong += 1
                (memory / "data.mdb").write_bytes(whole)
            spoil(memory, at, whole[at : at + 1])
    assert wrong > 100 and is_whole(memory)


def rows(path: Path) -> list[tuple[bytes, bytes]]:
    with Database.open(path, read_only=True) as database, database.read() as txn:
        return list(txn.scan_checked("documents"))


def test_unreadable_commit_is_undone_and_reported(memory: Path) -> None:
    with MemoryStore.open(memory, host_budget=BUDGET) as store:
        number = store._on_disk().catalog.database.version.transaction
        ingest(store, "five", 10, text=5, commit_bytes=1 << 20)  # begun, and ended
    with open(memory / "data.mdb", "rb") as file:
        newest = read_states(file.fileno()).newest
    spoil(memory, newest * PAGE, b"\xff" * 64)
    report = verify_memory(memory, repair=True)
    assert any("is undone" in problem.what for problem in report.problems)
    with MemoryStore.open(memory) as store:
        assert [(row.name, row.state) for row in store.documents()][-1] == ("five", "ingesting")
        assert store._on_disk().catalog.database.version.transaction < number


def test_repair_saves_what_a_truncated_file_holds(memory: Path) -> None:
    size = (memory / "data.mdb").stat().st_size
    os.truncate(memory / "data.mdb", size - size // 3 // PAGE * PAGE)
    try:
        report = verify_memory(memory, repair=True)
    except CorruptMemory as error:
        assert "nothing can be saved" in str(error)
        report = None
    # of a document whose row is gone nobody knows the name
    assert report is None or check_documents(memory) <= {*TEXTS} - {*report.dropped}


@pytest.mark.parametrize("entry", [b"commit", b"changes", b"next_document"])
def test_repair_rebuilds_damaged_meta_rows(memory: Path, entry: bytes) -> None:
    data = bytearray((memory / "data.mdb").read_bytes())
    with Database.open(memory) as database, database.read() as txn:
        value = txn.get("meta", entry)
        assert value is not None
    while (at := data.find(value)) >= 0:
        data[at] ^= 1
    (memory / "data.mdb").write_bytes(data)
    report = verify_memory(memory, repair=True)
    assert not report.dropped
    assert check_documents(memory) == {*TEXTS}
    with MemoryStore.open(memory, host_budget=BUDGET) as store:
        ids = [document.id for document in store.documents()]
        assert ingest(store, "next", 10, text=5).id > max(ids)


def test_repair_locks_out_readers_and_writers(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def try_others(*given: object) -> None:
        for mine in (
            "MemoryStore.open(sys.argv[1])",
            "WriterLock(Path(sys.argv[1])).acquire(wait=False)",
        ):
            code = f"""
import sys
from pathlib import Path
from memstore.disk.lmdb.locks import WriterLock
from memstore.errors import MemoryLocked
from memstore.store.memory_store import MemoryStore
try:
    {mine}
except MemoryLocked:
    print("locked")
"""
            said = subprocess.run(
                [sys.executable, "-c", code, memory], capture_output=True, text=True, check=False
            )
            tried.append(said.stdout.strip())
        true(*given)

    module = sys.modules[salvage.__module__]
    true = module.fill
    monkeypatch.setattr(module, "fill", try_others)
    salvage(memory)
    assert tried == ["locked", "locked"]
    assert check_documents(memory) == {*TEXTS}
    with MemoryStore.open(memory), pytest.raises(MemoryLocked, match="another process"):
        salvage(memory)


def test_children_of_a_killed_repair_end_and_release_locks(
    memory: Path, children: ForkServer
) -> None:
    lock = WriterLock(memory)

    def until(locked: bool) -> None:
        for _ in range(6000):
            try:
                lock.acquire(wait=False)
            except MemoryLocked:
                if locked:
                    return
            else:
                lock.release()
                if not locked:
                    return
            time.sleep(0.01)
        raise AssertionError(f"not {'locked' if locked else 'free'} within a minute")

    with Database.open(memory) as database:
        with database.read() as txn:
            *_, (last, _) = txn.scan("blocks")
        database.write(lambda txn: txn.delete("blocks", last))
    with lmdb.open(str(memory)) as environment:
        with environment.begin(write=True):  # the child that drops has the lock, and waits here
            pid = children.start("repair_job", memory)
            until(locked=True)
            os.kill(pid, signal.SIGKILL)
            until(locked=False)
        assert children.end() == -signal.SIGKILL
    report = verify_memory(memory, repair=True)
    assert report.problems and report.dropped == ([] if is_of_passages(memory) else ["four"])
