"""Signals: a command ends in order with 128 and the signal's number, says no traceback, leaves
nothing behind, and asking for the end again and again changes none of that.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memstore.temporary import temporary_directory
from support.commands import ROOT, run, whole, write_model
from support.forked import forked

STOPS = int(os.environ.get("MEMSTORE_STOPS", "4"))  # of each command
SEED = int(os.environ.get("MEMSTORE_SEED", "0"))
# Python's own beginning, which no program can guard, is over when this is printed, and what a
# signal does is settled.
BEGIN = """
import memstore.__main__ as program
command_line = program._command_line
program._command_line = lambda: (print("begun", flush=True), command_line())
program.main()
"""
# At these stops of a command Python starts anew, and at all in a long run; otherwise it is forked.
FRESH = {"ask": (0, 3), "ls": (0, 1, 2, 3)}
COMMANDS = [
    "ingest {here}/book.txt --name again --store {memory}",
    "ask Who? --max-new-tokens 100 --store {memory}",
    "ls --store {memory}",
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
    (path / "book.txt").write_text("\n".join(topics.values())[:30_000])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMSTORE_MODEL", str(path / "model"))
        assert run("ingest", path / "book.txt", "--store", path / "memory").status == 0
        file = path / "book.memory"
        assert run("export", "book", file, "--store", path / "memory").status == 0
    return path


def is_fresh(command: str, stop: int) -> bool:
    return STOPS > 4 or stop in FRESH.get(command.split()[0], ())


def started(here: Path, work: Path, command: str, fresh: bool) -> "subprocess.Popen[bytes]":
    """A command whose signals are those of a terminal's, with a temporary directory of its own."""
    (work / "tmp").mkdir(exist_ok=True)
    words = [word.format(here=here, work=work, memory=work / "memory") for word in command.split()]
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MEMSTORE_MODEL": str(here / "model"),
        "TMPDIR": str(work / "tmp"),
    }
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if not fresh:
        process = forked(lambda: exec(BEGIN, {}), ["memstore", *words], env=variables, **streams)
    else:
        process = subprocess.Popen(
            [sys.executable, "-c", BEGIN, *words],
            env=variables,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            **streams,
        )
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    return process


@pytest.mark.parametrize("command", COMMANDS, ids=[command.split()[0] for command in COMMANDS])
def test_a_command_ends_in_order_however_often_it_is_asked_to(
    here: Path, tmp_path: Path, command: str
) -> None:
    chance = random.Random(f"{SEED} {command}")
    work = tmp_path / "work"
    seconds = {}
    for fresh in {is_fresh(command, stop) for stop in range(STOPS)}:
        shutil.copytree(here / "memory", work / "memory")
        began = time.perf_counter()
        process = started(here, work, command, fresh)
        _, err = process.communicate()
        assert process.returncode == 0, err
        seconds[fresh] = time.perf_counter() - began
        shutil.rmtree(work)
    kinds = [[signal.SIGTERM], [signal.SIGHUP], [signal.SIGINT] * 2, [signal.SIGINT] * 4]
    for stop in range(STOPS):
        shutil.copytree(here / "memory", work / "memory")
        fresh = is_fresh(command, stop)
        process = started(here, work, command, fresh)
        time.sleep(chance.uniform(0, 0.7 * seconds[fresh]))
        signals = kinds[stop % len(kinds)]
        for each in signals:
            process.send_signal(each)
            time.sleep(chance.uniform(0, 0.03))
        _, err = process.communicate()
        # done before, or dead by the signal once Python itself was ending
        assert process.returncode in (128 + signals[0], 0, -signals[0]), (stop, err)
        assert b"Traceback" not in err and b"ignored in" not in err, err
        left = {entry.name for entry in work.rglob("*") if "memory" not in entry.name}
        assert left <= {"data.mdb", "lock.mdb", "writer.lock", "tmp"}, left
        assert whole(work / "memory")
        shutil.rmtree(work)


def test_an_interrupt_in_a_destructor_is_not_lost() -> None:
    code = """
import signal, sys, time
from memstore.cli.terminal.signals import end_in_order
class Late:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)
def command():
    late = Late()
    del late
    time.sleep(600)
end_in_order(command)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (143, b"")


def test_an_interrupt_waits_for_the_end_of_an_import(tmp_path: Path) -> None:
    code = "import time\nprint('begun', flush=True)\nfor _ in range(20):\n    time.sleep(0.03)\n"
    (tmp_path / "slow.py").write_text(code + "print('imported', flush=True)\n")
    code = f"""
import sys
sys.path.append({str(tmp_path)!r})
from memstore.cli.terminal.signals import end_in_order
def command():
    import slow
    import time
    time.sleep(600)
end_in_order(command)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
        assert process.communicate()[0] == b"imported\n" and process.returncode == 143


def test_an_interrupt_that_becomes_another_error_is_an_end_in_order() -> None:
    code = """
import signal
from memstore.cli.terminal.signals import end_in_order
def command():
    try:
        signal.raise_signal(signal.SIGTERM)
    except KeyboardInterrupt:
        raise ValueError("could not determine the shape of an object") from None
end_in_order(command)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (143, b"")


def test_an_interrupt_while_a_directory_is_removed_leaves_none_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unlink, asked = os.unlink, iter([True])

    def interrupted(*given: object, **more: object) -> None:
        if next(asked, False):
            raise KeyboardInterrupt
        unlink(*given, **more)

    with pytest.raises(KeyboardInterrupt), temporary_directory() as path:
        for name in "abc":
            (path / name).touch()
        monkeypatch.setattr(os, "unlink", interrupted)
    assert not path.exists()


def test_who_asks_again_later_is_obeyed_at_once() -> None:
    code = """
import time
from memstore.cli.terminal.signals import end_in_order
def command():
    try:
        print("begun", flush=True)
        time.sleep(600)
    finally:
        print("ending", flush=True)
        time.sleep(600)
end_in_order(command)
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"begun\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == b"ending\n"
    time.sleep(1.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 143
    process.stdout.close()
