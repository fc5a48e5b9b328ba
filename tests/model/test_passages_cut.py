"""Cutting text into passages: no character is lost, sentences stay whole, and an edit changes only
passages near it.
"""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.disk.format.document import Place
from memstore.disk.tables.texts import Passage
from memstore.model.cutting import Passages, split
from memstore.model.landmark.landmark_model import SHIPPED
from memstore.model.tokenizer import Tokenizer

_SIZE, _MOST = 64, 128
_STORY = """
    the old miller ferry river stone bridge carried lantern seven winter road toward quiet market
    never found letter under heavy door while rain began slowly again another brother garden told
    morning about salt boats and of a to in with who had been was not for when they she he it on
"""
_WORDS = _STORY.split()
_PARTS = (
    "\r\n|\n|\r|\n\n| |\t|. |! |\u200b|\u200d|e\u0301|\u0915\u094d\u0937|\u0634\u0643\u061f |"
    "\u6211\u4eec\u3002|\U0001f468\u200d\U0001f469\u200d\U0001f467|\u2028|\x85|\x1c|\xa0|"
    "# Top\n|word|3.14|Mr. Brown|https://a.example/b?c=d|1. |- |A,B,C\n|{}|CHAPTER IV\n\n|"
    "===\n|---\n"
)


class Remembering(Tokenizer):
    """Encodes each text once, as the texts of a test share nearly all their sentences."""

    def encode(self, text: str) -> list[int]:
        return [*self._known(text)]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[*self._known(text)] for text in texts]

    @cache  # noqa: B019
    def _known(self, text: str) -> list[int]:
        return super().encode(text)


@cache
def _tokenizer() -> Tokenizer:
    return Remembering.load(SHIPPED / "tokenizer.json")


def cut(text: str, places: Any = (), **changed: Any) -> list[Passage]:
    return list(Passages(_tokenizer(), text, places, **{"size": _SIZE, "most": _MOST, **changed}))


def texts(text: str, **changed: Any) -> list[str]:
    """What the passages of a text say themselves."""
    return [text[one.start : one.end] for one in cut(text, **changed)]


def check(text: str, passages: list[Passage]) -> None:
    """The passages give the text back but for white space at its end, and its tokens."""
    back = ""
    for one in passages:
        back += one.gap
        own = text[one.start : one.end]
        assert len(back) == one.start and own == own.strip() and not one.gap.strip()
        assert 0 < len(one.ids) <= _MOST
        assert one.ids.tolist() == _tokenizer().encode(own)
        back += own
    assert text.startswith(back) and not text[len(back) :].strip()


_NASTY = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.sampled_from(_PARTS.split("|")),
        st.integers(1, 400).map(lambda n: "x1" * n),
        st.integers(1, 60).map(lambda n: "many words, " * n),
    ),
    max_size=40,
).map("".join)


@settings(max_examples=40, deadline=None)
@given(_NASTY)
def test_any_text_comes_back_exactly(text: str) -> None:
    check(text, cut(text))


def sentence(rng: random.Random) -> str:
    words = rng.choices(_WORDS, k=max(2, int(rng.lognormvariate(2.3, 0.6))))
    return " ".join(words).capitalize() + rng.choice(".....?!")


def prose(rng: random.Random, sentences: int) -> list[list[str]]:
    """Paragraphs of sentences."""
    found: list[list[str]] = [[]]
    for _ in range(sentences):
        if rng.random() < 0.25 and found[-1]:
            found.append([])
        found[-1].append(sentence(rng))
    return found


def joined(paragraphs: list[list[str]]) -> str:
    return "\n\n".join(" ".join(one) for one in paragraphs if one)


def test_editing_a_sentence_changes_only_passages_near_it() -> None:
    rng, changes = random.Random(7), []
    for _ in range(5):
        paragraphs = prose(rng, 90)
        known = {tuple(one.ids) for one in cut(joined(paragraphs))}
        for _ in range(40):
            edited = [list(one) for one in paragraphs]
            place = rng.choice(edited)
            at = rng.randrange(len(place))
            place[at : at + rng.randrange(2)] = rng.choice([[], [sentence(rng)]])
            now = cut(joined(edited))
            changes.append(sum(tuple(one.ids) not in known for one in now))
    assert sum(changes) / len(changes) <= 2
    assert sum(count > 4 for count in changes) <= len(changes) / 50


def test_a_text_of_many_windows_comes_back_exactly() -> None:
    rng = random.Random(3)
    text = joined(prose(rng, 2600)) + "\n\n" + "z9" * 70_000 + " end. " + " " * 200_000 + "Last."
    check(text, cut(text))


@pytest.mark.parametrize(
    "text, sentences",
    [
        ("Mr. J. Brown paid 3.50 to e.g. Dr. Lee. He left.", 2),
        ("A line that was wrapped by hand at some width\nstays one sentence. Here is another.", 2),
        ('"Stop!" he said. "Why?"', 2),
        ("我们到了。他说:“好的。”然后走了！", 3),
        ("मैं आया। वह गया।", 2),
        ("هل جئت؟ نعم.", 2),
        ("def f(x):\n    return x\n\nprint(f(1))", 3),
        ('{"a": 1,\n "b": 2}', 2),
        ("2026-01-01 10:00 INFO a\n2026-01-01 10:01 INFO b", 2),
        ("- one item\n- another item", 2),
        ("1. First thing.\n2. Second thing.", 2),
    ],
)
def test_text_is_split_into_sentences(text: str, sentences: int) -> None:
    assert len(list(split(text))) == sentences


def test_lines_that_end_with_a_carriage_return_are_split_as_others() -> None:
    text = (
        "The Mill\n===\nThe mill stands at the river, and nobody has\nworked there.\n\n- one\n- two"
    )
    dos = text.replace("\n", "\r\n")
    found = [(one.level, one.heading, text[one.start : one.end]) for one in split(text)]
    assert [
        (one.level, one.heading, dos[one.start : one.end].replace("\r\n", "\n"))
        for one in split(dos)
    ] == found
    assert len(found) == 4 and found[0][1]


def test_a_sentence_longer_than_the_size_stays_whole() -> None:
    long = "It held " + " ".join(f"word{number}" for number in range(40)) + " and that was all."
    assert _SIZE < len(_tokenizer().encode(long)) <= _MOST
    assert long in texts(f"First. {long} Last.")


def test_a_value_stays_whole_where_its_sentence_is_cut() -> None:
    value = "3f2b8c1e-77aa-4d0e-9a51-0c6d5e4f3a2b"
    text = "The list is " + " ".join([value] * 9) + " as told."
    parts = texts(text)
    assert len(parts) > 1 and sum(part.count(value) for part in parts) == 9


def test_a_heading_is_in_the_passage_of_the_text_after_it() -> None:
    for heading in ("# The Mill", "CHAPTER IV", "The Mill\n========"):
        text = f"Before it.\n\n{heading}\n\nThe wheel turned. It was old."
        assert texts(text) == ["Before it.", text[text.index(heading) :]]
    text = "Before it.\n\nNamed by the file\n\nThe wheel turned."
    places = [Place(text.index("Named"), 1, "Named by the file")]
    assert [one.start for one in cut(text, places)] == [0, places[0].start]
