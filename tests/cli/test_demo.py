"""The demonstration with a real book, run with a tiny decoder."""

from pathlib import Path
from typing import Any

import pytest

from memstore.cli import demo
from memstore.cli.demo import book_questions, chapters, choose_questions, print_book
from support.commands import run


def test_one_passage_of_the_book_answers_each_question() -> None:
    texts = dict(chapters())
    asked = book_questions()
    assert len(asked) == 30 == len({one.question for one in asked})
    for one in asked:
        assert "".join(texts.values()).count(one.passage) == 1
        assert one.passage in texts[one.chapter] and one.is_right(one.passage)
        assert not one.is_right(one.question)


def test_questions_are_spread_over_the_chapters() -> None:
    names = [name for name, _ in chapters()]
    of_two = [one.chapter for one in choose_questions(names[:2], 5)]
    assert of_two == [names[0]] * 3 + [names[1]] * 2
    assert len(choose_questions(names, 15)) == 15
    assert choose_questions(names, 30) == book_questions()


def test_a_new_process_answers_about_the_chapters_from_memory_and_from_text(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (name, text), *_ = chapters()
    monkeypatch.setattr(demo, "chapters", lambda: [(name, text[:1500])])
    result: dict[str, Any] = run("demo", "--model", tiny, "--questions", 3, "--json").json
    assert result["chapters"] == 1 and result["of"] == len(result["questions"]) == 3
    for row in result["questions"]:
        assert row["seconds"] >= 0 and row["as_text"]["seconds"] > 0 and row["as_text"]["answer"]
    print_book(result)
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"right: {result['right']} of {result['of']}"


def test_a_landmark_model_is_refused() -> None:
    refused_of = run("demo", "--model", "books-1m")
    assert refused_of.status == 2 and "needs a language model" in refused_of.err
