"""Commands and Python of docs/serving.md run and succeed; the dashboard of docs/deploy uses
existing metrics.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support.diary import DIARY
from support.paths import ROOT
from support.serving import serving

DOCS = ROOT / "docs" / "serving.md"
ADDRESS = "http://127.0.0.1:8741"
# curl fails on an error status, and every part of a pipe must succeed
STRICT = 'set -euo pipefail\ncurl() { command curl --fail-with-body "$@"; }\n'


def blocks(language: str, word: str) -> list[str]:
    """The code blocks of the page in a language, with a word in them."""
    found = re.findall(rf"^```{language}\n(.*?)^```", DOCS.read_text(), re.DOTALL | re.MULTILINE)
    return [block for block in found if word in block]


@pytest.mark.skipif(
    not (shutil.which("curl") and shutil.which("jq")), reason="curl or jq is not installed"
)
def test_commands_and_python_of_the_serving_page_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "diary.txt").write_text(DIARY, encoding="utf-8")
    scripts, programs = blocks("sh", "curl"), blocks("python", "openai")
    scripts.sort(key=lambda one: "-F file=" not in one)  # what is asked is uploaded before
    assert scripts and programs
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "mem") as served:
        script = STRICT + "\n".join(scripts).replace(ADDRESS, served.url)
        ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "4467" in ran.stdout and "the ferry would" in ran.stdout
        for program in programs:
            exec(program.replace(ADDRESS, served.url), {})
    shown = capsys.readouterr().out
    assert "4467" in shown and "diary" in shown


def test_the_dashboard_queries_metrics_that_a_server_has(tmp_path: Path) -> None:
    dashboard = (ROOT / "docs/deploy/grafana.json").read_text(encoding="utf-8")
    panels = json.loads(dashboard)["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"\b(?:memstore|gen_ai)_\w+", query)}
    with serving(tmp_path / "mem") as served, served.client() as client:
        served.chat("What is the combination of the lime barn?")
        shown = set(re.findall(r"^\w+", client.get("/metrics").text, re.MULTILINE))
    assert len(asked) > 10 and asked - {"gen_ai_token_type"} <= shown
