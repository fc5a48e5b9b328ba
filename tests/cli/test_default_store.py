"""A command that is told of no memory takes that of the environment, else ./memory."""

import os
from pathlib import Path

import pytest
import typer

from memstore.cli.main import app
from support.commands import STORY, refused, run

pytestmark = pytest.mark.usefixtures("the_model")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, and nothing that names a memory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEMSTORE_STORE", raising=False)
    return tmp_path


def test_a_memory_is_made_and_asked_where_none_is_named(here: Path) -> None:
    (here / "story.txt").write_text(STORY)
    assert run("ingest", "story.txt").status == 0
    assert (here / "memory" / "data.mdb").is_file()
    assert "story" in run("ls").out
    assert run("ask", "Who lives there?", "--json").json["sources"]
    assert run("rm", "story").out.startswith("story: removed, ")


@pytest.mark.parametrize(
    "command", [["ls"], ["ask", "Who?"], ["rm", "x"], ["verify"], ["share", "push", "memory://x"]]
)
def test_where_there_is_no_memory_one_line_says_how_to_make_one(
    here: Path, command: list[str]
) -> None:
    refused(run(*command), "./memory holds no memory; make one: memstore ingest FILE\n")
    assert not (here / "memory").exists()


def test_the_environment_names_a_memory_and_the_command_line_another(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMSTORE_STORE", str(here / "mine"))
    refused(run("ls"), str(here / "mine"))
    refused(run("ls", "--store", here / "yours"), str(here / "yours"))
    monkeypatch.setenv("MEMSTORE_STORE", "s3://team/library")
    refused(run("compact"), "published memory", "share pull", status=2)


def test_a_tilde_is_the_home_directory_wherever_a_path_is_given(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(here / "home"))
    monkeypatch.setenv("MEMSTORE_STORE", "~/memory")
    (here / "home" / "notes").mkdir(parents=True)
    (here / "home" / "notes" / "story.txt").write_text(STORY)
    assert run("ingest", "~/notes", "--recursive").status == 0
    assert run("ingest", "~/notes/st*.txt", "~/notes/story.txt").status == 0
    assert run("export", "story", "~/story.memstore").status == 0
    assert run("import", "--store=~/other", "~/story.memstore").status == 0
    assert run("ask", "Who?", "--trace", "~/trace").status == 0
    assert run("share", "push", "file://~/published").status == 0
    cached = ["--store", "file://~/published", "--local-cache", "~/cache"]
    (here / "home" / "model").symlink_to(os.environ["MEMSTORE_MODEL"])
    assert run("ask", "Who?", *cached, "--model", "~/model").status == 0
    assert run("verify", "--store", "~/memory").status == 0
    made = ["cache", "memory", "model", "notes", "other", "published", "story.memstore", "trace"]
    assert sorted(path.name for path in (here / "home").iterdir()) == made
    assert [path.name for path in here.iterdir()] == ["home"]


def test_every_command_of_a_memory_has_the_same_default() -> None:
    commands = typer.main.get_command(app).commands
    of_share = commands["share"].commands
    commands = {**commands, "push": of_share["push"], "pull": of_share["pull"]}
    without = {"train", "adapt", "calibrate", "demo", "share", "bench"}
    for name in commands.keys() - without:
        (option,) = (p for p in commands[name].params if "--store" in p.opts)
        assert (option.required, option.envvar) == (False, "MEMSTORE_STORE"), name
