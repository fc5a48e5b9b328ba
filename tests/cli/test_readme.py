"""README.md tells the truth: its commands, run in order in an empty directory, print what it shows;
its Python example too.

What may differ from one machine or day to the next is listed in `MAY_DIFFER`, and nothing else is.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from memstore.__main__ import main as command_line
from support.paths import ROOT
from support.shown_commands import run, run_again, steps

README = (ROOT / "README.md").read_text(encoding="utf-8")
# Each process of these imports torch, for seconds; others are started so elsewhere.
FORKED = {"ask", "search"}
MAY_DIFFER = (
    (r"\d{4}-\d\d-\d\d \d\d:\d\d", "DATE"),
    (r"\b\d+(\.\d+)? (bytes|kB|MB|GB)\b", "SIZE"),  # zstd's releases compress differently
    (r"\b\d+\.\d+ s\b", "SECONDS"),
    (r" +", " "),  # columns are as wide as what is in them
)


def blocks(language: str) -> list[str]:
    """The README's blocks of code in a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_nothing_says_to_install_the_foreign_package_of_our_name() -> None:
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


def alike(output: str) -> str:
    """An output without what may differ."""
    for pattern, name in MAY_DIFFER:
        output = re.sub(pattern, name, output)
    return output.strip()


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
            words = step.command.split()
            if words[0] == "memstore" and (again or words[1] in FORKED):
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


def test_results_without_a_commit_have_a_note() -> None:
    for file in sorted((ROOT / "docs/results").glob("*.json")):
        text = file.read_text(encoding="utf-8")
        assert '"commit": null' not in text or "note" in json.loads(text), file.name
