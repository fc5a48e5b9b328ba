"""The commands of README.md and docs/quickstart.md, run in order in an empty directory, print what
these pages show; so do their Python examples.

What may differ from one machine or day to the next is listed in `MAY_DIFFER`, and nothing else is.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from memstore.__main__ import main as command_line
from support.paths import ROOT
from support.shown_commands import Step, run, run_again, steps

README, QUICKSTART = (
    (ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/quickstart.md")
)
# Each process of these imports torch, for seconds; others are started so elsewhere.
FORKED = {"ask", "search"}
MAY_DIFFER = (
    (r"\d{4}-\d\d-\d\d \d\d:\d\d", "DATE"),
    (r"\b\d+(\.\d+)? (bytes|kB|MB|GB)\b", "SIZE"),  # zstd's releases compress differently
    (r"\b\d+\.\d+ s\b", "SECONDS"),
    (r"\b0\.\d\d\b", "SCORE"),  # of a search, and doubt, by the processor's rounding
    (r" +", " "),  # columns are as wide as what is in them
)


def commands(page: str) -> list[Step]:
    """The commands of a page's consoles."""
    return [
        step
        for console in re.findall(r"```console\n(.*?)```", page, re.DOTALL)
        for step in steps(console)
    ]


def programs(page: str) -> list[tuple[str, str]]:
    """The Python examples of a page that show what they print, with that."""
    return re.findall(r"```python\n([^`]*)```\n\n```text\n([^`]*)```", page)


def test_no_page_says_to_install_the_unrelated_package_memstore() -> None:
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


def check_commands(page: str, directory: Path, *, times: int = 1) -> None:
    """Run a page's commands, and again in the same directory, and compare what they print."""
    for again in range(times):
        for step in commands(page):
            words = step.command.split()
            if words[0] == "memstore" and (again or words[1] in FORKED):
                said = run_again(command_line, shlex.split(step.command), directory)
            else:
                said = run(["bash", "-c", step.command], directory)
            assert alike(said) == alike(step.output), f"$ {step.command}\n{said}"


def test_commands_of_the_quickstart_print_what_it_shows(tmp_path: Path) -> None:
    verbs = {step.command.split()[1] for step in commands(QUICKSTART)}
    assert len(verbs) >= 6
    check_commands(QUICKSTART, tmp_path, times=2)


def test_programs_of_the_quickstart_print_what_it_shows(tmp_path: Path) -> None:
    first, *others = programs(QUICKSTART)
    assert len(others) >= 2
    run(["bash", "-c", commands(QUICKSTART)[0].command], tmp_path)  # writes the text
    assert alike(run([sys.executable, "-c", first[0]], tmp_path)) == alike(first[1])
    for program, shown in [first, *others]:  # the first again, in the memory that it made
        said = run_again(lambda program=program: exec(program, {}), ["-c"], tmp_path)
        assert alike(said) == alike(shown), program


@pytest.mark.models
def test_commands_and_program_of_the_readme_print_what_it_shows(tmp_path: Path) -> None:
    check_commands(README, tmp_path)
    (program,) = programs(README)
    assert alike(run([sys.executable, "-c", program[0]], tmp_path)) == alike(program[1])
