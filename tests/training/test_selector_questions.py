"""Facts and questions of selectors: splits that never touch, sentences that say what is asked."""

import re
from collections import Counter
from random import Random

import pytest

from memstore.training.selectors import questions as forms
from memstore.training.selectors.questions import Fact, Facts, Split, of_split, split
from memstore.training.vocabulary import PAIRS, all_pairs, pairs, pool, relations

SUBJECTS = [pair for name in PAIRS[:4] for pair in pairs(name)]
SPLITS: tuple[Split, ...] = ("train", "validation", "held-out")


def drawn(wanted: Split, seed: int = 0, count: int = 60) -> list[Fact]:
    facts = Facts(wanted, Random(seed))
    return [
        fact
        for _ in range(count)
        for fact in (
            facts.literal(),
            facts.literal(otherwise=True),
            facts.key(),
            facts.reworded(),
            facts.reworded(synonyms=True),
        )
    ]


def test_a_word_is_of_one_pair_and_both_words_of_a_pair_are_of_one_split() -> None:
    counts = Counter(word for pair in all_pairs() for word in pair)
    assert not [word for word, count in counts.items() if count > 1]
    assert all(split(first) == split(second) for first, second in all_pairs())


def test_every_list_has_names_of_the_train_split_and_of_the_held_out_one() -> None:
    lists = [*map(pairs, PAIRS), *map(pool, ("NUMBER_ATTRIBUTES", "WORD_ATTRIBUTES", "KEYS"))]
    lists.append(relations())
    lists += [forms.STATEMENTS, forms.QUESTIONS, forms.KEY_STATEMENTS, forms.KEY_QUESTIONS]
    for names in (*lists, forms.PASSAGE_QUESTIONS):
        assert of_split(names, "train") and of_split(names, "held-out")


def test_training_never_names_what_is_held_out() -> None:
    kept = {word for pair in SUBJECTS for word in pair if split(word) == "held-out"}
    kept |= {name for name in pool("FIRST_NAMES") if split(name) == "held-out"}
    fixed = " ".join((*forms.STATEMENTS, *forms.QUESTIONS, *forms.KEY_STATEMENTS))
    fixed += " ".join(" ".join((*r.statements, *r.questions)) for r in relations().values())
    kept -= set(re.findall(r"\w+", fixed))  # words of forms, which are held out as wholes
    kept -= set(
        re.findall(r"\w+", " ".join((*pool("NUMBER_ATTRIBUTES"), *pool("WORD_ATTRIBUTES"))))
    )
    assert len(kept) > 80
    for fact in drawn("train"):
        assert not kept & set(re.findall(r"\w+", f"{fact.sentence} {fact.question}"))
        named = fact.key.split("|")[0]
        assert split(named) == "train", named


@pytest.mark.parametrize("wanted", SPLITS)
def test_a_fact_states_its_value_and_its_question_does_not(wanted: Split) -> None:
    for fact in drawn(wanted, seed=3):
        assert fact.value.lower() in fact.sentence.lower()
        assert fact.value not in fact.question or fact.kind in ("literal", "synonyms", "key")
        assert "{" not in fact.sentence + fact.question + fact.begun


def test_reworded_questions_with_synonyms_share_no_word_of_weight_with_their_fact() -> None:
    facts = Facts("held-out", Random(5))
    for _ in range(200):
        fact = facts.reworded(synonyms=True)
        stated = set(re.findall(r"[a-z]+", fact.sentence.lower()))
        asked = set(re.findall(r"[a-z]+", fact.question.lower()))
        assert not {word for word in stated & asked if len(word) > 4}, fact
