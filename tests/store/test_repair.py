"""Damage is reported and crashes no process. A repair drops damaged documents, and changes nothing
where the tables that lead to documents are damaged.
"""

import os
import shutil
import struct
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from memstore.disk.lmdb.database import Database
from memstore.disk.lmdb.transaction import read_number_key
from memstore.disk.tables.catalog import Catalog
from memstore.errors import RESTORE, CorruptMemory, MemstoreError
from memstore.store.memory_store import MemoryStore
from memstore.store.verify import verify_memory
from support.synthetic_documents import BUDGET, CHUNK, SIGNATURE, ingest, is_whole

PAGES_APART = int(os.environ.get("MEMSTORE_PAGES_APART", "12"))  # of those that are spoiled
PAGE = 4096
TEXTS = {"one": 1, "two": 2, "three": 3, "four": 4}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory of four documents, with free pages."""
    path = tmp_path_factory.mktemp("repair") / "memory"
    with MemoryStore.create(path, SIGNATURE, host_budget=BUDGET) as store:
        ingest(store, "gone", 5 * CHUNK, text=9)
        for name, text in TEXTS.items():
            ingest(store, name, 9 * CHUNK + text, text=text)
        store.forget("gone")
    return path


@pytest.fixture
def memory(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound, tmp_path / "memory")


def key_pages(path: Path) -> list[int]:
    """Every page that is one of keys, or was."""
    data = (path / "data.mdb").read_bytes()
    told = {at: struct.unpack_from("<Q2xH", data, at * PAGE) for at in range(2, len(data) // PAGE)}
    return [at for at, page in told.items() if page in ((at, 1), (at, 2))]


def newest_and_older(path: Path) -> list[int]:
    """The root pages of the last two transactions' tables of tables."""
    data = (path / "data.mdb").read_bytes()
    metas = [struct.unpack_from("<QQQ", data, at * PAGE + 128) for at in (0, 1)]
    return [root for root, _, number in sorted(metas, key=lambda meta: -meta[2])]


def spoil(path: Path, offset: int, what: bytes) -> None:
    with open(path / "data.mdb", "r+b") as file:
        file.seek(offset)
        file.write(what)


def check_not_repaired(path: Path) -> None:
    """Verify names the damage. A repair refuses, says what to do, and changes nothing."""
    before = (path / "data.mdb").read_bytes()
    assert not verify_memory(path).clean
    with pytest.raises(CorruptMemory, match=f"cannot be repaired .*: {RESTORE}"):
        verify_memory(path, repair=True)
    assert (path / "data.mdb").read_bytes() == before


@pytest.mark.parametrize("what", ["begin", "keys", "all"])
def test_damaged_key_page_is_reported_and_not_repaired(
    sound: Path, tmp_path: Path, what: str
) -> None:
    pages = key_pages(sound)
    assert len(pages) > 40
    told = 0
    for number in pages[["begin", "keys", "all"].index(what) :: PAGES_APART]:
        path = shutil.copytree(sound, tmp_path / str(number))
        offset, length = {"begin": (0, 16), "keys": (16, 48), "all": (0, PAGE)}[what]
        spoil(path, number * PAGE + offset, b"\xff" * length)
        if verify_memory(path).clean:  # nothing is read from it
            assert is_whole(path)
        else:
            check_not_repaired(path)
            told += 1
        shutil.rmtree(path)
    assert told > 12 // PAGES_APART


@pytest.mark.parametrize("lost", ["older", "newer", "both"])
def test_lost_meta_pages_are_reported_and_not_repaired(memory: Path, lost: str) -> None:
    numbers = [
        struct.unpack_from("<Q", (memory / "data.mdb").read_bytes(), at * PAGE + 144)[0]
        for at in (0, 1)
    ]
    newer = numbers.index(max(numbers))
    for at in {"older": [1 - newer], "newer": [newer], "both": [0, 1]}[lost]:
        spoil(memory, at * PAGE, bytes(PAGE))
    with pytest.raises(CorruptMemory, match=r"meta page|beginning"):
        MemoryStore.open(memory).close()
    check_not_repaired(memory)


