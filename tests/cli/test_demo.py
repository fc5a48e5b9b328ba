"""The demonstration with a real book: what is asked, and the whole of it with a small decoder."""

from pathlib import Path
from typing import Any

import pytest

from memstore.cli.demo import real_book
from memstore.cli.demo.real_book import chapters, print_real_book, questions
from support.commands import refused, run
from support.forked_questions import forked_questions


def test_every_question_is_answered_by_one_passage_of_the_book() -> None:
    texts = dict(chapters())
    asked = questions()
    assert len(asked) == 30 == len({one.question for one in asked})
    for one in asked:
        assert "".join(texts.values()).count(one.passage) == 1
        assert one.passage in texts[one.chapter] and one.is_right(one.passage)
        assert not one.is_right(one.question)


def test_chapters_are_read_and_a_new_process_answers_beside_the_rival(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = [(name, text[:1500]) for name, text in chapters()]
    monkeypatch.setattr(real_book, "chapters", lambda: short)
    monkeypatch.setattr(real_book, "SECONDS", 0.0)  # so that one chapter is read
    few = [one for one in questions() if one.chapter in ("CHAPTER I", "CHAPTER V")][::4]
    monkeypatch.setattr(real_book, "questions", lambda: few)
    store = tmp_path / "memory"
    with forked_questions():
        result: dict[str, Any] = run("demo", "--model", tiny, "--store", store, "--json").json
    assert result["chapters"] == 1 and result["of"] == sum(q.chapter == "CHAPTER I" for q in few)
    for row in result["questions"]:
        assert row["seconds"] >= 0 and row["rival"]["seconds"] > 0 and row["rival"]["answer"]
    print_real_book(result)
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"right: {result['right']} of {result['of']}"
    refused(run("demo", "--model", tiny, "--store", store), "is not empty")


def test_a_text_of_ones_own_is_read_and_asked_line_by_line(tiny: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text("The keeper of the mill is called Anna. " * 12)
    demo = ("demo", "--model", tiny, "--text", own)
    result = run(*demo, "--json", stdin="Who keeps the mill?\n\nWhere?\n").json
    assert [row["question"] for row in result["answers"]] == ["Who keeps the mill?", "Where?"]
    refused(run("demo", "--model", tiny, "--text", tmp_path / "none.txt"), "none.txt")


def test_a_landmark_model_is_shown_by_planted_facts_only() -> None:
    assert "memstore demo --landmarks" in run("demo", "--model", "books-1m").err
    assert run("demo", "--seed", "1").status == 2


def test_as_many_questions_are_asked_of_each_chapter() -> None:
    some = real_book._some(["CHAPTER I", "CHAPTER V"], 5)
    assert [one.chapter for one in some] == ["CHAPTER I"] * 3 + ["CHAPTER V"] * 2
    assert real_book._some([name for name, _ in chapters()], 30) == questions()
