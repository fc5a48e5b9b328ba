"""Writing needles into passages of book text, and the questions for them."""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import numpy as np

from benchmarks.common.needles import Question
from benchmarks.common.text import Books
from memstore.model.tokenizer import Tokenizer
from memstore.training import facts as language
from memstore.training.facts import Fact, Pools, Sentence, Split, draw_value

PAPER_KEYS = 50_000  # the paper draws its pass keys from 1 .. 50,000
UNRELATED = 200  # tokens of text between memory and question


class Writer:
    """Writes needles into passages of book text.

    Names, attributes and formats of values are held out from training. Sentences and questions have
    forms that training knows, except where a task asks for `forms="held_out"`. size: tokens of a
    passage; twice that where it holds several sentences.
    """

    def __init__(self, tokenizer: Tokenizer, books: Books, rng: Random, size: int = 512) -> None:
        self.tokenizer, self.books, self.rng, self.size = tokenizer, books, rng, size
        self.pools = Pools.of("held_out", books.words)
        texts = [tokenizer.decode([token]) for token in range(tokenizer.text_ids)]
        self.ends = np.array([text[-1:] in (".", "!", "?", "\n") for text in texts])

    def text(self, tokens: int) -> str:
        """About `tokens` tokens of a book, from the beginning of a sentence."""
        ids = self.books.place(self.rng, tokens + 64)
        ends = np.flatnonzero(self.ends[ids[:64]])
        first = int(ends[0]) + 1 if len(ends) else 0
        return self.tokenizer.decode(ids[first : first + tokens].tolist())

    def passage(
        self, sentences: Sequence[str], tokens: int, filler: np.ndarray | None = None
    ) -> str:
        """`sentences`, in their order, each after a random sentence of book text; about `tokens`
        tokens in all.
        """
        encoded = [self.tokenizer.encode(" " + sentence) for sentence in sentences]
        if filler is None:
            filler = self.books.place(self.rng, max(tokens - sum(map(len, encoded)), tokens // 4))
        ends = np.flatnonzero(self.ends[filler]) + 1
        places = sorted(
            self.rng.choices(
                ends.tolist() if len(ends) > 8 else range(1, len(filler)), k=len(sentences)
            )
        )
        pieces, last = [], 0
        for place, ids in zip(places, encoded):
            pieces += [*filler[last:place].tolist(), *ids]
            last = place
        return self.tokenizer.decode(pieces + filler[last:].tolist())

    def fact(self, **choice: Any) -> Fact:
        """A held-out fact whose value is a number of random digits, unless `choice` says
        otherwise.
        """
        given = {"kind": "digits"} | choice
        return language.draw_fact(self.rng, self.pools, **given)

    def state(self, fact: Fact, forms: Split | None = None) -> str:
        """The sentence that states it: in the plain form, or in any of a split's."""
        return self._form(language.STATEMENTS, forms, language.sentence, fact).text

    def ask(self, fact: Fact, forms: Split | None = None) -> Sentence:
        """The question for it, likewise."""
        return self._form(language.QUESTIONS, forms, language.question, fact)

    def _form(
        self,
        every: dict[Split, tuple[str, ...]],
        forms: Split | None,
        make: Callable[[str, Fact], Sentence],
        fact: Fact,
    ) -> Sentence:
        return make(self.rng.choice(every[forms]) if forms else every["train"][0], fact)

    # One task each: (passages, questions)

    def passkey(self) -> tuple[list[str], list[Question]]:
        key = language.pass_key(str(self.rng.randint(1, PAPER_KEYS)))
        asked = language.question(language.PASS_KEY_QUESTION, key)
        stated = language.sentence(language.PASS_KEY_STATEMENTS["train"][0], key)
        text = self.passage([stated.text], self.size)
        return [text], [Question("passkey", asked.prompt, asked.answer, [])]

    def one_fact(
        self, task: str, state: Split | None = None, ask: Split | None = None, **choice: Any
    ) -> tuple[list[str], list[Question]]:
        """A fact (see `fact`), stated and asked about in forms of a split."""
        fact = self.fact(**choice)
        asked = self.ask(fact, ask)
        texts = [self.passage([self.state(fact, state)], self.size)]
        questions = [Question(task, asked.prompt, asked.answer, [])]
        if task == "fact":
            before = self.text(UNRELATED)
            questions.append(
                Question("fact_unrelated", asked.prompt, asked.answer, [], before=before)
            )
        return texts, questions

    def many(
        self, task: str, count: int, passages: int, asked: int
    ) -> tuple[list[str], list[Question]]:
        """`count` numbers that share attribute and kind of name, spread over some passages."""
        rng = self.rng
        kind = rng.choice(("words", "name") if count > 40 else ("colour_noun", "words", "name"))
        attribute = rng.choice(self.pools.attributes)
        facts: dict[str, Fact] = {}
        values: set[str] = set()
        while len(facts) < count:
            fact = self.fact(entity_kind=kind)
            if fact.entity not in facts and (fact.value not in values or len(fact.value) < 2):
                facts[fact.entity] = Fact(fact.entity, attribute, fact.value)
                values.add(fact.value)
        every = list(facts.values())
        texts = [
            self.passage([self.state(f) for f in every[at::passages]], 2 * self.size)
            for at in range(passages)
        ]
        questions = [self.ask(fact) for fact in rng.sample(every, asked)]
        return texts, [
            Question(task, question.prompt, question.answer, []) for question in questions
        ]

    def updated(self) -> tuple[list[str], list[Question]]:
        """A fact that gets a new value once or twice, anywhere later in the passage."""
        rng, fact = self.rng, self.fact()
        sentences, values = [self.state(fact)], [fact.value]
        for _ in range(rng.choice((1, 1, 2))):
            while (value := draw_value(rng, self.pools, "digits")) in values:
                pass
            values.append(value)
            fact = Fact(fact.entity, fact.attribute, value)
            sentences.append(language.sentence(language.UPDATES["train"][0], fact).text)
        asked = self.ask(fact)
        return [self.passage(sentences, 2 * self.size)], [
            Question("updated", asked.prompt, asked.answer, [], old=" " + values[-2])
        ]

    def split_value(self, block_size: int) -> tuple[list[str], list[Question]]:
        """A fact whose value spans two blocks."""
        encode = self.tokenizer.encode
        while True:
            fact = self.fact()
            sentence = self.state(fact)
            before = encode(" " + sentence[: sentence.index(fact.value)].rstrip(" "))
            value = encode(" " + fact.value)
            if len(value) < 2:
                continue
            filler = self.books.place(self.rng, self.size + block_size)
            ends = np.flatnonzero(self.ends[filler[: self.size - 64]]) + 1
            place = int(self.rng.choice(ends[ends > block_size].tolist() or [block_size]))
            first = place + len(before)
            dropped = (first + self.rng.randrange(1, len(value))) % block_size
            ids = [
                *filler[dropped:place].tolist(),
                *encode(" " + sentence),
                *filler[place : self.size].tolist(),
            ]
            text = self.tokenizer.decode(ids)
            first -= dropped
            if (
                encode(text)[: first + len(value)] == ids[: first + len(value)]
                and ids[first:][: len(value)] == value
            ):
                assert first // block_size != (first + len(value) - 1) // block_size
                asked = self.ask(fact)
                return [text], [Question("split", asked.prompt, asked.answer, [])]


def needles(
    writer: Writer, settings: dict[str, Any], block_size: int
) -> Iterator[tuple[list[str], list[Question]]]:
    """(passages, questions) of each task in the settings of a memory."""
    tasks, trials = settings["tasks"], settings["trials"]
    one_by_one: dict[str, Callable[[], tuple[list[str], list[Question]]]] = {
        "passkey": writer.passkey,
        "fact": lambda: writer.one_fact("fact"),
        "fact_forms": lambda: writer.one_fact("fact_forms", "train", "train"),
        "fact_any": lambda: writer.one_fact("fact_any", kind=None),
        "rephrased": lambda: writer.one_fact("rephrased", "held_out", "held_out"),
        "of_20": lambda: writer.many("of_20", 20, 1, 1),
        "updated": writer.updated,
        "split": lambda: writer.split_value(block_size),
    }
    for task, write in one_by_one.items():
        if task in tasks or (task == "fact" and "fact_unrelated" in tasks):
            for _ in range(trials):
                yield write()
    if "of_100" in tasks:
        for _ in range(-(-trials // 4)):  # four questions for every hundred facts
            yield writer.many("of_100", 100, 4, 4)
