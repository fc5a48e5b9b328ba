"""Misspelt words of a question are replaced by words that passages hold."""

from hypothesis import given
from hypothesis import strategies as st

from memstore.disk.tables.runs import BlockWords
from memstore.index.word_index import WordIndex, count_words, split_words
from memstore.model.questions import one_edit_away, spelled

HELD = {"what": 3, "warranty": 2, "pump": 5, "wait": 1, "garibaldi": 1, "x" * 50: 1}


def corrected(question: str, common: str = "") -> str:
    return spelled(
        question, lambda word: word in common.split(), lambda some: [HELD.get(w, 0) for w in some]
    )


def test_a_misspelt_word_is_replaced_by_the_most_frequent_near_word() -> None:
    asked = "waht is the warrenty of the CP-60 pupm?"
    assert corrected(asked) == "what is the warranty of the CP-60 pump?"
    assert corrected("Garibladi upmp") == "Garibaldi upmp"  # the first letter stays


def test_known_common_short_and_distant_words_are_not_corrected() -> None:
    for asked in ("what warranty", "a pmp of 1234 wa-ht", "Überraschung", "warrrrenty waits", ""):
        assert corrected(asked) == asked
    assert corrected("pumps wart", common="pumps wart") == "pumps wart"
    assert corrected("x" * 51) == "x" * 51  # too long to be one letter from another


@given(st.text("abcdé", min_size=2, max_size=6), st.data())
def test_every_word_one_edit_away_is_tried_and_no_other(word: str, data: st.DataObject) -> None:
    others = one_edit_away(word)
    assert len(set(others)) == len(others) and word not in others
    at = data.draw(st.integers(1, len(word) - 1))
    for other in (
        word[:at] + word[at + 1 :] if at < len(word) - 1 else word,
        word[:at] + "z" + word[at:],
        word[:at] + "z" + word[at + 1 :],
        word[:at] + word[at : at + 2][::-1] + word[at + 2 :],
    ):
        assert other == word or other in others
    assert all(other[0] == word[0] and abs(len(other) - len(word)) < 2 for other in others)


def test_passages_that_hold_a_word_are_counted_in_a_scope() -> None:
    index = WordIndex()
    texts = ["a red pump", "the pump", "pumps"]
    for number, text in enumerate(texts, 1):
        index.add(number, BlockWords.of([count_words(text)]))
    words = [split_words(word)[0] for word in ("pump", "pump", "red", "blue")]
    every = tuple((number, 0, 1) for number in (1, 2, 3))
    assert index.holding(words, every) == [2, 2, 1, 0]
    assert index.holding(words, every[1:]) == [1, 1, 0, 0]
    assert index.holding([], every) == []
