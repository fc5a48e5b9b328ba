"""The benchmark of edits: what greedy filling changes is what filling anew would, and passages are
counted by what they say.
"""

from random import Random

import pytest

from benchmarks.real.passage_edits import KINDS, Book, Cutting, changed, edited, greedy
from memstore.model.landmark.byte_tokenizer import Tokenizer
from memstore.model.landmark.checkpoint import SHIPPED

SIZE = 24


@pytest.fixture(scope="module")
def book() -> Book:
    rng = Random(3)
    words = ["mill", "ferry", "barn", "captain", "lantern", "orchard"]
    sentences = [
        "The " + " ".join(rng.choice(words) for _ in range(rng.randint(3, 14))) + "."
        for _ in range(160)
    ]
    tokenizer = Tokenizer.load(SHIPPED / "tokenizer.json")
    return Book(" ".join(sentences), Cutting(tokenizer, SIZE, 128))


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_filling_changes_what_filling_anew_changes(book: Book, kind: str) -> None:
    old = {tuple(range(*place)) for place in greedy(book.counts, SIZE)}
    for number in range(len(book.units) - 1):
        for tokens in (3, 11, 30):
            names, counts = [*range(len(book.counts))], [*book.counts]
            end = number + (kind != "insert")
            names[number:end] = [] if kind == "delete" else [-1]
            counts[number:end] = [] if kind == "delete" else [tokens]
            anew = [tuple(names[slice(*place)]) for place in greedy(counts, SIZE)]
            assert book.greedily(kind, number, tokens) == sum(one not in old for one in anew)


def test_only_passages_that_were_not_there_are_counted(book: Book) -> None:
    before = book.cutting.passages(book.text)
    assert changed(before, before) == 0 and len(before) > 40
    unit, following = book.units[70], book.units[71].start
    for kind in KINDS:
        after = book.cutting.passages(edited(book.text, unit, following, kind, "A new one."))
        found = changed(before, after)
        assert (0 if kind == "delete" else 1) <= found < len(before) // 2
        assert found >= sum(one not in before for one in after)
