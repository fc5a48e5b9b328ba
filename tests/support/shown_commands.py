"""Commands that a page shows with their output, run as its reader would run them."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from support.forked import forked
from support.paths import ROOT


class Step(NamedTuple):
    """A command as a user types it, and what the page says it prints."""

    command: str
    output: str


def steps(console: str) -> list[Step]:
    """The commands of a console block; a command goes on to the end of its here-document."""
    found, lines = [], iter(console.splitlines())
    for line in lines:
        if not line.startswith("$ "):
            command, output = found[-1]
            found[-1] = Step(command, f"{output}{line}\n")
            continue
        command = line.removeprefix("$ ")
        if end := re.search(r"<<'(\w+)'", command):
            for more in lines:
                command += f"\n{more}"
                if more == end[1]:
                    break
        found.append(Step(command, ""))
    return found


def variables(directory: Path) -> dict[str, str]:
    """Environment variables of a user who has installed memstore and set none of its variables."""
    programs = directory / ".programs"
    programs.mkdir(exist_ok=True)
    memstore = programs / "memstore"
    memstore.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m memstore "$@"\n')
    memstore.chmod(0o755)
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    chosen = {"MEMSTORE_STORE", "MEMSTORE_MODEL", "COLUMNS"}
    return {name: os.environ[name] for name in os.environ if name not in chosen} | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": paths,
    }


def printed(process: "subprocess.Popen[str]", status: int = 0) -> str:
    """What a process prints that ends so."""
    out, err = process.communicate()
    assert process.returncode == status, f"{process.args} failed:\n{err}"
    return out


def run(command: list[str], directory: Path, *, status: int = 0, **more: str) -> str:
    """What a command prints, run by that reader; more: variables that the reader has set."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    env = variables(directory) | more
    process = subprocess.Popen(command, cwd=directory, env=env, text=True, **streams)
    return printed(process, status)


def run_again(program: Callable[[], object], words: list[str], directory: Path) -> str:
    """What a program prints, run by that reader as a fork that has imported everything."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    env = variables(directory)
    return printed(forked(program, words, cwd=directory, env=env, text=True, **streams))
