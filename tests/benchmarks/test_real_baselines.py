"""The baselines of real models' memories: retrieval finds words, and a model that reads several
prompts side by side answers as if it read each alone.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks.real.blocks import Blocks, passages
from benchmarks.real.methods import Baselines, Nothing, Retrieval, Whole, ask_all
from benchmarks.real.plan import Question, Stated
from benchmarks.real.recall_tables import (
    answers,
    counts,
    differences,
    finds,
    gate,
    refusals,
    worths,
)
from benchmarks.real.results import Results, Row
from benchmarks.real.tuning import Tuned, load, outcome, save, tune, worth
from support.tiny_decoder import tokenizer

pytest.importorskip("transformers")
pytest.importorskip("bm25s")

from benchmarks.real.baselines import Fused, Right, Words
from benchmarks.real.choice_at_1m import Chosen
from benchmarks.real.memory import Memory
from benchmarks.real.prompting import Prompted, tokenizer_of
from memstore.hf.load import load_reader
from memstore.model.lookup_settings import LookupSettings
from memstore.model.passages.adaptation import Adaptation
from memstore.model.passages.selector import Learned, Projection, Selector

HAY = "the grass is green and the sky is blue . "
DOCUMENTS = {
    "a": HAY * 8 + "the code of the fox is 7 .",
    "b": HAY * 8 + "the code of the owl is 4 . " + HAY * 8,
}


def asked(name: str, thing: str, document: str, value: str, **more: object) -> Question:
    at = DOCUMENTS[document].index(f"the code of the {thing}")
    stated = Stated(document, at, at + 24, DOCUMENTS[document].index(value))
    given = {"text": f"what is the code of the {thing} ?", "primed": "the code is "} | more
    return Question(
        name, "fact", 64, ("a", "b"), str(given["text"]), str(given["primed"]), (value,),
        "all" if "rule" in more else "forced", (stated,), 5,
    )  # fmt: skip


QUESTIONS = [
    asked("1", "fox", "a", "7"),
    asked("2", "owl", "b", "4"),
    asked("3", "fox", "a", "7", rule="all", primed=""),
    asked("4", "owl", "b", "4", rule="all", text="owl ?"),
]


def test_passages_have_their_context_in_front_as_text(tiny: Path) -> None:
    text = " ".join(f"The fox of row {number} is red." for number in range(20))
    spans = passages(tokenizer_of(tiny), 32, context="sentence")(text)
    without = passages(tokenizer_of(tiny), 32)(text)
    assert len(spans) > 2 and not spans[0].lead
    for before, span in pairwise(spans):
        assert span.lead.strip() and text[: before.end].endswith(span.lead.strip())
    assert [one[:2] for one in spans] == [one[:2] for one in without]


def test_words_find_the_block_that_has_them(tiny: Path) -> None:
    blocks = Blocks(passages(tokenizer_of(tiny), 32), DOCUMENTS)
    for question in QUESTIONS:
        scores = Words(blocks).scores(question)
        scope = blocks.scope(question.documents)
        assert scope[int(np.argmax(scores))] in blocks.right(question)
    unknown = Question("", "", 0, ("a",), "where lies Rome", "", (), "forced")
    assert not Words(blocks).scores(unknown).any()


class Given:
    """Scores that are given."""

    def __init__(self, *scores: float) -> None:
        self.given = np.array(scores, np.float32)

    def scores(self, question: Question) -> np.ndarray:
        return self.given


def test_ranks_are_fused_and_what_a_chooser_does_not_find_counts_nothing() -> None:
    fused = Fused([Given(3, 0, 2, 1), Given(0.1, 0.4, 0.3, -0.2)]).scores(QUESTIONS[0])
    expected = [1 / 61 + 1 / 63, 1 / 61, 1 / 62 + 1 / 62, 1 / 63]
    np.testing.assert_allclose(fused, expected, rtol=1e-6)


def test_a_baseline_says_nothing_below_its_threshold_and_reads_as_many_as_is_said(
    tiny: Path, tmp_path: Path
) -> None:
    blocks = Blocks(passages(tokenizer_of(tiny), 32), DOCUMENTS)
    best = float(Words(blocks).scores(QUESTIONS[0]).max())
    how = {"bm25": Tuned(2, best, 0.0)}
    lookup = LookupSettings(top_k=3, score_range=1.0)
    baselines = Baselines(tiny, "float32", blocks, tmp_path, tuned=how, lookup=lookup)
    row = baselines.method("bm25").ask(QUESTIONS[:1])[0]
    assert row["answered"] and len(row["read"]) == 2
    baselines.tuned = {"bm25": Tuned(2, best + 0.01, 0.0)}
    asked = baselines.method("bm25").ask([QUESTIONS[0]])[0]
    assert (asked["answered"], asked["read"], asked["right"]) == (False, [], 0.0)
    assert asked["near"] == 0  # where it would have found it is told all the same
    (ruled,) = baselines.method("bm25~").ask(QUESTIONS[:1])
    scores = Words(blocks).scores(QUESTIONS[0])
    near = int((scores >= scores.max() - scores.std()).sum())
    assert len(ruled["read"]) == min(3, near)
    for wrong, said in (("minilm", "--tune"), ("bm25@", "bm25@4"), ("owl@1", "no method")):
        with pytest.raises(SystemExit, match=said):
            baselines.method(wrong)


def told(task: str, best: float, right: float = 0.0, method: str = "bm25@1") -> Row:
    return {"task": task, "length": 64, "method": method, "best": best, "right": right}


def test_what_is_best_on_validation_texts_is_chosen(tmp_path: Path) -> None:
    one = [told("fact", score, right) for score, right in ((9, 1), (8, 1), (3, 1), (2, 0))]
    one += [told("absent", score) for score in (5, 4, 2, 1)]
    four = [row | {"method": "bm25@4", "right": 0.0} for row in one]
    found = tune(one + four)
    # from 8 on: half of the facts, no false answer; from 3 on: .75 less .5
    assert found == {"bm25": Tuned(1, 8.0, pytest.approx(0.25))}
    tried = [
        row | {"answered": row["best"] >= 8, "right": row["right"] * (row["best"] >= 8)}
        for row in one
    ]
    assert worth(tried) == pytest.approx(found["bm25"].worth)
    assert [outcome(row) for row in tried] == [1, 1, 0, 0, 1, 1, 1, 1]
    save(tmp_path / "tuned.json", found)
    assert load(tmp_path / "tuned.json") == found
    assert tune(one[:4])["bm25"].threshold is None


def test_differences_are_those_on_the_same_questions() -> None:
    rows = [
        told("fact", 1, right, method) | {"question": str(at)}
        for method, some in (("memory", (1, 1, 0, 1)), ("bm25@1", (0, 1, 0, 0)), ("full", (1, 1)))
        for at, right in enumerate(some)
    ]
    line = differences(rows, 64, ["memory", "bm25@1", "full"]).splitlines()[-1]
    assert "+0.500 (-0.263 to +0.930)" in line and "+0.000 (" in line
    rows += [told("absent", 1) | {"question": "a"}]
    assert "| 64 " in worths(rows, ["bm25@1"]) and "-0.375" in worths(rows, ["bm25@1"])


def test_prompts_read_side_by_side_are_answered_as_each_alone(tiny: Path) -> None:
    texts = [["the code of the fox is 7 ."], [], ["grass", "sky is blue"], DOCUMENTS.values()]
    pairs = [(question, list(some)) for question in QUESTIONS for some in texts]
    together = Prompted(tiny).answers(pairs)
    alone = [Prompted(tiny).answers([pair])[0] for pair in pairs]
    assert together == alone
    assert any(answered.said for answered in alone)


def test_a_forced_answer_is_right_if_greedy_decoding_says_it(tiny: Path) -> None:
    prompted = Prompted(tiny)
    prompt = prompted.ids("q what is the code of the fox ? a the code is")
    said = prompted.ids(prompted.generate([prompt], 3)[0])
    assert said and prompted.forced([prompt], [said]) == [True]
    assert prompted.forced([prompt], [[said[0], (said[1] + 1) % 20]]) == [False]


def test_a_run_that_was_stopped_goes_on_and_its_tables_tell_all(tiny: Path, tmp_path: Path) -> None:
    blocks, prompted = (Blocks(passages(tokenizer_of(tiny), 32), DOCUMENTS), Prompted(tiny))
    made: list[str] = []

    def method(name: str) -> object:
        made.append(name)
        return {
            "right": Retrieval(prompted, blocks, Right(blocks), None),
            "bm25@1": Retrieval(prompted, blocks, Words(blocks), 1),
            "full": Whole(prompted, DOCUMENTS),
            "none": Nothing(prompted),
        }[name]

    names = ("right", "bm25@1", "full", "none")
    methods = {name: (lambda name=name: method(name)) for name in names}
    results = Results(tmp_path / "rows.jsonl")
    ask_all(QUESTIONS[:3], methods, results)  # type: ignore[arg-type]
    again = Results(tmp_path / "rows.jsonl")
    absent = Question("5", "absent", 64, ("a",), "what is blue ?", "it is ", (), "forced")
    made.clear()
    ask_all([*QUESTIONS, absent], methods, again, applies=lambda q, m: m == "bm25@1")
    assert made == ["bm25@1"] and len(list(again)) == 3 * 4 + 2
    rows = list(again)
    assert [row["rank"] for row in rows if row["method"] == "bm25@1"][:3] == [0, 0, 0]
    assert "| one fact, a number" in answers(rows, 64, names)
    assert "100/100/100/100" in finds(rows)
    asked = [(told["method"], told["questions"]) for told in counts(rows) if told["task"] == "fact"]
    assert sorted(asked) == [("bm25@1", 4), ("full", 3), ("none", 3), ("right", 3)]
    assert "(0." in refusals(rows)
    told = [{"task": "fact", "length": 64, "method": "memory", "answered": n < 3} for n in range(4)]
    assert "| 0.750 (" in gate(told)


def test_a_memory_is_read_into_once_and_tells_what_it_chose(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = Blocks(passages(tokenizer_of(tiny)), DOCUMENTS)

    def asked_anew() -> list[list[Row]]:
        with Memory(load_reader(tiny), tmp_path / "memory", blocks) as memory:
            memory.read_in(DOCUMENTS)
            methods = [memory.method("memory@1"), memory.method("memory-right")]
            methods.append(memory.as_text(Prompted(tiny)))
            return [method.ask(QUESTIONS) for method in methods]

    first = asked_anew()
    assert "2/2 documents read" in capsys.readouterr().out
    assert asked_anew() == first
    assert "read" not in capsys.readouterr().out
    prompted, blocks_of = Prompted(tiny), blocks.texts
    for row, given, text, question in zip(*first, QUESTIONS):
        asked = prompted.answers([(question, blocks_of(text["read"]))])[0]
        assert text["answered"] and asked == (text["right"], text["said"])
        assert row["rank"] == 0 and row["read"] == blocks.right(question) == given["read"]
        assert (row["right"], row["said"]) == (given["right"], given["said"])


def test_the_choice_alone_scores_blocks_as_a_memory_that_changed_its_selector_does(
    tiny: Path, tmp_path: Path
) -> None:
    import torch

    hidden, generator = 64, torch.Generator().manual_seed(0)
    flat, ones = torch.zeros(hidden), torch.ones(hidden)
    weights = torch.randn(hidden, 8, generator=generator)
    idf = torch.ones(len(tokenizer()), dtype=torch.float16)
    learned = Learned(2, Projection(weights, flat, ones, flat, ones, flat, idf))
    adaptation = Adaptation(Selector(learned, 0.1))
    long = {"a": DOCUMENTS["a"] * 20, "b": DOCUMENTS["b"]}  # of many passages
    blocks = Blocks(passages(tokenizer_of(tiny)), long)
    with Memory(load_reader(tiny), tmp_path / "m", blocks) as memory:
        memory.read_in(long)  # to be found by another selector
    with Memory(load_reader(tiny, adaptation=adaptation), tmp_path / "m", blocks) as memory:
        memory.method("memory").ask(QUESTIONS[:1])
        expected = memory.seen.last.numpy()
    alone = Chosen(load_reader(tiny, adaptation=adaptation), blocks, tmp_path, "test")
    np.testing.assert_allclose(alone.scores(QUESTIONS[0]), expected, atol=1e-4)
    kept = Chosen(load_reader(tiny, adaptation=adaptation), blocks, tmp_path, "test")
    assert np.array_equal(kept.scores(QUESTIONS[0]), alone.scores(QUESTIONS[0]))
