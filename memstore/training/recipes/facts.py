"""The language of recall: facts about made-up things, the sentences that state and update them, the
questions that ask.

Each list of sentence forms, and each pool of words (fact_pools), has a part that training never
sees, for the "held_out" split.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from memstore.training.recipes.fact_pools import (
    EntityKind,
    Pools,
    ValueKind,
    draw_entity,
    draw_value,
    repeated_digits,
)
from memstore.training.recipes.sentence_forms import (
    PASS_KEY_QUESTIONS,
    PASS_KEY_STATEMENTS,
    QUESTIONS,
    STATEMENTS,
    UPDATES,
    Split,
)

SPLITS: tuple[Split, ...] = ("train", "held_out")

PASS_KEY_HEAD = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
PASS_KEY_HEADS = (
    PASS_KEY_HEAD,
    PASS_KEY_HEAD.replace("an important info", "important information").replace(
        "memorize them", "memorize it"
    ),
    "There is important information hidden in the following text. Find it and remember it.",
)
GRASS = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@dataclass(frozen=True)
class Fact:
    """One thing to remember; the pass key is the attribute "pass key" of nothing."""

    entity: str
    attribute: str
    value: str

    @property
    def is_pass_key(self) -> bool:
        return not self.entity


@dataclass(frozen=True)
class Sentence:
    """Text in parts, each with whether it is the value; a value brings the space before it
    along.
    """

    parts: tuple[tuple[str, bool], ...]

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.parts)

    @property
    def prompt(self) -> str:
        """A question's text up to its answer."""
        return self.parts[0][0]

    @property
    def answer(self) -> str:
        """A question's answer, with the space before it."""
        return self.parts[1][0]


def draw_fact(
    rng: Random,
    split: Split = "train",
    kind: ValueKind | None = None,
    *,
    entity_kind: EntityKind | None = None,
    pools: Pools | None = None,
) -> Fact:
    """A fact of the split: a made-up entity, an attribute and a value of `kind` (drawn when None).

    `pools` (of the same split) may bring words of a corpus and narrow the choice.
    """
    pools = pools or Pools.of(split)
    entity = draw_entity(rng, pools, entity_kind)
    return Fact(entity, rng.choice(pools.attributes), draw_value(rng, pools, kind))


def draw_pass_key(rng: Random, repeats: float = 0.3) -> Fact:
    """A pass key: 1 to 99,999 as in the paper, often with five digits, a share of `repeats` with
    repeated ones.
    """
    if rng.random() < repeats:
        value = repeated_digits(rng)
    else:
        value = str(rng.randint(1, 99_999) if rng.random() < 0.4 else rng.randint(10_000, 99_999))
    return Fact("", "pass key", value)


def statement(fact: Fact, form: int | str = 0, split: Split = "train") -> Sentence:
    """The sentence that states a fact; `form` is a number in STATEMENTS[split] or a form itself."""
    return _fill(STATEMENTS[split][form] if isinstance(form, int) else form, fact)


def update(fact: Fact, form: int | str = 0, split: Split = "train") -> Sentence:
    """The sentence that gives a fact stated earlier a new value."""
    return _fill(UPDATES[split][form] if isinstance(form, int) else form, fact)


def question(fact: Fact, form: int | str = 0, split: Split = "train") -> Sentence:
    """A question with its answer: parts are the prompt, the answer, and a full stop."""
    return _fill((QUESTIONS[split][form] if isinstance(form, int) else form) + " {v}.", fact)


def pass_key_statement(key: Fact | str, form: int | str = 0) -> Sentence:
    """The sentences that state the pass key; form 0 is the paper's."""
    fact = key if isinstance(key, Fact) else Fact("", "pass key", key)
    return _fill(PASS_KEY_STATEMENTS["train"][form] if isinstance(form, int) else form, fact)


def pass_key_question(key: Fact | str, form: int | str = 0) -> Sentence:
    """A question for the pass key with its answer; form 0 is the paper's."""
    fact = key if isinstance(key, Fact) else Fact("", "pass key", key)
    return _fill(
        (PASS_KEY_QUESTIONS["train"][form] if isinstance(form, int) else form) + " {v}.", fact
    )


def _fill(form: str, fact: Fact) -> Sentence:
    entity = fact.entity
    # Proper names take no article.
    named = entity if entity[:1].isupper() else f"the {entity}"
    words = {"E": named, "C": named[:1].upper() + named[1:], "e": entity, "a": fact.attribute}
    parts: list[tuple[str, bool]] = []
    *before, last = form.split("{v}")
    for text in before:
        text = text.format_map(words)
        if text.rstrip(" "):
            parts.append((text.removesuffix(" "), False))
        parts.append((" " + fact.value if text.endswith(" ") else fact.value, True))
    if last:
        parts.append((last.format_map(words), False))
    return Sentence(tuple(parts))
