"""Ctrl-C and SIGTERM: the exit status names the signal, the memory stays whole, and no partial file
is left.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE

import pytest

import memstore.__main__ as program
from memstore.cli import main
from support import commands
from support.commands import ROOT, run, write_model
from support.synthetic_documents import is_whole

STOPS = int(os.environ.get("MEMSTORE_STOPS", "2"))  # of each command
SEED = int(os.environ.get("MEMSTORE_SEED", "0"))
COMMANDS = [
    "ingest {here}/book --name again --store {memory}",
    "ask Who? --max-new-tokens 100 --store {memory}",
    "verify --store {memory}",
    "compact --store {memory}",
    "export book {work}/book.memory --store {memory}",
    "import {here}/book.memory --name again --store {memory}",
]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a text, and a memory and an export of it."""
    from pydoc_data.topics import topics

    path = tmp_path_factory.mktemp("signals")
    write_model(path / "model")
    (path / "book").write_text("\n".join(topics.values())[:12_000])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMSTORE_MODEL", str(path / "model"))
        assert run("ingest", path / "book", "--store", path / "memory").status == 0
        file = path / "book.memory"
        assert run("export", "book", file, "--store", path / "memory").status == 0
    return path


def start(here: Path, work: Path, command: str) -> "subprocess.Popen[str]":
    """Starts a command on a copy of the memory and waits until it handles signals."""
    shutil.copytree(here / "memory", work / "memory")
    (work / "tmp").mkdir()
    words = [word.format(here=here, work=work, memory=work / "memory") for word in command.split()]

    def begin() -> None:
        parse = main.main

        def told() -> None:  # program.main takes signals by now
            print("begun", flush=True)
            parse()

        main.main = told
        program.main()

    env = {"MEMSTORE_MODEL": str(here / "model"), "TMPDIR": str(work / "tmp")}
    streams = {"stdin": DEVNULL, "stdout": PIPE, "stderr": PIPE}
    process = commands.start(*words, program=begin, env=env, **streams)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    return process


@pytest.mark.parametrize("command", COMMANDS, ids=[command.split()[0] for command in COMMANDS])
def test_an_interrupted_command_leaves_the_memory_whole(
    here: Path, tmp_path: Path, command: str
) -> None:
    chance = random.Random(f"{SEED} {command}")
    work = tmp_path / "work"
    began = time.perf_counter()
    process = start(here, work, command)
    _, err = process.communicate()
    assert process.returncode == 0, err
    seconds = time.perf_counter() - began
    for stop in range(STOPS):
        shutil.rmtree(work)
        number = (signal.SIGINT, signal.SIGTERM)[stop % 2]
        process = start(here, work, command)
        time.sleep(chance.uniform(0, 0.7 * seconds))
        process.send_signal(number)
        _, err = process.communicate()
        # 130: typer was parsing or ending; 0: the command was done; -number: Python was ending
        assert process.returncode in (128 + number, 130, 0, -number), (stop, err)
        left = {entry.name for entry in work.rglob("*") if "memory" not in entry.name}
        assert left <= {"data.mdb", "lock.mdb", "writer.lock", "tmp"}, left
        assert is_whole(work / "memory")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_modules_are_imported_is_one_line(number: signal.Signals) -> None:
    code = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == "memstore.cli.main":
            signal.raise_signal({number:d})
sys.meta_path.insert(0, Interrupting())
import memstore.__main__ as program
program.main()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (128 + number, b"interrupted\n")


@pytest.mark.parametrize("number", [0, signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_a_library_replaces_by_an_error_is_one(number: int) -> None:
    """0: the error without an interrupt, which is shown."""
    code = f"""
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import memstore.__main__ as program, memstore.cli.main as commands
def command():
    try:
        if {number:d}:
            signal.raise_signal({number:d})
    except KeyboardInterrupt:
        pass
    raise ValueError("could not determine the shape")
commands.main = command
program.main()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    if number:
        assert (done.returncode, done.stderr) == (128 + number, b"interrupted\n")
    else:
        assert done.returncode == 1 and b"ValueError: could not" in done.stderr


@pytest.mark.parametrize("waits", [False, True])
def test_a_process_ends_with_all_that_was_to_be_written(tmp_path: Path, waits: bool) -> None:
    """waits: for a thread, as Python's own end does."""
    code = f"""
import atexit, pathlib, sys, threading, time
import memstore.__main__ as program, memstore.cli.main as commands
last = pathlib.Path({str(tmp_path / "last")!r})
def write():
    time.sleep(0.3)
    last.write_text("thread")
def command():
    atexit.register(print, "registered")
    if {waits}:
        threading.Thread(target=write).start()
    print("said")
    sys.exit(3)
commands.main = command
program.run()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"said\nregistered\n", b"")
    assert (tmp_path / "last").exists() == waits
