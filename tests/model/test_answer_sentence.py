"""The sentence of a passage that holds an answer."""

import pytest

from memstore.model.answer import Source, answer_sentence, holds, refusal

LEASE = """## Rent

The tenant pays a rent of 7,450 pounds. It is due on the first day of each month.
The tenant has paid a deposit in May.
"""

LEASE_DUE = "It is due on the first day of each month."


@pytest.mark.parametrize(
    ("question", "answer", "sentence"),
    [
        ("How much is the rent?", "7,450 pounds", "The tenant pays a rent of 7,450 pounds."),
        ("When is it due?", "the first day", LEASE_DUE),
        ("Was a deposit paid?", "", "The tenant has paid a deposit in May."),  # a refusal
        ("Wer zahlt?", "niemand", "The tenant pays a rent of 7,450 pounds."),  # no common word
        # one sentence has the words of the question, another those of the answer
        ("Has the tenant paid a rent or a deposit of 7,450 pounds?", "It is due", LEASE_DUE),
    ],
)
def test_the_sentence_shares_words_with_the_answer_or_the_question(
    question: str, answer: str, sentence: str
) -> None:
    assert answer_sentence(LEASE, question, answer) == sentence


def test_a_text_holds_an_answer_only_as_whole_words() -> None:
    assert holds("The CP-60 draws\n60 Watts.", "60 watts.")
    for other in ("The CP-60 draws 160 watts.", "Watts: 60", "It draws 60.5 watts.", ""):
        assert not holds(other, "60 watts")
    assert not holds("No words.", "...")


def test_a_row_of_a_table_is_a_sentence_and_blank_text_is_empty() -> None:
    table = "| item | price |\n| pump | 310 |\n| seal | 12 |"
    assert answer_sentence(table, "What does the seal cost?", "12") == "| seal | 12 |"
    assert answer_sentence(" \n", "Who?") == ""


def test_a_refusal_and_a_citation_show_the_sentence() -> None:
    found = Source("lease.md", 0, (0, len(LEASE)), LEASE, 0.41, place="Rent")
    suiting = found.with_sentence("Was a deposit paid?")
    assert suiting.citation["sentence"] == "The tenant has paid a deposit in May."
    last = refusal([suiting]).splitlines()[-1]
    assert last == "1. 0.41 lease.md, Rent: The tenant has paid a deposit in May."
