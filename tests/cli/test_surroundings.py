"""Unusual surroundings of a memory: names of any bytes, hard links, and file systems that cannot be
written.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from memstore.errors import InvalidInput
from memstore.store.memory_store import MemoryStore
from support.commands import STORY, become_nobody, run, run_forked, write_model
from support.synthetic_documents import CHUNK, SIGNATURE, ingest, is_whole


@pytest.fixture(scope="module")
def here() -> Iterator[Path]:
    """A directory that everybody may read, with a model, a text and a memory of it."""
    path = Path(tempfile.mkdtemp(prefix="memstore-test-"))
    path.chmod(0o755)
    write_model(path / "model")
    (path / "story").write_text(STORY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMSTORE_MODEL", str(path / "model"))
        assert run("ingest", path / "story", "--store", path / "memory").status == 0
    for each in path.rglob("*"):
        each.chmod(0o755 if each.is_dir() else 0o644)
    yield path
    shutil.rmtree(path)


def test_paths_of_any_bytes_work_and_are_printed_escaped(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = os.fsdecode(b"b\xff\xfe") + "e\x1b[31m\nx: forgotten"
    monkeypatch.setenv("MEMSTORE_MODEL", str(here / "model"))
    place = tmp_path / name
    place.mkdir()
    text, memory, file = place / f"{name}.txt", place / "memory", place / f"{name}.memory"
    text.write_text(STORY)
    assert run("ingest", text, "--store", memory).status == 0
    (document,) = run("ls", "--store", memory, "--json").json["documents"]
    for words in (
        ["ls", "--store", memory],
        ["ask", "The code is", "--store", memory],
        ["search", "fox", "--store", memory],
        ["export", document["name"], file, "--store", memory],
        ["import", file, "--store", place / "other"],
        ["verify", "--repair", "--store", memory],
        ["compact", "--store", memory],
        ["rm", document["name"], "--store", memory],
    ):
        done = run(*words)
        assert done.status == 0, (words, done)
        assert "\x1b" not in done.out and "\nx: forgotten:" not in done.out
        (done.out + done.err).encode()
    refused = run("ls", "--store", place / "none")
    assert refused.status == 2 and refused.err.count("\n") == 1


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb", "writer.lock"])
def test_files_with_hard_links_are_not_written(tmp_path: Path, name: str) -> None:
    memory, outside = tmp_path / "memory", tmp_path / "outside"
    with MemoryStore.create(memory, SIGNATURE) as store:
        ingest(store, "book", 5 * CHUNK)
    if name != "data.mdb":
        (memory / name).write_bytes(b"mine")
    os.link(memory / name, outside)
    before = outside.read_bytes()
    with pytest.raises(InvalidInput, match="hard link"), MemoryStore.open(memory) as store:
        store.forget("book")
    assert outside.read_bytes() == before
    copy = shutil.copytree(memory, tmp_path / "copy", ignore=shutil.ignore_patterns("*lock*"))
    with MemoryStore.open(copy) as store:
        store.forget("book")


@pytest.fixture(params=["nobody", "mount"])
def unwritable(request: pytest.FixtureRequest, here: Path, tmp_path: Path) -> Iterator[Path]:
    """The memory where this user may not write, or on a file system that nobody may."""
    if request.param == "nobody":
        for name in ("lock.mdb", "writer.lock"):
            (here / "memory" / name).unlink(missing_ok=True)
        (here / "memory").chmod(0o555)
        yield here / "memory"
        (here / "memory").chmod(0o755)
        return
    place = tmp_path / "mounted"
    place.mkdir()
    if subprocess.run(["mount", "--bind", here / "memory", place], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", place], check=True)
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def test_commands_that_read_work_on_a_memory_that_cannot_be_written(
    here: Path, unwritable: Path
) -> None:
    scratch = Path(tempfile.mkdtemp(dir=here))
    scratch.chmod(0o777)

    def prepare() -> None:
        os.environ["MEMSTORE_MODEL"] = str(here / "model")
        if unwritable.parent == here:
            become_nobody()

    reading = ["ls", "stats", "verify", "ask Who?", "search fox", f"export story {scratch}/file"]
    for command in reading:
        if command == "verify" and unwritable.parent == here:
            continue  # it starts Python, which may lie where nobody else may run it
        done = run_forked(prepare, *command.split(), "--store", unwritable)
        assert done.status == 0, (command, done)
        assert "Traceback" not in done.err
    added = [f"ingest {here}/story --name again", f"import {scratch}/file --name again"]
    for command in (*added, "rm story", "compact", "index"):
        done = run_forked(prepare, *command.split(), "--store", unwritable)
        assert done.status == 1 and done.err.startswith("error: "), (command, done)
        assert str(unwritable) in done.err and done.err.count("\n") == 1
    assert is_whole(unwritable)
