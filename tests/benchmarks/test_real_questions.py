"""The questions that real models are asked in benchmarks: their answers stand where the plan says,
and nothing of them was trained with.
"""

import re
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from benchmarks.real import babilong, infinite, ruler
from benchmarks.real.baselines import Right
from benchmarks.real.blocks import Blocks, Span
from benchmarks.real.context_questions import TITLES, ContextFacts
from benchmarks.real.hay import Hay, Needle
from benchmarks.real.methods import best_first, standing
from benchmarks.real.plan import Plan, Question
from benchmarks.real.questions import ATTRIBUTES, TASKS, UPDATES, build
from benchmarks.real.results import Results
from memstore.training.selectors import question_forms as selector_forms
from memstore.training.selectors.questions import Facts, split
from memstore.training.selectors.word_pools import word_pools

WORDS = re.findall(r"\w+", "the of and a to in he was it that on his with as had not at by from")


NUMBER = re.compile(r"\d{4}")


def offsets(text: str) -> list[tuple[int, int]]:
    return [match.span() for match in re.finditer(r"\w+|\W", text)]


def grid(text: str, size: int = 64) -> list[Span]:
    """A text cut every `size` tokens."""
    found = offsets(text)
    parts = [found[at : at + size] for at in range(0, len(found), size)]
    return [Span(part[0][0], part[-1][1]) for part in parts]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    rng = Random(0)

    def sentence() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(4, 12))).capitalize() + "."

    return [" ".join(sentence() for _ in range(4000)) for _ in range(2)]


@pytest.fixture(scope="module")
def recall(texts: list[str]) -> Plan:
    return build(offsets, texts, [2048, 8192], {2048: 4, 8192: 10}, seed=1)


@pytest.fixture(scope="module")
def others(texts: list[str]) -> Plan:
    plan = ruler.build(offsets, texts, [4096, 16384], 2, seed=1)
    plan.merge(babilong.build(offsets, texts, [4096, 16384], 2, seed=1))
    plan.merge(infinite.build(offsets, [4096, 16384], 2, seed=1))
    return plan


def test_every_task_is_asked_as_often_as_was_said(recall: Plan, others: Plan) -> None:
    asked = Counter((question.task, question.length) for question in recall.questions)
    assert asked == {(task, n): count for task in TASKS for n, count in ((2048, 4), (8192, 10))}
    asked = Counter((question.task, question.length) for question in others.questions)
    tasks = {*ruler.TASKS, *babilong.TASKS, *infinite.TASKS}
    assert asked == {(task, n): 2 for task in tasks for n in (4096, 16384)}
    for plan in (recall, others):
        assert len({question.name for question in plan.questions}) == len(plan.questions)


def test_an_answer_stands_where_the_plan_says_and_documents_have_their_length(recall: Plan) -> None:
    for question in recall.questions:
        for stated in question.stated:
            text = recall.documents[stated.document]
            said = text[stated.start : stated.stop]
            assert said.endswith((".", "!", "|")) or said.startswith("## ")
            if stated.value is not None:
                assert text[stated.value :].startswith(
                    (" ".join(question.answers), question.answers[-1])
                )
                assert stated.start <= stated.value < stated.stop
        values = sum(stated.value is not None for stated in question.stated)
        assert values == bool(question.answers)
    for name, text in recall.documents.items():
        length = {"k": 128, "2": 2048, "8": 8192}[name[0] if name[0] == "k" else name.split()[1][0]]
        assert length - 2 <= len(offsets(text)) <= length


