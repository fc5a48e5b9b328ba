"""The commands of docs/library.md, run in order on a cluster of this machine, print what the page
shows, except for times.
"""

import re
from pathlib import Path

import pytest

pytest.importorskip("ray")

from support.paths import ROOT
from support.shown_commands import run, steps

pytestmark = pytest.mark.services
PAGE = (ROOT / "docs/library.md").read_text(encoding="utf-8")


def timeless(output: str) -> str:
    return re.sub(r"in \d+ (min \d+ )?s, [\d,]+ a second", "in TIME", output).strip()


def test_the_commands_print_what_the_page_shows(tmp_path: Path) -> None:
    (console,) = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    every = steps(console)
    assert sum(" --to " in step.command for step in every) == 2
    for command, shown in every:
        status = 1 if "refused" in shown else 0
        printed = run(["bash", "-c", command], tmp_path, status=status)
        assert timeless(printed) == timeless(shown), f"$ {command}\n{printed}"
