"""A memory's directory or the working directory may belong to an attacker: nothing in them is
executed, and nothing outside the memory is written, removed or shown.
"""

import fcntl
import os
import struct
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from memstore.child import python_command
from memstore.disk.files import replacement
from memstore.errors import CorruptMemory, InvalidInput, MemoryNotFound, MemstoreError
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer import export_document
from memstore.store.verify import verify_memory
from support.synthetic_documents import BUDGET, CHUNK, SIGNATURE, ingest, opened


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """A memory of one document."""
    path = tmp_path / "memory"
    with MemoryStore.create(path, SIGNATURE, host_budget=BUDGET) as store:
        ingest(store, "a", text=1, tokens=100)
    return path


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
    with refused, opened(memory) as store:
        store.forget("a")
    assert (outside.read_bytes() if outside.exists() else None) == before


def test_index_files_are_not_written_through_links(memory: Path, tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    outside = tmp_path / "outside"
    outside.mkdir()
    (memory / "index").symlink_to(outside)
    with opened(memory) as store, pytest.raises(MemstoreError, match="link"):
        ingest(store, "b", text=2, tokens=300 * CHUNK, commit_bytes=1 << 20)
        store.build_index()
    assert not list(outside.iterdir())


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
    with pytest.raises(CorruptMemory, match=r"transaction|last pages"):
        opened(memory).close()
    assert not verify_memory(memory).clean


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_new_memory_and_export_are_private_to_the_owner(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        path = tmp_path / "memory"
        with MemoryStore.create(path, SIGNATURE, host_budget=BUDGET) as store:
            ingest(store, "a", text=1, tokens=100)
            export_document(store, "a", tmp_path / "a.memory")
    finally:
        os.umask(before)
    assert mode(path) == 0o700 and mode(tmp_path / "a.memory") == 0o600
    assert {entry.name: mode(entry) for entry in path.iterdir()} == dict.fromkeys(
        ["data.mdb", "lock.mdb", "writer.lock"], 0o600
    )


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
        with opened(memory) as store:
            ingest(store, "b", text=2, tokens=300 * CHUNK, commit_bytes=1 << 20)
            store.compact()
            assert mode(memory / "data.mdb") == wanted
            store.build_index()
            export_document(store, "a", export)
    finally:
        os.umask(umask)
    assert mode(memory / "data.mdb") == mode(memory / "lock.mdb") == mode(export) == wanted
    assert {mode(file) for file in (memory / "index").iterdir()} == {wanted}
    assert mode(memory / "index") == {0o600: 0o700, 0o640: 0o750, 0o664: 0o775}[wanted]
    # who may not write cannot lock either
    assert mode(memory / "writer.lock") == {0o600: 0o600, 0o640: 0o600, 0o664: 0o660}[wanted]


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


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
    with opened(memory) as store:
        ingest(store, "b", text=2, tokens=300 * CHUNK, commit_bytes=1 << 20)
        store.build_index()
    kept = {entry.name for entry in (memory / "index").iterdir()}
    for path in (memory / "index" / "layer-1.idx", memory / "data.mdb"):
        subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    for name in ("mine.partial", "memstore-x.partial"):
        (memory / "index" / name).touch()
        kept.add(name)
    assert len(list(memory.glob("**/*.partial"))) == 4
    with replacement(memory / "index" / "layer-2.idx") as live:
        with opened(memory) as store:
            store.forget("a")
        live.write(b"whole")
    kept.add("layer-2.idx")
    assert {entry.name for entry in (memory / "index").iterdir()} == kept
    assert not list(memory.glob("*.partial"))