def test_what_a_fact_needs_stands_in_sentences_of_its_own(recall: Plan) -> None:
    needed = Counter((q.task, len(q.stated)) for q in recall.questions if q.task in TITLES)
    parts = {"german": 1, "french": 1}
    assert needed == {(task, parts.get(task, 2)): 14 for task in TITLES}
    for question in (q for q in recall.questions if q.task in TITLES):
        text = recall.documents[question.documents[0]]
        said = [text[one.start : one.stop] for one in question.stated]
        first, last = said[0], said[-1]
        # what names the subject, and what tells of it
        names = [word for word in re.findall(r"\w{4,}", question.text) if word in first]
        assert names or question.task == "heading"
        assert question.answers[-1] in last
        if question.task == "neighbours":
            assert first.count(" ") > 25 and last.count(" ") > 25
            assert question.stated[0].stop + 1 == question.stated[1].start
        if question.task == "table":
            columns, row = (line.split(" | ") for line in (first, last))
            asked = [f"the {name.strip('| ')} of" in question.text for name in columns].index(True)
            assert row[asked].strip(" |") == question.answers[0]
            assert row[0].strip("| ") in question.text


def test_two_sections_say_the_same_of_different_subjects() -> None:
    facts = ContextFacts(Facts("held-out", Random(0)), ATTRIBUTES, Random(0))
    one, other = facts.make("heading").needles
    assert one.needed[0] != other.needed[0] and one.value != other.value


def test_no_number_or_person_is_told_of_twice() -> None:
    facts = ContextFacts(Facts("held-out", Random(0)), ATTRIBUTES, Random(0))
    told = [facts.make(kind) for _ in range(150) for kind in TITLES]
    text = "\n".join(needle.text for one in told for needle in one.needles)
    assert max(Counter(NUMBER.findall(text)).values()) == 1
    assert len({one.question for one in told}) == len(told)


def test_of_a_fact_that_was_updated_the_later_sentence_is_asked_for(recall: Plan) -> None:
    for question in (q for q in recall.questions if q.task == "updated"):
        thing = re.search(r"of (.*) now", question.text)[1].lower()
        text = recall.documents[question.documents[0]]
        told = [match.start() for match in re.finditer(re.escape(thing), text.lower())]
        assert len(told) == 2 and told[0] < question.stated[0].start < told[1]


def test_what_nothing_answers_is_not_in_the_documents(recall: Plan) -> None:
    for question in (q for q in recall.questions if q.task.startswith("absent")):
        text = recall.documents[question.documents[0]].lower()
        # a name: two words after an article, or two with capitals
        names = re.findall(r"the \w+ \w+|[A-Z]\w+ [A-Z]\w+", question.text)
        assert names and not all(name.lower() in text for name in names)


def test_no_attribute_form_or_key_of_the_questions_is_trained_with() -> None:
    trained = {*word_pools().number_attributes, *word_pools().word_attributes}
    assert not [name for name in ATTRIBUTES if name in trained and split(name) == "train"]
    assert split("pass key") == "held-out" and split("special magic number") == "held-out"
    assert not {*UPDATES} & {*selector_forms.STATEMENTS}


def test_the_same_seed_gives_the_same_plan_and_another_one_another(
    texts: list[str], recall: Plan
) -> None:
    again = build(offsets, texts, [2048, 8192], {2048: 4, 8192: 10}, seed=1)
    assert again == recall
    assert build(offsets, texts, [2048], {2048: 4}, seed=2).documents != recall.documents


def test_a_plan_is_read_as_it_was_written(others: Plan, tmp_path: Path) -> None:
    others.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == others


def test_sentences_of_shared_haystacks_are_among_the_documents_and_share_them(others: Plan) -> None:
    uses = Counter(name for question in others.questions for name in question.documents)
    for question in others.questions:
        assert {stated.document for stated in question.stated} <= {*question.documents}
        assert {*question.documents} <= others.documents.keys()
        total = sum(len(offsets(others.documents[name])) for name in question.documents)
        assert 0.8 * question.length < total < 1.4 * question.length
        text = " ".join(others.documents[name] for name in question.documents)
        if question.task not in babilong.TASKS:
            assert all(answer in text for answer in question.answers)
    assert max(uses.values()) >= 8


