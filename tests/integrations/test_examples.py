"""The scripts of examples/ work as their docstrings say."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from memstore.model.landmark.landmark_model import load_model
from support.diary import ANSWER, DIARY, QUESTION, write_diary
from support.paths import ROOT
from support.shown_commands import run


def printed(name: str, *arguments: object, directory: Path) -> str:
    """What an example prints, run in a directory with the small model."""
    command = [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)]
    return run(command, directory, MEMSTORE_MODEL="books-1m", OPENAI_API_KEY="")


def test_the_folder_example_ingests_and_answers(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "diary.txt").write_text(DIARY)
    out = printed("folder_to_answers.py", "letters", QUESTION, directory=tmp_path)
    assert out.startswith("1 documents") and f"{QUESTION}\n{ANSWER}\n- diary.txt: " in out


@pytest.mark.services
def test_the_openai_client_streams_an_answer_with_sources(tmp_path: Path) -> None:
    write_diary(tmp_path / "memory", load_model())
    out = printed("openai_client.py", "memory", QUESTION, directory=tmp_path)
    assert out.startswith(f"{ANSWER}\n- diary: ")


@pytest.mark.services
@pytest.mark.skipif(find_spec("langchain_core") is None, reason="needs LangChain: make services")
def test_the_langchain_retriever_fills_the_prompt_of_a_chain(tmp_path: Path) -> None:
    write_diary(tmp_path / "memory", load_model())
    out = printed("langchain_retriever.py", "memory", QUESTION, directory=tmp_path)
    assert "diary: " in out and ANSWER in out and out.endswith(f"Question: {QUESTION}\n")
