"""The planted questions of the results tables: what is stored does not change, and what is planted
says what the questions ask for, whatever books it is planted in.
"""

import hashlib
import re
from pathlib import Path
from random import Random

import pytest
import zstandard

from benchmarks.real import planted
from benchmarks.real.planted import load

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
        sentences = []
        for stated in question.stated:
            sentences.append(plan.documents[stated.document][stated.start : stated.stop])
            assert stated.document in question.documents
            assert sentences[-1].strip() == sentences[-1]
        assert all(part in " ".join(sentences) for part in question.answers), question