def test_flipped_bit_of_a_meta_page_undoes_no_commit(memory: Path) -> None:
    places = [*range(8, 152), *range(PAGE + 8, PAGE + 152)]
    assert refused(memory, [(at, bit) for at in places for bit in range(8)]) > 400


def test_a_flipped_bit_of_the_root_page_never_crashes_the_process_at_opening(memory: Path) -> None:
    begin = newest_and_older(memory)[0] * PAGE
    lower, upper = struct.unpack_from("<HH", (memory / "data.mdb").read_bytes(), begin + 12)
    places = [*range(begin, begin + lower), *range(begin + upper, begin + PAGE)]
    flips = [(at, bit) for at in places for bit in (at % 8, (at + 3) % 8)]
    assert refused(memory, flips) > 100


def refused(memory: Path, flips: Sequence[tuple[int, int]]) -> int:
    """How many flips (byte, bit), each made alone, are an error; after the others the rows are
    right.
    """
    whole, before, wrong = (memory / "data.mdb").read_bytes(), rows(memory), 0
    for at, bit in flips:
        spoil(memory, at, bytes([whole[at] ^ 1 << bit]))
        try:
            assert rows(memory) == before
        except MemstoreError:
            wrong += 1
        spoil(memory, at, whole[at : at + 1])
    assert is_whole(memory)
    return wrong


def rows(path: Path) -> list[tuple[int, bytes]]:
    with Database.open(path, read_only=True) as database, database.read() as txn:
        return [(read_number_key(key), row) for key, row in txn.scan_checked("documents")]


def test_an_unreadable_commit_is_reported_and_not_rolled_back(memory: Path) -> None:
    newest, _ = newest_and_older(memory)
    spoil(memory, newest * PAGE, b"\xff" * 64)
    with pytest.raises(CorruptMemory, match="cannot be read"):
        MemoryStore.open(memory).close()
    check_not_repaired(memory)


@pytest.mark.parametrize("entry", [b"commit", b"next_document"])
def test_damaged_meta_rows_are_reported_and_not_repaired(memory: Path, entry: bytes) -> None:
    data = bytearray((memory / "data.mdb").read_bytes())
    with Database.open(memory) as database, database.read() as txn:
        value = bytes(txn.view("meta", entry))
    while (at := data.find(value)) >= 0:
        data[at] ^= 1
    (memory / "data.mdb").write_bytes(data)
    check_not_repaired(memory)


# Damaged documents


@pytest.mark.parametrize("table", ["blocks", "tokens", "landmarks", "documents"])
def test_verify_finds_missing_rows(tmp_path: Path, table: str) -> None:
    path = tmp_path / "memory"
    with MemoryStore.create(path, SIGNATURE) as store:
        document = ingest(store, "book", 100)

        def drop_one(txn) -> None:
            txn.delete(table, next(txn.scan(table))[0])

        with closing(Catalog.open(path)) as catalog:
            catalog.database.write(drop_one)
    report = verify_memory(path, repair=True)
    assert [problem.document for problem in report.problems] == [document.id]
    assert is_whole(path)
    with MemoryStore.open(path) as store:
        assert store.documents() == []


@pytest.mark.parametrize("table", ["blocks", "tokens", "landmarks", "documents", "passages"])
def test_verify_reports_keys_of_impossible_numbers(tmp_path: Path, table: str) -> None:
    path = tmp_path / "memory"
    with MemoryStore.create(path, SIGNATURE) as store:
        ingest(store, "book", 100)
    with closing(Catalog.open(path)) as catalog:
        size = catalog.database.write(lambda txn: len(next(txn.scan(table), (bytes(8),))[0]))
        catalog.database.write(lambda txn: txn.put_checked(table, b"\xff" * size, b""))
    (problem,) = verify_memory(path).problems
    assert "invalid number" in problem.what
