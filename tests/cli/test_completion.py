"""The shell completes commands and options."""

import pytest

from support.commands import run


def test_the_script_of_a_shell_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    # else the shell is looked for among the processes above this one
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    shown = run("--show-completion", "bash")
    assert shown.status == 0 and "_MEMSTORE_COMPLETE=complete_bash" in shown.out
    assert "complete -o default -F _memstore_completion memstore" in shown.out


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [("memstore ind", ["index"]), ("memstore share p", ["push", "pull", "prune"])],
)
def test_a_word_that_is_begun_is_completed(
    monkeypatch: pytest.MonkeyPatch, typed: str, wanted: list[str]
) -> None:
    monkeypatch.setenv("_MEMSTORE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    assert run().out.split() == wanted
