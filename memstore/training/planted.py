"""Facts planted in prose, tables and lists, as questions about texts: what selectors and reading
adapters learn from where people's questions are lacking.

Facts are asked for in their own words, in other words (relations), and with synonyms of what they
are about; some need the sentence before, some have changed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import NamedTuple

from memstore.errors import InvalidInput
from memstore.training import facts as language
from memstore.training.facts import (
    Fact,
    Pools,
    ValueKind,
    capital,
    draw_value,
    filled,
    named,
    sentence,
)
from memstore.training.reading_questions import AskedContext, AskedQuestion
from memstore.training.vocabulary import Split, forms, of_split, pairs, pool, relations, sections

_CHARACTERS = 1200  # of the prose of a text
_SENTENCE_END = re.compile(r"(?<=[a-z][.!?])[\"”’']?(?=\s)")
_PASSAGE_QUESTIONS = forms(sections("forms")["PASSAGE_QUESTIONS"])
_NOUNS = {"t": "THINGS", "p": "PLACES", "b": "BEINGS"}
_LIKE = 0.45  # facts of the attribute or the subject of one of the last texts
_KEYS = 0.3  # texts with a fact about nothing, such as a pass key
_TABLES = 0.2  # texts that are a table or a list


class PlantedQuestion(AskedQuestion, frozen=True):
    """A question about a planted fact, or about the prose.

    kind: "literal" (in the words of the fact), "key", "reworded", "synonyms", "passage" (asks for a
    place of the text in its own words), "absent" (nothing answers it) or "plain" (text that goes
    on). key: the same for questions with the same answer. begun: the words that begin the answer.
    """

    kind: str = "literal"
    key: str = ""
    begun: str = ""


class Subject(NamedTuple):
    """What facts are about: its name without an article, the name in synonyms ("" if it has none),
    and whether it is a thing, a place or a being ("t", "p" or "b").
    """

    name: str
    synonym: str
    kind: str


class Planted(NamedTuple):
    """A sentence that states a fact, and the question for it."""

    sentence: str
    question: PlantedQuestion


def planted_questions(
    texts: Sequence[str], number: int, split: Split, seed: int, *, facts_only: bool = False
) -> list[AskedContext]:
    """`number` texts of about 400 tokens with planted facts, the same for the same seed.

    facts_only: without the kinds of questions that selectors alone learn from: "passage", "absent"
    and "plain". Raises InvalidInput if no text is long enough.
    """
    planter = Planter(texts, split, seed)
    return [planter.context(f"text {at}", facts_only) for at in range(number)]


class Planter:
    """Draws facts of one split, and writes them into prose."""

    def __init__(self, texts: Sequence[str], split: Split, seed: int) -> None:
        """Raises InvalidInput if no text is long enough."""
        self.rng = Random(f"planted {split} {seed}")
        self._texts = [text for text in texts if len(text) > 2 * _CHARACTERS]
        if not self._texts:
            raise InvalidInput(f"no text has {2 * _CHARACTERS:,} characters; give longer ones")
        self._nouns = {kind: of_split(pairs(name), split) for kind, name in _NOUNS.items()}
        self._qualities = of_split(pairs("QUALITIES"), split)
        self._people = of_split(pool("FIRST_NAMES"), split), of_split(pool("LAST_NAMES"), split)
        self._relations = of_split(relations(), split)
        self._keys = of_split(pool("KEYS"), split)
        self._numbers = of_split(pool("NUMBER_ATTRIBUTES"), split)
        attributes = (*self._numbers, *of_split(pool("WORD_ATTRIBUTES"), split))
        words = [word for some in self._nouns.values() for pair in some for word in pair]
        self._pools = replace(Pools.of(split, words), attributes=attributes)
        self._used: set[str] = set()
        self._subjects: list[Subject] = []  # of the last texts, for facts that are alike
        self._attributes: list[str] = []

    def context(self, title: str, facts_only: bool = False) -> AskedContext:
        """A text with its questions: prose with facts of every kind, or a table or list."""
        rng = self.rng
        if rng.random() < _TABLES:
            return self._table(title)
        facts = [self.literal(), self.literal(synonym=True), self.reworded()]
        facts += [self.reworded(synonym=True) for _ in range(2)]
        facts += [self.key() for _ in range(rng.random() < _KEYS)]
        sentences, questions = self._in_two_sentences()
        sentences += [fact.sentence for fact in facts]
        rng.shuffle(sentences)
        before, after, changed = self._changed()
        sentences = [before, *sentences, after]
        text = self._prose_with(sentences)
        asked: list[AskedQuestion] = [*(fact.question for fact in facts), *questions, changed]
        if not facts_only:
            absent = rng.choice((self.literal(), self.reworded(synonym=True))).question
            start = rng.randrange(len(text) // 2)
            plain = text[start : start + rng.randrange(80, 200)].strip() or "."
            asked += [
                *self._passage(text),
                PlantedQuestion(absent.question, kind="absent", key=absent.key),
                PlantedQuestion(plain, kind="plain"),
            ]
        return AskedContext(text, asked, title, "planted")

    def subject(self, kinds: str = "tpb", people: float = 0.0) -> Subject:
        """A subject that was not drawn before. people: share of the beings that have a proper
        name.
        """
        rng = self.rng
        attempt = 0
        while True:
            kind = rng.choice(kinds)
            if kind == "b" and rng.random() < people:
                drawn = Subject(self.person(), "", kind)
            else:
                (a, b), (c, d) = rng.choice(self._qualities), rng.choice(self._nouns[kind])
                # when the words alone are used up, with an owner
                owner = f" of {self.person()}" if attempt > 9 else ""
                names = f"{a} {c}{owner}", f"{b} {d}{owner}"
                name, synonym = rng.sample(names, 2)
                drawn = Subject(name, synonym, kind)
            if not self._used & {drawn.name, drawn.synonym}:
                self._used |= {drawn.name, drawn.synonym} - {""}
                return drawn
            attempt += 1

    def person(self) -> str:
        """The name of a person."""
        return " ".join(map(self.rng.choice, self._people))

    def literal(self, *, synonym: bool = False) -> Planted:
        """A fact that is asked for in its own words. synonym: except for its subject."""
        rng = self.rng
        attribute = rng.choice(self._pools.attributes)
        if self._attributes and rng.random() < _LIKE:
            attribute = rng.choice(self._attributes)
        self._attributes = [*self._attributes[-7:], attribute]
        subject = self.subject(people=0.0 if synonym else 0.15)
        worded: tuple[ValueKind, ...] = ("words", "name")
        kind = rng.choice(worded) if attribute in pool("WORD_ATTRIBUTES") else None
        fact = Fact(subject.name, attribute, self._value(kind))
        asked = replace(fact, entity=subject.synonym) if synonym else fact
        form = rng.choice(language.STATEMENTS["train"])
        return self._planted(
            "synonyms" if synonym else "literal", form, fact, language.ASKED["train"], asked
        )

    def key(self) -> Planted:
        """A fact about nothing, like a pass key."""
        fact = Fact("", self.rng.choice(self._keys), self._value())
        form = self.rng.choice(language.PASS_KEY_STATEMENTS["train"])
        return self._planted("key", form, fact, language.PASS_KEY_ASKED["train"], fact)

    def reworded(self, *, synonym: bool = False) -> Planted:
        """A fact that is asked for in other words. synonym: its subject is, too."""
        rng = self.rng
        subject = rng.choice(self._subjects) if self._subjects and rng.random() < _LIKE else None
        if subject is None or (synonym and not subject.synonym):
            subject = self.subject(people=0.0 if synonym else 0.25)
            self._subjects = [*self._subjects[-11:], subject]
        fitting = [name for name in self._relations if subject.kind in relations()[name].subjects]
        fresh = [name for name in fitting if f"{name}|{subject.name}" not in self._used]
        chosen = rng.choice(fresh or fitting)
        self._used.add(f"{chosen}|{subject.name}")
        relation = relations()[chosen]
        fact = Fact(subject.name, chosen, self._value_of(relation.value))
        asked = replace(fact, entity=subject.synonym) if synonym else fact
        form = rng.choice(relation.statements) + "."
        question, begun = rng.choice(relation.questions).split("|")
        kind = "synonyms" if synonym else "reworded"
        return self._planted(kind, form, fact, [(question, begun)], asked)

    def _planted(
        self, kind: str, form: str, fact: Fact, questions: Sequence[tuple[str, str]], asked: Fact
    ) -> Planted:
        """questions: forms, each with the words that begin its answer; asked: the fact as the
        question names it.
        """
        question, begun = (filled(x, asked) for x in self.rng.choice(questions))
        key = f"{fact.attribute}|{fact.entity}"
        return Planted(
            capital(sentence(form, fact).text.strip()),
            PlantedQuestion(capital(question), [fact.value], kind=kind, key=key, begun=begun),
        )

    def _value(self, kind: ValueKind | None = None) -> str:
        """A value that is long enough to stand nowhere else by chance."""
        while len(value := draw_value(self.rng, self._pools, kind)) < 3:
            pass
        return value

    def _value_of(self, kind: str) -> str:
        """A value of a kind that relations name."""
        rng = self.rng
        if kind == "person":
            return self.person()
        if kind == "name":
            return rng.choice(self._people[1])
        if kind == "number":
            return self._number()
        if kind == "small":
            return str(rng.randrange(3, 19))
        if kind == "year":
            return str(rng.randrange(1450, 1990))
        if kind == "time":
            return f"{rng.randrange(1, 12)}:{rng.choice(('00', '10', '15', '30', '40', '45'))}"
        return rng.choice(pool(f"{kind.upper()}S"))

    def _number(self) -> str:
        return str(self.rng.randrange(12, self.rng.choice((990, 9900))))

    def _in_two_sentences(self) -> tuple[list[str], list[PlantedQuestion]]:
        """Facts about "it", and questions for which two sentences are needed."""
        subject, person = self.subject("t"), self.person()
        weight, length = f"{self._number()} pounds", f"{self._number()} inches"
        sentences = [
            f"{capital(named(subject.name))} was found in the yard. It weighs {weight}.",
            f"{person} is the owner of {named(subject.name)}. It is {length} long.",
        ]
        asked = (
            (f"How heavy is {named(subject.name)}?", weight, "It weighs", "weight"),
            (f"How long is the {subject.name} of {person}?", length, "It is", "length"),
            (f"What does the thing that {person} owns weigh?", weight, "It weighs", "weight"),
        )
        return sentences, [
            PlantedQuestion(question, [value], None, "reworded", f"its {of}|{subject.name}", begun)
            for question, value, begun, of in asked
        ]

    def _changed(self) -> tuple[str, str, PlantedQuestion]:
        """A fact, how it changes, and a question for its last value."""
        rng = self.rng
        fact = Fact(
            self.subject("t").name, rng.choice(self._pools.attributes), self._value("digits")
        )
        now = replace(fact, value=self._value("digits"))
        first, later = (
            capital(sentence(rng.choice(some["train"]), one).text.strip())
            for some, one in ((language.STATEMENTS, fact), (language.UPDATES, now))
        )
        question = f"What is the {fact.attribute} of {named(fact.entity)} now?"
        begun = f"The {fact.attribute} is now"
        key = f"{fact.attribute}|{fact.entity}"
        return first, later, PlantedQuestion(question, [now.value], None, "literal", key, begun)

    def _table(self, title: str) -> AskedContext:
        """A table, or lists under headings, of three things with two attributes each."""
        rng = self.rng
        names = [self.subject("tp").name for _ in range(3)]
        attributes = rng.sample(self._numbers, 2)
        rows = [[self._value("digits") for _ in attributes] for _ in names]
        if rng.random() < 0.5:
            lines = [f"| name | {' | '.join(attributes)} |", "|---|---|---|"]
            lines += [f"| {name} | {' | '.join(row)} |" for name, row in zip(names, rows)]
        else:
            lines = []
            for name, row in zip(names, rows):
                listed = (f"- {capital(of)}: {value}" for of, value in zip(attributes, row))
                lines += [f"## {capital(name)}", "", *listed, ""]
        asked: list[AskedQuestion] = [
            PlantedQuestion(
                f"What is the {of} of the {name}?",
                [value],
                None,
                "literal",
                f"{of}|{name}",
                "It is",
            )
            for name, row in zip(names, rows)
            for of, value in zip(attributes, row)
        ]
        return AskedContext("\n".join(lines), asked, title, "listed")

    def _prose_with(self, sentences: Sequence[str]) -> str:
        """Prose with these sentences between its own, in this order."""
        text = self.rng.choice(self._texts)
        start = self.rng.randrange(len(text) - 2 * _CHARACTERS)
        after = _SENTENCE_END.search(text, start, start + _CHARACTERS // 2)
        start = after.end() if after else start
        prose = text[start : start + _CHARACTERS].replace("\r", "").lstrip()
        ends = [match.end() for match in _SENTENCE_END.finditer(prose)] or [len(prose)]
        parts, last = [], 0
        for end, one in zip(sorted(self.rng.choices(ends, k=len(sentences))), sentences):
            parts += [prose[last:end], " ", one]
            last = end
        return "".join([*parts, prose[last : ends[-1]]])

    def _passage(self, text: str) -> list[PlantedQuestion]:
        """A question for a place of the text in some of its own words."""
        rng, words = self.rng, text.split()
        length = min(rng.randrange(8, 31), len(words))
        first = rng.randrange(len(words) - length + 1)
        dropped, place = rng.uniform(0.15, 0.5), words[first : first + length]
        asked = " ".join(word for word in place if rng.random() > dropped)
        asked = asked.lower() if rng.random() < 0.5 else asked
        question = capital(rng.choice(_PASSAGE_QUESTIONS).format(x=asked))
        return [PlantedQuestion(question, [" ".join(place)], kind="passage")] if asked else []
