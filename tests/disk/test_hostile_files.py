"""A memory's directory, and the directory one works in, may be somebody else's: nothing of them is
run, and nothing outside the memory is written, removed or shown.
"""

import fcntl
import json
import os
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import zstandard

from memstore.child import python_command
from memstore.disk.files import replacement
from memstore.disk.format.codec import get_codec
from memstore.errors import CorruptMemory, InvalidInput, MemoryNotFound, MemstoreError
from memstore.store.memory_store import MemoryStore
from memstore.store.verify.verify_memory import verify_memory
from support.damaged_tree import BUDGET, damage_tree
from support.paths import ROOT
from support.synthetic_documents import CHUNK, SIGNATURE, ingest


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """A memory of one document."""
    path = tmp_path / "memory"
    with MemoryStore.create(path, SIGNATURE, host_budget=BUDGET) as store:
        ingest(store, "a", text=1, tokens=100)
    return path


@pytest.mark.usefixtures("verified_apart")
def test_children_import_nothing_from_the_working_directory(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, named = tmp_path / "here", tmp_path / "named"
    for directory in (here, named):
        directory.mkdir()
        for module in ("lmdb", "json", "numpy", "memstore", "sitecustomize", "usercustomize"):
            trap = f"open({str(tmp_path / 'ran')!r}, 'a').write('{directory.name} {module}')\n"
            (directory / f"{module}.py").write_text(trap + "raise SystemExit(1)\n")
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", f"{named}{os.pathsep}.")
    assert verify_memory(memory).clean
    said = subprocess.run(
        python_command("memstore", "verify", "--store", str(memory)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0 and "Traceback" not in said.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.usefixtures("verified_apart")
def test_child_that_cannot_start_is_no_damage(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(MemstoreError, match="did not start"):
        verify_memory(memory)


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb", "writer.lock"])
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "directory"])
def test_links_and_special_files_in_a_memory_are_refused(
    memory: Path, tmp_path: Path, name: str, kind: str
) -> None:
    outside = tmp_path / "outside"
    if (memory / name).exists() and name == "data.mdb":
        (memory / name).rename(outside)
    else:
        (memory / name).unlink()
        outside.write_bytes(b"mine")
    if kind == "dangling":
        outside.unlink()
    if kind in ("link", "dangling"):
        (memory / name).symlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(memory / name)
    else:
        (memory / name).mkdir()
    before = outside.read_bytes() if outside.exists() else None
    refused = pytest.raises((InvalidInput, MemoryNotFound), match=r"regular|holds no memory")
    with refused, MemoryStore.open(memory, host_budget=BUDGET) as store:
        store.forget("a")
    assert (outside.read_bytes() if outside.exists() else None) == before


def test_compact_export_and_repair_follow_no_prepared_links(memory: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    (memory / "data.mdb.compact").symlink_to(outside)
    (tmp_path / "a.memory.part").symlink_to(outside)
    (tmp_path / "a.memory").symlink_to(outside)
    mine = tmp_path / "memory.repair" / "mine"
    mine.parent.mkdir()
    mine.touch()
    with MemoryStore.open(memory, host_budget=BUDGET) as store:
        ingest(store, "b", text=2, tokens=100)
        store.compact()
        with pytest.raises(InvalidInput, match="link"):
            store.export_document("a", tmp_path / "a.memory")
        (tmp_path / "a.memory").unlink()
        store.export_document("a", tmp_path / "a.memory")
    assert not (tmp_path / "a.memory").is_symlink()
    damage_tree(memory)
    assert verify_memory(memory, repair=True).problems
    assert outside.read_bytes() == b"mine" and mine.exists()
    assert {entry.name for entry in memory.iterdir()} == {
        "data.mdb", "data.mdb.compact", "lock.mdb", "writer.lock"
    }  # fmt: skip


def test_index_files_are_not_written_through_links(memory: Path, tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    outside = tmp_path / "outside"
    outside.mkdir()
    (memory / "index").symlink_to(outside)
    with (
        MemoryStore.open(memory, host_budget=BUDGET, index="faiss-ivf-sq8") as store,
        pytest.raises(MemstoreError, match="link"),
    ):
        ingest(store, "b", text=2, tokens=300 * CHUNK, commit_bytes=1 << 20)
        store.build_index()
    assert not list(outside.iterdir())


def test_decompression_bomb_is_refused_before_allocation() -> None:
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 26))
    assert len(bomb) < 1 << 13
    k, v = np.zeros((2, 16, 8), np.int32)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=f"{1 << 26} bytes are declared, of {2 * k.nbytes}"):
            get_codec("zstd").decode(bomb, k, v, "float32", 16)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("change", ["back by two", "back by one", "swapped", "older twice"])
def test_rolled_back_meta_pages_are_detected(memory: Path, change: str) -> None:
    data = bytearray((memory / "data.mdb").read_bytes())
    places = [144, 4096 + 144]
    numbers = [struct.unpack_from("<Q", data, place)[0] for place in places]
    newest = numbers.index(max(numbers))
    if change.startswith("back"):
        by = 2 if change.endswith("two") else 1
        struct.pack_into("<Q", data, places[newest], numbers[newest] - by)
    elif change == "swapped":
        data[:152], data[4096 : 4096 + 152] = data[4096 : 4096 + 152], data[:152]
    else:  # a whole page of before, as a disk that lost a write has it
        older = data[places[1 - newest] - 128 : places[1 - newest] + 8]
        data[places[newest] - 128 : places[newest] + 8] = older
        struct.pack_into("<Q", data, places[newest], numbers[newest] - 2)
    (memory / "data.mdb").write_bytes(data)
    with pytest.raises(CorruptMemory, match="transaction"):
        MemoryStore.open(memory, host_budget=BUDGET).close()
    assert not verify_memory(memory).clean


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_new_memory_and_export_are_private_to_the_owner(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        path = tmp_path / "memory"
        with MemoryStore.create(path, SIGNATURE, host_budget=BUDGET) as store:
            ingest(store, "a", text=1, tokens=100)
            store.export_document("a", tmp_path / "a.memory")
    finally:
        os.umask(before)
    assert mode(path) == 0o700 and mode(tmp_path / "a.memory") == 0o600
    assert {entry.name: mode(entry) for entry in path.iterdir()} == dict.fromkeys(
        ["data.mdb", "lock.mdb", "writer.lock"], 0o600
    )


@pytest.mark.usefixtures("verified_apart")
@pytest.mark.parametrize("wanted", [0o600, 0o640, 0o664])
def test_rewritten_files_preserve_permissions(memory: Path, tmp_path: Path, wanted: int) -> None:
    pytest.importorskip("faiss")
    (memory / "data.mdb").chmod(wanted)
    for name in ("lock.mdb", "writer.lock"):
        (memory / name).unlink()
    export = tmp_path / "a.memory"
    export.touch()
    export.chmod(wanted)
    umask = os.umask(0o000)
    try:
        with MemoryStore.open(memory, host_budget=BUDGET, index="faiss-ivf-sq8") as store:
            ingest(store, "b", text=2, tokens=300 * CHUNK, commit_bytes=1 << 20)
            store.compact()
            assert mode(memory / "data.mdb") == wanted
            store.build_index()
            store.export_document("a", export)
        damage_tree(memory)
        verify_memory(memory, repair=True)
    finally:
        os.umask(umask)
    assert mode(memory / "data.mdb") == mode(memory / "lock.mdb") == mode(export) == wanted
    assert {mode(file) for file in (memory / "index").iterdir()} == {wanted}
    assert mode(memory / "index") == {0o600: 0o700, 0o640: 0o750, 0o664: 0o775}[wanted]
    # who may not write cannot lock either
    assert mode(memory / "writer.lock") == {0o600: 0o600, 0o640: 0o600, 0o664: 0o660}[wanted]


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


COMMANDS = {
    "ls": 0,
    "stats": 0,
    "verify": 0,
    "export b {there}": 0,
    "rm a": 0,
    "rm nobody": 1,
    "compact": 0,
    "compact --nonsense": 2,
}


@pytest.mark.parametrize("closed", [(1,), (0, 1, 2)])
def test_commands_with_closed_streams_return_their_status(
    memory: Path, tmp_path: Path, closed: tuple[int, ...]
) -> None:
    with MemoryStore.open(memory, host_budget=BUDGET) as store:
        ingest(store, "b", text=2, tokens=100)
    told = tmp_path / "told"
    words = [command.format(there=tmp_path / "b.memory").split() for command in COMMANDS]
    done = subprocess.run(
        [sys.executable, "-c", CLOSED, told, memory, json.dumps(words)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: [os.close(number) for number in closed],
    )
    assert dict(zip(COMMANDS, json.loads(told.read_text()))) == COMMANDS, done
    assert "Traceback" not in done.stdout + done.stderr
    assert verify_memory(memory).clean


CLOSED = """
import json, os, sys
from pathlib import Path
from memstore.__main__ import main
import memstore.cli.main, memstore.store.memory_store  # not by each of its forks
told, memory, commands = sys.argv[1:]
statuses = []
for words in json.loads(commands):
    child = os.fork()
    if not child:
        sys.argv = ["memstore", *words, "--store", memory]
        main()
        sys.exit(0)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
Path(told).write_text(json.dumps(statuses))
"""


def test_memory_files_never_become_standard_streams(memory: Path, tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from memstore.store.memory_store import MemoryStore
for number in range(3): os.close(number)
with MemoryStore.open(sys.argv[1]) as store:
    store.forget("a")
    Path(sys.argv[2]).write_text(" ".join(os.readlink(f"/proc/self/fd/{n}") for n in range(3)))
"""
    there = tmp_path / "there"
    subprocess.run([sys.executable, "-c", code, str(memory), str(there)], check=True)
    assert there.read_text().split() == ["/dev/null"] * 3


def test_next_export_sweeps_a_killed_one(memory: Path, tmp_path: Path) -> None:
    place = tmp_path / "exports"
    place.mkdir()
    subprocess.run([sys.executable, "-c", KILLED, str(place / "b.memory")], check=False)
    (left,) = place.iterdir()
    kept = {place / "layer-1.4711.partial", place / "memstore-x.partial", place / "a.memory"}
    for file in kept:
        file.touch()
    written = replacement(place / "c.memory")  # by another, now
    with MemoryStore.open(memory, host_budget=BUDGET) as store, written:
        (live,) = {*place.iterdir()} - kept
        assert live != left
        store.export_document("a", place / "a.memory")
        assert {*place.iterdir()} == kept | {live}


@pytest.mark.parametrize("call", ["flock", "fchmod", "fsync"])
def test_interrupted_replacement_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    of = fcntl if call == "flock" else os
    monkeypatch.setattr(of, call, Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt), replacement(tmp_path / "file") as file:
        file.write(b"half")
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
from pathlib import Path
from memstore.disk.files import replacement
with replacement(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_next_writer_sweeps_only_partial_files_of_killed_processes(
    memory: Path, tmp_path: Path
) -> None:
    pytest.importorskip("faiss")
    with MemoryStore.open(memory, host_budget=BUDGET, index="faiss-ivf-sq8") as store:
        ingest(store, "b", text=2, tokens=300 * CHUNK, commit_bytes=1 << 20)
        store.build_index()
    kept = {entry.name for entry in (memory / "index").iterdir()}
    for path in (memory / "index" / "layer-1.idx", memory / "data.mdb"):
        subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    (memory / "index" / "layer-1.4711.partial").touch()  # of a version before
    for name in ("mine.partial", "memstore-x.partial"):
        (memory / "index" / name).touch()
        kept.add(name)
    assert len(list(memory.glob("**/*.partial"))) == 5
    with replacement(memory / "index" / "layer-2.idx") as live:
        with MemoryStore.open(memory, host_budget=BUDGET) as store:
            store.forget("a")
        live.write(b"whole")
    kept.add("layer-2.idx")
    assert {entry.name for entry in (memory / "index").iterdir()} == kept
    assert not list(memory.glob("*.partial"))
