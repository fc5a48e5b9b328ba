"""Wrong usage is one line that names the help of the command meant, and what was meant."""

from pathlib import Path

import pytest

from support.commands import refused, run


@pytest.mark.parametrize(
    ("line", "of", "said"),
    [
        ("ask", "ask", "question"),
        ("ask Who? --tok-k 3", "ask", "--top-k"),
        ("ask Who? --seed many", "ask", "'many'"),
        ("ingest", "ingest", "PATH"),
        ("ingest a.txt --append --replace", "ingest", "exclude"),  # said by the command itself
        ("share push", "share push", "URL"),
        ("share psuh s3://x", "share", "'push'"),
        ("share", "share", "command"),
        ("serch x", "", "'search'"),
        ("--verison", "", "--version"),
        ("remember", "", "remember"),
    ],
)
def test_wrong_usage_names_the_help_of_the_command_that_was_meant(
    line: str, of: str, said: str
) -> None:
    help_of = f"(see memstore {of} --help)\n".replace("  ", " ")
    result = run(*line.split())
    refused(result, said, status=2)
    assert result.err.endswith(help_of)


def test_a_question_of_several_words_is_told_to_be_quoted() -> None:
    for verb in ("ask", "search"):
        said = run(verb, "who", "planted", "it").err
        assert f'put the text in quotes: memstore {verb} "..." (see memstore {verb} --help)' in said


def test_a_published_memory_that_is_not_there_is_not_the_default_one(tmp_path: Path) -> None:
    said = run("share", "pull", f"file://{tmp_path}/none", "diary").err
    assert "./memory" not in said and "none" in said
