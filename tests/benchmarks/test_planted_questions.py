"""The planted questions of the results tables: what is stored does not change, and what is planted
says what the questions ask for, whatever books it is planted in.
"""

import hashlib
import json
import re
from pathlib import Path
from random import Random

import pytest
import zstandard

from benchmarks.real import planted
from benchmarks.real.hay import flowing
from benchmarks.real.planted import digest, load

CONTENT = {
    "books-test": "48af9a55e986d3348744194814b9727e",
    "books-val": "a2f91c1727d4a2b9ffaef395f71a958f",
}
WORDS = re.findall(
    r"\w+", "the of and a to in he was it that on his with as had not at by from ship rain"
)


@pytest.fixture(scope="module")
def books() -> list[str]:
    rng = Random(0)

    def sentence() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(4, 12))).capitalize() + "."

    return [" ".join(sentence() for _ in range(3000)) for _ in range(2)]


@pytest.mark.parametrize("corpus", planted.CORPORA)
def test_stored_questions_are_those_of_the_published_tables(corpus: str) -> None:
    stored = (Path(planted.__file__).parent / f"{corpus}.jsonl.zst").read_bytes()
    content = zstandard.decompress(stored)
    assert hashlib.blake2b(content, digest_size=16).hexdigest() == CONTENT[corpus]


@pytest.mark.parametrize("corpus", planted.CORPORA)
def test_planted_sentences_hold_the_answers_in_other_books(corpus: str, books: list[str]) -> None:
    plan = load(corpus, books, [8192])
    asked = {question.task for question in plan.questions}
    assert len(asked) == 15 and len(plan.questions) % 15 == 0
    for question in plan.questions:
        assert set(question.documents) <= plan.documents.keys()
        assert bool(question.stated) == bool(question.answers)
        for stated in question.stated:
            text = plan.documents[stated.document]
            assert stated.document in question.documents
            assert text[stated.start : stated.stop].strip() == text[stated.start : stated.stop]
            if stated.value is not None:
                assert stated.start <= stated.value < stated.stop
                assert text[stated.value :].startswith(question.answers)


def test_original_books_give_the_measured_documents_or_an_error(
    books: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = flowing(books[0])
    slot = book.index(".", 200) + 1
    excerpt, sentence = book[100:2000], " The code is 12345."
    document = excerpt[: slot - 100] + sentence + excerpt[slot - 100 :]
    header = {
        "trials": {"2048": 1},
        "books": [["A. Writer, A Book (1900)", digest(book)], ["", digest(flowing(books[1]))]],
    }
    row = {
        "document": "book 0",
        "book": 0,
        "start": 100,
        "stop": 2000,
        "excerpt": digest(excerpt),
        "digest": digest(document),
        "planted": [[slot - 100, sentence]],
    }
    question = {
        "question": "fact 0",
        "task": "fact",
        "length": 2048,
        "documents": ["book 0"],
        "text": "What is the code?",
        "primed": "The code is ",
        "answers": ["12345"],
        "rule": "forced",
        "stated": [["book 0", 0, 1, 19, 13]],
    }

    def stored(*lines: dict[str, object]) -> None:
        content = "\n".join(map(json.dumps, lines)).encode()
        (tmp_path / "books-test.jsonl.zst").write_bytes(zstandard.compress(content))

    monkeypatch.setattr(planted, "_FOLDER", tmp_path)
    stored(header, row, question)
    plan = load("books-test", books, [2048])
    assert plan.documents == {"book 0": document}
    (stated,) = plan.questions[0].stated
    assert document[stated.start : stated.stop] == "The code is 12345."
    assert stated.value is not None and document[stated.value :].startswith("12345")

    stored(header, row | {"planted": [[slot - 90, sentence]]}, question)
    with pytest.raises(ValueError, match="differs from the one measured"):
        load("books-test", books, [2048])
    stored(header, row | {"start": 101}, question)
    with pytest.raises(ValueError, match="excerpt"):
        load("books-test", books, [2048])
    with pytest.raises(ValueError, match="no questions at 4096 tokens"):
        load("books-test", books, [4096])
