"""The LMDB environment: one process writes at a time, and every failure has a named error."""

import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from memstore.block import RecordKey
from memstore.disk.lmdb import environment
from memstore.disk.lmdb.database import Database, Transaction
from memstore.disk.lmdb.transaction import record_key
from memstore.errors import (
    CorruptMemory,
    InvalidInput,
    MemoryClosed,
    MemoryLocked,
    MemoryNotFound,
    ReadOnlyMemory,
    StorageFull,
)
from support.other_process import hear, other_process, say


def nothing(txn: Transaction) -> None:
    pass


def put(key: bytes, value: bytes):
    return lambda txn: txn.put_checked("meta", key, value)


def get(database: Database, key: bytes) -> bytes | None:
    with database.read() as txn:
        return txn.get_checked("meta", key)


def fill(txn: Transaction, count: int, size: int, first: int = 0) -> int:
    for number in range(first, first + count):
        txn.put(
            "blocks", record_key(RecordKey(1, number, 0)), number.to_bytes(4, "big") * (size // 4)
        )
    return count


def count_blocks(database: Database) -> int:
    with database.read() as txn:
        return sum(1 for _ in txn.scan("blocks"))


HOLD_WRITER = """
    with Database.open(sys.argv[1]) as database, database.writer():
        say("holding"); hear()
    say("done"); hear()
"""


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    with Database.create(path, put(b"a", b"first")) as database:
        yield database


# Creating and opening


def test_creating_is_all_or_nothing(path):
    def fails(txn: Transaction) -> None:
        txn.put("meta", b"a", b"b")
        raise KeyError("stop")

    with pytest.raises(KeyError):
        Database.create(path, fails)
    with pytest.raises(MemoryNotFound, match="interrupted"):
        Database.open(path)
    with Database.create(path, put(b"a", b"2")) as database:
        assert get(database, b"a") == b"2"


def test_a_directory_with_other_files_is_left_alone(path):
    path.mkdir()
    (path / "thesis.tex").write_text("...")
    with pytest.raises(InvalidInput, match=r"thesis\.tex"):
        Database.create(path, nothing)
    assert [entry.name for entry in path.iterdir()] == ["thesis.tex"]


def test_one_environment_serves_all_openings_of_a_directory(path, database, tmp_path):
    (tmp_path / "link").symlink_to(path)
    second = Database.open(tmp_path / "link", read_only=True)
    database.write(put(b"b", b"2"))
    assert get(second, b"b") == b"2"
    with pytest.raises(ReadOnlyMemory):
        second.write(nothing)
    database.close()
    assert get(second, b"b") == b"2"
    second.close()
    second.close()
    with pytest.raises(MemoryClosed, match="closed"), second.read():
        pass


# Transactions


def test_a_failed_batch_leaves_nothing(database):
    def work(txn: Transaction) -> None:
        txn.put_checked("meta", b"b", b"2")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        database.write(work)
    assert get(database, b"b") is None
    database.write(put(b"b", b"3"))
    assert get(database, b"b") == b"3"


def test_a_reader_keeps_its_snapshot_while_another_thread_writes(database):
    with database.read() as txn:
        thread = threading.Thread(target=database.write, args=(put(b"a", b"second"),))
        thread.start()
        # The first write of a process opens its environment for writing, which waits for readers.
        thread.join(0.2)
        assert txn.get_checked("meta", b"a") == b"first"
        with database.read() as inner:
            assert inner is txn
    thread.join()
    assert get(database, b"a") == b"second"


def test_nested_writes_in_one_thread_are_refused(database):
    with database.read(), pytest.raises(RuntimeError, match="same thread"):
        database.write(nothing)
    with pytest.raises(RuntimeError, match="same thread"):
        database.write(lambda txn: database.write(nothing))
    database.write(put(b"b", b"2"))


def test_a_checked_value_is_refused_when_altered_or_under_another_key(database):
    def work(txn: Transaction) -> None:
        stored = bytes(txn.view("meta", b"a"))
        txn.put("meta", b"moved", stored)
        txn.put("documents", b"a", stored)
        txn.put("meta", b"altered", stored[:-1] + b"!")
        txn.put("meta", b"cut", stored[:5])

    database.write(work)
    with database.read() as txn:
        for table, key in [
            ("meta", b"moved"),
            ("documents", b"a"),
            ("meta", b"altered"),
            ("meta", b"cut"),
        ]:
            with pytest.raises(CorruptMemory, match=f"{table} entry {key.hex()}"):
                txn.get_checked(table, key)
        with pytest.raises(CorruptMemory):
            list(txn.scan_checked("meta"))
        assert txn.get_checked("meta", b"a") == b"first"


def test_a_file_that_outgrew_the_map_is_read(path, monkeypatch):
    """As in a process that may have little address space."""
    monkeypatch.setattr(environment, "MAP_BYTES", 1 << 18)
    code = """
        def work(txn):
            for n in range(200): txn.put("blocks", record_key(RecordKey(1, n, 0)), b"x" * 16000)
        Database.open(sys.argv[1]).write(work)
        say("grown")
    """
    with Database.create(path, put(b"a", b"first")) as database:
        with other_process(code, path) as process:
            assert hear(process) == "grown"
        assert count_blocks(database) == 200
        with pytest.raises(StorageFull, match="run the command again"):
            database.write(lambda txn: fill(txn, 1000, 16_000, first=1000))
        assert count_blocks(database) == 200
    with Database.open(path) as database:  # which maps four times what there is
        database.write(lambda txn: fill(txn, 400, 16_000, first=1000))
        assert count_blocks(database) == 600


def test_a_memory_opens_where_the_address_space_is_small(path, monkeypatch):
    """This happens on machines with 39-bit addresses, and with very many open memories."""
    monkeypatch.setattr(environment, "MAP_BYTES", 1 << 52)
    with Database.create(path, put(b"a", b"first")) as database:
        database.write(lambda txn: fill(txn, 100, 16_000))
        database.rewrite()
        assert count_blocks(database) == 100
    with Database.open(path) as database:
        assert get(database, b"a") == b"first" and count_blocks(database) == 100


# The writer lock


def test_a_second_writer_is_refused_with_the_process_id_of_the_first(path, database):
    with other_process(HOLD_WRITER, path) as process:
        assert hear(process) == "holding"
        with pytest.raises(MemoryLocked, match=f"process {process.pid}"):
            database.write(nothing)
        assert get(database, b"a") == b"first"
        say(process)
        assert hear(process) == "done"
        database.write(put(b"b", b"2"))


def test_a_forked_child_does_not_keep_its_dead_parents_lock(path, database):
    code = """
        database = Database.open(sys.argv[1])
        with database.writer():
            ready, tell = os.pipe()
            child = os.fork()
            if not child: os.write(tell, b"x"); hear(); os._exit(0)
            os.read(ready, 1)
            say(child)
            os.kill(os.getpid(), 9)
    """
    with other_process(code, path) as process:
        child = int(hear(process))
        process.wait()
        os.kill(child, 0)
        database.write(put(b"b", b"2"))


# Forks and readers


def in_child(database: Database, elsewhere: Path, results: multiprocessing.Queue) -> None:
    for use in (
        lambda: get(database, b"a"),
        lambda: database.write(nothing),
        lambda: Database.open(database.path),
        lambda: Database.create(database.path, nothing),
    ):
        try:
            use()
        except MemoryClosed as error:
            results.put(str(error))
    database.close()
    with Database.create(elsewhere, put(b"a", b"the child's")) as own:
        results.put(get(own, b"a"))


def test_a_forked_child_is_refused_and_does_not_disturb_its_parent(database, tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with database.writer(), database.read() as txn:
        view = txn.view("meta", b"a")
        child = context.Process(target=in_child, args=(database, tmp_path / "elsewhere", results))
        child.start()
        *refusals, own = [results.get() for _ in range(5)]
        child.join()
        assert child.exitcode == 0
        assert str(os.getpid()) in database._environment.inner.readers()
        assert bytes(view[8:]) == b"first"
    assert f"opened by process {os.getpid()}" in refusals[0] and refusals[0] == refusals[1]
    assert "spawned" in refusals[2] and "spawned" in refusals[3]
    assert own == b"the child's"
    database.write(put(b"b", b"2"))
    assert get(database, b"b") == b"2"


def test_a_forked_child_does_not_end_its_parents_transaction(path, database):
    code = """
        with Database.open(sys.argv[1]) as database:
            with database.writer(), database.read() as txn:
                parent = os.getpid()
                if not os.fork(): sys.exit()
                os.wait()
                say(str(parent) in database._environment.inner.readers().split()[3])
                say(txn.get_checked("meta", b"a").decode()); hear()
            database.write(lambda txn: txn.put_checked("meta", b"b", b"2"))
            say("written")
    """
    with other_process(code, path) as process:
        assert [hear(process), hear(process)] == ["True", "first"]
        with pytest.raises(MemoryLocked):
            database.write(nothing)
        say(process)
        assert hear(process) == "written"


def test_a_killed_readers_snapshot_is_cleared_at_the_next_opening(path, database):
    code = """
        with Database.open(sys.argv[1]).read() as txn:
            say("reading"); hear()
    """
    with other_process(code, path) as process:
        assert hear(process) == "reading"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert str(process.pid) in database._environment.inner.readers()
        database.close()
        with Database.open(path) as database:
            assert str(process.pid) not in database._environment.inner.readers()


# Damaged files


def test_a_file_that_is_not_a_database_is_refused(path, database):
    database.close()
    (path / "data.mdb").write_bytes(b"once upon a time " * 5000)
    with pytest.raises(CorruptMemory, match="not a memory's data file"):
        Database.open(path)


def test_a_meta_page_that_is_damaged_while_the_file_is_open_is_an_error(path, database):
    """As by a copy that is put over the file of a memory in use."""
    for number in range(3):
        database.write(put(b"a", bytes([number])))
    with open(path / "data.mdb", "r+b") as file:
        whole = file.read(2 * 4096)
        file.seek(0)
        file.write(bytes(len(whole)))
        file.flush()
        with pytest.raises(CorruptMemory, match="another program changed"):
            get(database, b"a")
        file.seek(0)
        file.write(whole)
    assert get(database, b"a") == b"\x02"


@pytest.mark.parametrize("seed", range(2))
def test_a_file_without_its_last_free_pages_is_not_called_truncated(path, seed):
    """Pages taken and freed in one batch are never written, so an intact file may be shorter than
    its last page.
    """
    rng = random.Random(seed)
    with Database.create(path, nothing) as database:
        short = 0
        for batch in range(40):

            def work(txn: Transaction, batch: int = batch) -> None:
                keys = [key for key, _ in txn.scan("blocks")]
                for _ in range(rng.randrange(1, 40)):
                    txn.put(
                        "blocks",
                        record_key(RecordKey(rng.randrange(3), rng.randrange(200), 0)),
                        bytes(rng.randrange(20_000)),
                    )
                for key in rng.sample(keys, rng.randrange(len(keys) + 1)):
                    txn.delete("blocks", key)
                if batch % 5 == 4:
                    txn.put("blocks", b"last", bytes(50_000))
                    txn.delete("blocks", b"last")

            database.write(work)
            info = database._environment.inner.info()
            short += database.file_bytes < (info["last_pgno"] + 1) * 4096
            there = count_blocks(database)
            database.close()
            database = Database.open(path)
            assert count_blocks(database) == there
        database.close()
    assert short or seed  # the case does arise


# Compacting


def test_a_memory_is_not_opened_while_it_is_compacted(path, database):
    database.close()
    code = """
        import fcntl
        file = open(sys.argv[1])
        fcntl.flock(file, fcntl.LOCK_EX)
        say("alone"); hear()
    """
    with other_process(code, path / "data.mdb") as process:
        assert hear(process) == "alone"
        with pytest.raises(MemoryLocked, match="compacted"):
            Database.open(path)
    Database.open(path).close()
