"""Help, wrong usage, and which memory a command uses."""

import os
from pathlib import Path

import pytest

from docs_build.commands import commands
from support.commands import STORY, refused, run


@pytest.mark.parametrize("path", dict(commands()))
def test_the_help_of_a_command_has_an_example(path: str) -> None:
    result = run(*path.split()[1:], "--help")
    assert run(*path.split()[1:], "-h").out == result.out
    assert result.status == 0 and path in result.out.split("Example:")[1]
    assert "--json" in result.out or path == "memstore mcp"  # whose standard output is MCP's


def test_no_arguments_show_the_help() -> None:
    assert run().status == 0
    for words in ([], ["share", "--help"]):
        assert "..." not in run(*words).out.split("Commands:")[1]  # whole sentences
    assert run("--version").out.startswith("memstore ")


@pytest.mark.parametrize(
    ("line", "command", "words"),
    [
        ("ask", "ask", "QUESTION"),
        ("ask Who? --tok-k 3", "ask", "--top-k"),
        ("ask Who? --top-k", "ask", "--top-k"),
        ("ask who planted it", "ask", 'put the text in quotes: memstore ask "..."'),
        ("search x --top-k 0", "search", "--top-k"),
        ("ingest", "ingest", "PATH"),
        ("ingest a.txt b.txt --name x", "ingest", "--name"),
        ("ingest a.txt --host-budget much", "ingest", "64MB"),
        ("ingest a.txt --host-budget 9223372036GB", "ingest", "less"),
        ("ingest a.txt --keep nothing", "ingest", "'text'"),
        ("ingest a.txt --address localhost:6379", "ingest", "--to"),
        ("ingest a.txt --to s3://x --sync", "ingest", "--sync"),
        ("train a.txt --out run --preset huge", "train", "paper"),
        ("serve --port 99999", "serve", "65535"),
        ("share push", "share push", "URL"),
        ("share", "share", "command"),
        ("serch x", "", "'search'"),
        ("remove x", "", "'rm'"),
        ("--verison", "", "--version"),
    ],
)
def test_wrong_usage_is_one_line_that_names_the_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, command: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEMSTORE_STORE", raising=False)
    for name in ("a.txt", "b.txt"):
        Path(name).write_text(STORY)
    result = run(*line.split())
    refused(result, words, status=2)
    assert result.err.endswith(f"(see {' '.join(['memstore', *command.split()])} --help)\n")
    assert not Path("memory").exists() and not Path("run").exists()


# The memory: --store, else $MEMSTORE_STORE, else ./memory


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and no $MEMSTORE_STORE."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEMSTORE_STORE", raising=False)
    return tmp_path


@pytest.mark.usefixtures("the_model")
def test_the_default_memory_is_in_the_working_directory(here: Path) -> None:
    (here / "story").write_text(STORY)
    assert run("ingest", "story").status == 0
    assert (here / "memory" / "data.mdb").is_file()
    assert "story" in run("ls").out
    assert run("ask", "Who lives there?", "--json").json["sources"]
    assert run("rm", "story").out.startswith("story: removed, ")


def test_the_option_wins_over_the_environment(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "./memory holds no memory; make one: memstore ingest"
    refused(run("share", "push", "memory://x"), said)
    refused(run("ls", "--store", "../yours"), "error: ../yours holds no memory")
    monkeypatch.setenv("MEMSTORE_STORE", str(here / "mine"))
    refused(run("ls"), str(here / "mine"))
    refused(run("ls", "--store", here / "yours"), str(here / "yours"))
    monkeypatch.setenv("MEMSTORE_STORE", "s3://team/library")
    refused(run("compact"), "published memory", "share pull", status=2)


@pytest.mark.usefixtures("the_model")
def test_a_tilde_is_the_home_directory_wherever_a_path_is_given(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(here / "home"))
    monkeypatch.setenv("MEMSTORE_STORE", "~/memory")
    (here / "home" / "notes").mkdir(parents=True)
    (here / "home" / "notes" / "story").write_text(STORY)
    assert run("ingest", "~/notes").status == 0
    assert run("ingest", "~/notes/st*y", "~/notes/story").status == 0
    assert run("export", "story", "~/story.memstore").status == 0
    assert run("import", "--store=~/other", "~/story.memstore").status == 0
    assert run("share", "push", "file://~/published").status == 0
    cached = ["--store", "file://~/published", "--local-cache", "~/cache"]
    (here / "home" / "model").symlink_to(os.environ["MEMSTORE_MODEL"])
    assert run("ask", "Who?", *cached, "--model", "~/model").status == 0
    assert run("verify", "--store", "~/memory").status == 0
    made = ["cache", "memory", "model", "notes", "other", "published", "story.memstore"]
    assert sorted(path.name for path in (here / "home").iterdir()) == made
    assert [path.name for path in here.iterdir()] == ["home"]
