"""README.md tells the truth: its commands, run in order in an empty directory, print what it shows;
its Python example too.

What may differ from one machine or day to the next is listed in `MAY_DIFFER`, and nothing else is.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from memstore.__main__ import main as command_line
from support.forked import forked
from support.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
MAY_DIFFER = (
    (r"\d{4}-\d\d-\d\d \d\d:\d\d", "DATE"),
    (r"\b\d+(\.\d+)? (bytes|kB|MB|GB)\b", "SIZE"),  # zstd's releases compress differently
    (r"\b\d+\.\d+ s\b", "SECONDS"),
    (r" +", " "),  # columns are as wide as what is in them
)


class Step(NamedTuple):
    """A command as it is typed, and what it is said to print."""

    command: str
    output: str


def blocks(language: str) -> list[str]:
    """The README's blocks of code in a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_nothing_says_to_install_the_package_of_that_name_which_is_somebody_elses() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a checkout")
    wrong = re.compile(rb"pip3? install( -\S+)* ['\"]?memstore(?!-lm)\b")
    said = [
        name
        for name in listed.stdout.decode().split("\0")
        if (ROOT / name).is_file() and wrong.search((ROOT / name).read_bytes())
    ]
    assert said == []


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


def alike(output: str) -> str:
    """An output without what may differ."""
    for pattern, name in MAY_DIFFER:
        output = re.sub(pattern, name, output)
    return output.strip()


def variables(directory: Path) -> dict[str, str]:
    """Those of a reader who has installed memstore, and has set none of ours."""
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


def printed(process: "subprocess.Popen[str]") -> str:
    """What a process prints that ends well."""
    out, err = process.communicate()
    assert process.returncode == 0, f"{process.args} failed:\n{err}"
    return out


def run(command: list[str], directory: Path) -> str:
    """What a command prints, run by that reader."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return printed(
        subprocess.Popen(command, cwd=directory, env=variables(directory), text=True, **streams)
    )


def run_again(program: Callable[[], object], words: list[str], directory: Path) -> str:
    """What a program prints, run by that reader as a fork that has imported everything."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    env = variables(directory)
    return printed(forked(program, words, cwd=directory, env=env, text=True, **streams))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of somebody who follows the README."""
    return tmp_path_factory.mktemp("reader")


def test_the_commands_print_what_the_readme_shows(reader: Path) -> None:
    every = [step for console in blocks("console") for step in steps(console)]
    verbs = {step.command.split()[1] for step in every if step.command.startswith("memstore ")}
    assert len(verbs) >= 6
    for again in (False, True):  # twice in a row, in one directory
        for step in every:
            if again and step.command.startswith("memstore "):
                said = run_again(command_line, shlex.split(step.command), reader)
            else:
                said = run(["bash", "-c", step.command], reader)
            assert alike(said) == alike(step.output), f"$ {step.command}\n{said}"


def test_the_python_example_prints_what_the_readme_shows(reader: Path) -> None:
    example, *none = blocks("python")
    shown, *_ = blocks("text")
    assert not none
    here_document = next(step for console in blocks("console") for step in steps(console))
    run(["bash", "-c", here_document.command], reader)
    assert alike(run([sys.executable, "-c", example], reader)) == alike(shown)
    said = run_again(lambda: exec(example, {}), ["-c"], reader)  # what is there already is found
    assert alike(said) == alike(shown)


def test_a_result_whose_commit_is_not_known_says_so() -> None:
    for file in sorted((ROOT / "docs/results").glob("*.json")):
        text = file.read_text(encoding="utf-8")
        assert '"commit": null' not in text or "note" in json.loads(text), file.name