@pytest.mark.parametrize("task", babilong.TASKS)
def test_a_story_is_answered_by_the_sentences_that_it_names(task: str) -> None:
    rng = Random(task)
    for _ in range(50):
        story = babilong.tell(task, rng)
        needed = [story.sentences[at] for at in story.needed]
        assert len(needed) >= {"qa2": 2, "qa3": 3}.get(task, 1) or task == "qa3"
        assert any(story.answer in sentence for sentence in needed)
        if task == "qa1":
            person = story.question.split()[-1].rstrip("?")
            last = [sentence for sentence in story.sentences if sentence.startswith(person)][-1]
            assert story.answer in last and needed == [last]


def test_frequent_words_are_counted_over_what_is_read(others: Plan) -> None:
    for question in (q for q in others.questions if q.task == "frequent words"):
        words = " ".join(others.documents[name] for name in question.documents).split()
        best = [word for word, _ in Counter(words).most_common(4) if word != "..."]
        assert tuple(best) == question.answers


def test_the_right_blocks_hold_the_answer_and_come_first_for_who_knows_them(recall: Plan) -> None:
    blocks = Blocks(grid, recall.documents)
    for question in (q for q in recall.questions if q.answers):
        read = "".join(blocks.text(block) for block in blocks.right(question))
        assert all(answer in read for answer in question.answers)
        scores = Right(blocks).scores(question)
        scope = blocks.scope(question.documents)
        assert scores.sum() == len(blocks.right(question))
        assert standing(scores, scope, blocks, question)["rank"] < scores.sum()
        assert [scope[at] for at in best_first(scores)[: int(scores.sum())]] == blocks.right(
            question
        )


def test_blocks_that_follow_one_another_are_read_as_one_text() -> None:
    blocks = Blocks(grid, {"a": "x " * 100, "b": "y"})
    assert blocks.texts([("a", 0), ("a", 1), ("a", 3), ("b", 0)]) == ["x " * 64, "x " * 4, "y"]


def test_the_context_of_blocks_is_part_of_their_text_and_there_once() -> None:
    spans = [Span(0, 2, "Top\n"), Span(3, 5, "Top\n"), Span(6, 8, "Top\n")]
    blocks = Blocks(lambda text: spans, {"a": "ab cd ef"})
    assert blocks.text(("a", 1)) == "Top\ncd"
    assert blocks.texts([("a", 0), ("a", 1)]) == ["Top\nab cd"]
    assert blocks.texts([("a", 0), ("a", 2)]) == ["Top\nab", "Top\nef"]


def test_marks_count_parts_that_stand_as_words() -> None:
    def marks(answers: tuple[str, ...], said: str, rule: str = "all") -> float:
        return Question("", "", 0, (), "", "", answers, rule).marks(said)  # type: ignore[arg-type]

    assert marks(("12", "March"), "on march 12.") == 1.0
    assert marks(("12", "March"), "in March 123") == 0.5
    assert marks(("12", "13"), "it is 13", "any") == 1.0
    assert marks(("12",), "", "any") == 0.0


def test_results_outlive_a_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    Results(path).add({"question": "a", "method": "m", "right": 1.0})
    with path.open("a") as file:
        file.write('{"question": "b", "me')
    again = Results(path)
    assert ("a", "m") in again and ("b", "m") not in again
    again.add({"question": "b", "method": "m", "right": 0.0})
    assert sorted(row["question"] for row in Results(path)) == ["a", "b"]


def test_no_sentence_is_cut_off_where_it_has_more_tokens_in_its_text_than_alone() -> None:
    def offsets(text: str) -> list[tuple[int, int]]:
        each = 1 if len(text) > 200 else len(text)
        return [(at, at + each) for at in range(0, len(text), each)]

    prose = "The sun was low over the hills. " * 400
    facts = [f"The code of gate {n} is {1000 + n}." for n in range(60)]
    needles = [[Needle(fact, fact[-5:-1])] for fact in facts]
    text, stated = Hay(offsets, [prose], Random(0)).plant("a", 3000, needles)
    assert [text[one.start : one.stop] for (one,) in stated] == facts
