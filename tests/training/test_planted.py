"""Planted facts: splits that never touch, sentences that say what is asked."""

import re
from collections import Counter

import pytest

from memstore.errors import InvalidInput
from memstore.training.planted import PlantedQuestion, Planter, planted_questions
from memstore.training.reading_questions import plain_words
from memstore.training.vocabulary import SPLITS, Split, of_split, pairs, pool, relations

PROSE = ["The boat lay in the harbour all night. Nobody came. It rained on the quay. " * 60]
PAIRS = ("THINGS", "PLACES", "BEINGS", "QUALITIES")


def test_a_word_is_of_one_pair_and_every_list_has_names_of_both_splits() -> None:
    counts = Counter(word for name in PAIRS for pair in pairs(name) for word in pair)
    assert not [word for word, count in counts.items() if count > 1]
    pools = map(pool, ("NUMBER_ATTRIBUTES", "WORD_ATTRIBUTES", "KEYS", "FIRST_NAMES", "LAST_NAMES"))
    for names in (*map(pairs, PAIRS), *pools, relations()):
        assert all(of_split(names, split) for split in SPLITS)


def test_training_never_names_what_is_held_out() -> None:
    held_out = {f"{a[0]} {n[0]}" for a in of_split(pairs("QUALITIES"), "held_out") for n in NOUNS}
    attributes = {
        *of_split(pool("NUMBER_ATTRIBUTES"), "held_out"),
        *of_split(relations(), "held_out"),
    }
    keys = {
        asked.key
        for context in planted_questions(PROSE, 60, "train", seed=0)
        for asked in context.questions
        if isinstance(asked, PlantedQuestion) and asked.key
    }
    named = {part for key in keys for part in key.split("|")}
    assert len(named) > 300
    assert not named & (held_out | attributes)


NOUNS = [pair for name in PAIRS[:3] for pair in of_split(pairs(name), "held_out")]


@pytest.mark.parametrize("split", SPLITS)
def test_a_text_holds_the_answers_of_its_questions_and_of_no_absent_one(split: Split) -> None:
    kinds: Counter[str] = Counter()
    for context in planted_questions(PROSE, 40, split, seed=3):
        keys = [asked.key for asked in context.questions if asked.answers]
        for asked in context.questions:
            assert isinstance(asked, PlantedQuestion) and "{" not in asked.question + asked.begun
            kinds[asked.kind] += 1
            assert bool(asked.answers) == (asked.kind not in ("absent", "plain"))
            assert asked.kind != "absent" or asked.key not in keys
            for answer in asked.answers:
                assert " ".join(plain_words(answer)) in " ".join(plain_words(context.context))
                assert asked.kind == "passage" or answer not in asked.question
    assert min(kinds.values()) > 5 and len(kinds) == 7
    facts = planted_questions(PROSE, 10, split, seed=3, facts_only=True)
    assert all(asked.answers for context in facts for asked in context.questions)


def test_questions_with_synonyms_share_no_word_of_weight_with_their_fact() -> None:
    planter = Planter(PROSE, "held_out", 5)
    for _ in range(100):
        fact = planter.reworded(synonym=True)
        stated, asked = (
            set(re.findall("[a-z]+", text.lower()))
            for text in (fact.sentence, fact.question.question)
        )
        assert not {word for word in stated & asked if len(word) > 4}, fact


def test_texts_are_the_same_for_the_same_seed_and_short_prose_is_refused() -> None:
    first = planted_questions(PROSE, 3, "train", seed=5)
    assert first == planted_questions(PROSE, 3, "train", seed=5)
    assert first != planted_questions(PROSE, 3, "train", seed=6)
    with pytest.raises(InvalidInput, match="give longer ones"):
        planted_questions(["too short"], 1, "train", seed=0)
