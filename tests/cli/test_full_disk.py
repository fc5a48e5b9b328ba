"""A full disk under every command that writes: one line reports it, the memory stays whole, and the
same command works once there is room.

The disk is a small file system where mounting is allowed, and a limit on file sizes elsewhere.
"""

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from memstore.store.memory_store import MemoryStore
from support.commands import OTHER, STORY, Result, run, run_forked, write_model
from support.synthetic_documents import is_whole


class Limited:
    """No file grows beyond what the largest has, and a bit."""

    def __init__(self, scratch: Path) -> None:
        self.path = scratch / "disk"
        self.path.mkdir(exist_ok=True)

    def run_full(self, room: int, grows: Path, *arguments: object) -> Result:
        most = (grows.stat().st_size if grows.exists() else 1 << 10) + room

        return run_forked(
            lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)), *arguments
        )

    def close(self) -> None:
        """There is nothing to release."""


class Mounted(Limited):
    """A file system of its own, filled up."""

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(self.path)]
        try:
            subprocess.run(mount, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("mounting is not allowed here")

    def run_full(self, room: int, grows: Path, *arguments: object) -> Result:
        filler = self.path / "filler"
        with filler.open("wb", buffering=0) as out:
            while True:
                status = os.statvfs(self.path)
                left = status.f_bavail * status.f_frsize - room
                if left <= 0:
                    break
                out.write(bytes(min(left, 1 << 20)))
        result = run_forked(lambda: None, *arguments)
        filler.unlink()
        return result

    def close(self) -> None:
        subprocess.run(["umount", str(self.path)], check=True)


def small_disk(scratch: Path) -> Limited:
    """A small file system if the tests may mount one, else a limit of file sizes."""
    try:
        return Mounted(scratch)
    except pytest.skip.Exception:
        return Limited(scratch)


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model, texts, an export, a memory without free pages, and one with a damaged document."""
    here = tmp_path_factory.mktemp("origin")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMSTORE_MODEL", str(write_model(here / "model")))
        (here / "story").write_text(STORY)
        (here / "other").write_text(OTHER * 2)
        memory, damaged = here / "memory", here / "damaged"
        for text in ("story", "other"):
            assert run("ingest", here / text, "--store", memory).status == 0
        assert run("export", "story", here / "story.memory", "--store", memory).status == 0
        assert run("compact", "--store", memory).status == 0
        with MemoryStore.open(memory) as store:
            write = store.document("other").write
        shutil.copytree(memory, damaged)
        data = bytearray((damaged / "data.mdb").read_bytes())
        for record in re.finditer(b"mR\x04.{21}" + re.escape(write), bytes(data), re.DOTALL):
            data[record.end() + 60] ^= 255
        (damaged / "data.mdb").write_bytes(data)
        yield here


@pytest.fixture
def disk(origin: Path, tmp_path: Path) -> Iterator[Limited]:
    """A small disk with copies of both memories."""
    here = small_disk(tmp_path)
    for name in ("memory", "damaged"):
        shutil.copytree(origin / name, here.path / name)
    yield here
    here.close()


COMMANDS = {
    "ingest {origin}/other --name again --store {memory}": "memory/data.mdb",
    "ingest {origin}/other --store {disk}/new": "new/data.mdb",
    "ingest {origin}/other --name story --replace --store {memory}": "memory/data.mdb",
    "ingest {origin}/other --name second --store {memory}": "memory/data.mdb",
    "rm story --store {memory}": "memory/data.mdb",
    "compact --store {memory}": "",
    "index --store {memory}": "",
    "export story {disk}/story.memory --store {memory}": "",
    "import {origin}/story.memory --name again --store {memory}": "memory/data.mdb",
    "import {origin}/story.memory --store {disk}/new": "",
    "verify --repair --store {damaged}": "damaged/data.mdb",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_reports_a_full_disk_and_works_once_there_is_room(
    disk: Limited, origin: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMSTORE_MODEL", str(origin / "model"))
    if command.startswith("index"):
        pytest.importorskip("faiss")
        monkeypatch.setattr("memstore.model.landmark.landmark_model._STRETCHES", 1)  # of eight
        monkeypatch.setattr("memstore.index.landmark_index.LEAST", 1)  # landmarks to build over
    memory, damaged = disk.path / "memory", disk.path / "damaged"
    words = [
        word.format(origin=origin, disk=disk.path, memory=memory, damaged=damaged)
        for word in command.split()
    ]
    grows = disk.path / (COMMANDS[command] or "nothing")
    for room in (0, 8192):
        full = disk.run_full(room, grows, *words)
        if full.status == 0 and room:
            break  # that was enough
        last = full.err.splitlines()[-1]
        assert full.status == 1 and not full.out, full
        assert last.startswith("error: ") and "make room" in last and str(disk.path) in last
        assert "Traceback" not in full.err
        assert is_whole(memory)
        listed = run("ls", "--store", memory, "--json").json["documents"]
        states = {document["name"]: document["state"] for document in listed}
        assert states == dict.fromkeys(["story", "other"], "ready") | (
            {"again": "ingesting"} if "again" in states else {}
        )
        left = {entry.name for at in (memory, damaged) for entry in at.rglob("*")}
        assert left <= {"data.mdb", "lock.mdb", "writer.lock", "index"}
    else:
        assert run(*words).status == 0
    for made in disk.path.glob("*/data.mdb"):
        if made.parent != damaged or "repair" in command:
            assert is_whole(made.parent)


def test_training_reports_a_full_disk_and_leaves_no_partial_file(
    disk: Limited, tmp_path: Path
) -> None:
    from pydoc_data.topics import topics

    text, out = tmp_path / "text.txt", disk.path / "run"
    text.write_text("\n".join(topics.values())[:150_000])
    command = ["train", text, "--out", out, "--minutes", "0.002"]
    seen = set()
    for room in (0, 1_000_000):
        shutil.rmtree(out, ignore_errors=True)
        full = disk.run_full(room, disk.path / "nothing", *command)
        last = full.err.splitlines()[-1]
        assert full.status == 1 and "Traceback" not in full.err, full
        assert last.startswith(f"error: {out}") and last.endswith("make room and try again"), last
        assert not list(out.rglob("*.partial"))
        seen.add(last.split(":")[1])
    assert len(seen) == 2, seen


def test_the_lock_file_is_allocated_before_it_is_mapped(tmp_path: Path, origin: Path) -> None:
    shutil.copytree(origin / "memory", tmp_path / "memory")
    lock = tmp_path / "memory" / "lock.mdb"
    for sparse in (False, True):
        lock.unlink(missing_ok=True)
        if sparse:  # as some programs copy it
            with lock.open("wb") as out:
                out.truncate(1 << 15)
        with MemoryStore.open(tmp_path / "memory", read_only=True):
            status = lock.stat()
            assert status.st_size >= 1 << 15 and 512 * status.st_blocks >= status.st_size
