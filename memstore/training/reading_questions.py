"""Questions about texts: from files or made from prose, for training and held out."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, groupby
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec
from msgspec import Meta

from memstore.errors import InvalidInput
from memstore.model.cutting import split
from memstore.training.corpus import records_of

TOO_FEW = (
    "too few questions: training and evaluation each need some whose answer is in the text "
    "verbatim; give more"
)
_Said = Annotated[str, Meta(min_length=1)]
_WORD = re.compile(r"\w+")
_REASONS = [[word] for word in ("why", "how", "pourquoi", "comment", "warum", "wieso", "wie")]
# of questions made from texts: characters of a part, parts of a title, questions of a part
_PART, _PARTS_OF_A_TITLE, _ASKED = 1200, 20, 3


class AskedQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question. answers: the first is the training target; empty if the text has no answer.
    sentence: the answer as a whole sentence, the target if the question asks why or how.
    """

    question: _Said
    answers: list[_Said] = []
    sentence: str | None = None

    @property
    def target(self) -> str:
        """The answer to learn, of a question that has one."""
        asks_reason = plain_words(self.question)[:1] in _REASONS
        return self.sentence if self.sentence and asks_reason else self.answers[0]


class AskedContext(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text and its questions. title: the article it belongs to; source: the data set."""

    context: str
    questions: list[AskedQuestion]
    title: str = ""
    source: str = ""
    lang: str = "en"

    @property
    def collection(self) -> str:
        """Source and language of the text, whose texts form one collection."""
        return f"{self.source} {self.lang}".lstrip()


def read_questions(path: Path) -> list[AskedContext]:
    """Read a .jsonl or .jsonl.zst file; a text without a title gets one of its own. Raises OSError,
    and InvalidInput, which names the line.
    """
    found = [
        msgspec.structs.replace(one, title=one.title or f"line {number}")
        for number, one in records_of(path, AskedContext)
    ]
    if not any(one.questions for one in found):
        raise InvalidInput(f"{path} holds no questions")
    return found


def questions_of(texts: Sequence[str], count: int, seed: int) -> list[AskedContext]:
    """Make `count` questions from random parts, of about 1,200 characters, of texts: what does the
    text say about a word that only one of its sentences has? The answer is that sentence.
    """
    rng, parts = Random(seed), []
    for number, text in enumerate(texts):
        units = [text[one.start : one.end] for one in split(text)]
        ends = [*accumulate(map(len, units))]
        for at, some in groupby(zip(ends, units), lambda pair: pair[0] // _PART):
            sentences = [" ".join(sentence.split()) for _, sentence in some]
            parts.append((f"{number} {at // _PARTS_OF_A_TITLE}", sentences))
    known = Counter(word for _, some in parts for one in some for word in set(plain_words(one)))
    found = []
    for title, sentences in rng.sample(parts, min(count, len(parts))):
        asked = []
        for sentence in rng.sample(sentences, len(sentences)):
            others = {word for one in sentences if one != sentence for word in plain_words(one)}
            plain = {word: plain_words(word) for word in _WORD.findall(sentence) if len(word) > 3}
            own = [word for word, parts in plain.items() if others.isdisjoint(parts)]
            if own and 30 <= len(sentence) <= 240:
                rarest = min(own, key=lambda word: sum(known[part] for part in plain[word]))
                asked.append(AskedQuestion(f"What does it say about {rarest}?", [sentence]))
        if asked:
            found.append(AskedContext(" ".join(sentences), asked[:_ASKED], title, "text"))
    return found


def split_titles(
    contexts: Sequence[AskedContext], seed: int
) -> tuple[list[AskedContext], list[AskedContext]]:
    """Divide texts into those to train on, and those of a twentieth of the titles, to measure with.
    Raises InvalidInput for questions about fewer than two titles, and if either part lacks answers.
    """
    titles = sorted({one.title for one in contexts})
    Random(seed).shuffle(titles)
    held = set(titles[: max(1, len(titles) // 20)])
    train, test = ([c for c in contexts if (c.title in held) is out] for out in (False, True))
    if not all(any(one.questions for one in part) for part in (train, test)):
        raise InvalidInput(
            "the questions are about fewer than two titles; give more or longer texts"
        )
    for part in (train, test):
        if not any(stands_in(asked, one.context) for one in part for asked in one.questions):
            raise InvalidInput(TOO_FEW)
    return train, test


def stands_in(question: AskedQuestion, text: str) -> bool:
    """Whether a text contains the words of one of the answers, as Examples looks for them."""
    words = f" {' '.join(plain_words(text))} "
    answers = (" ".join(plain_words(answer)) for answer in question.answers)
    return any(f" {answer} " in words for answer in answers if answer)


def plain_words(text: str) -> list[str]:
    """Words in lower case, without accents."""
    folded = unicodedata.normalize("NFKD", text.lower())
    return _WORD.findall("".join(c for c in folded if not unicodedata.combining(c)))
