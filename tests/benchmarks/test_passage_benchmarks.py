"""Benchmarks of passage models: choosers find words, prompts that are read in a batch are answered
as each alone, interrupted runs continue, and what is timed is what is answered.
"""

import argparse
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("bm25s")

from benchmarks import first_token
from benchmarks.real.baselines import Right, Words
from benchmarks.real.blocks import Blocks, passages
from benchmarks.real.memory import Memory
from benchmarks.real.methods import Baselines, Nothing, Retrieval, Whole, ask_all
from benchmarks.real.plan import Question, Stated
from benchmarks.real.prompting import Prompted, tokenizer_of
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
from memstore.hf.load import load_reader
from memstore.model.lookup_settings import LookupSettings
from support.fake_device import FakeDevice

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


def test_bm25_and_the_known_right_blocks_find_the_answer(tiny: Path) -> None:
    blocks = Blocks(passages(tokenizer_of(tiny), 32), DOCUMENTS)
    for question in QUESTIONS:
        right = blocks.right(question)
        assert question.answers[0] in "".join(map(blocks.text, right))
        scope = blocks.scope(question.documents)
        assert scope[int(np.argmax(Words(blocks).scores(question)))] in right
        assert [scope[at] for at in np.flatnonzero(Right(blocks).scores(question))] == right
    unknown = Question("", "", 0, ("a",), "where lies Rome", "", (), "forced")
    assert not Words(blocks).scores(unknown).any()


def test_baselines_use_their_tuned_threshold_and_count(tiny: Path, tmp_path: Path) -> None:
    blocks = Blocks(passages(tokenizer_of(tiny), 32), DOCUMENTS)
    best = float(Words(blocks).scores(QUESTIONS[0]).max())
    lookup = LookupSettings(top_k=3, score_range=1.0)
    tuned = {"bm25": Tuned(2, best, 0.0)}
    baselines = Baselines(tiny, "float32", blocks, tmp_path, tuned=tuned, lookup=lookup)
    row = baselines.method("bm25").ask(QUESTIONS[:1])[0]
    assert row["answered"] and len(row["read"]) == 2
    baselines.tuned = {"bm25": Tuned(2, best + 0.01, 0.0)}
    row = baselines.method("bm25").ask([QUESTIONS[0]])[0]
    assert (row["answered"], row["read"], row["right"], row["near"]) == (False, [], 0.0, 0)
    (ruled,) = baselines.method("bm25~").ask(QUESTIONS[:1])
    scores = Words(blocks).scores(QUESTIONS[0])
    assert len(ruled["read"]) == min(3, int((scores >= scores.max() - scores.std()).sum()))
    for wrong, said in (("minilm", "--tune"), ("bm25@", "bm25@4"), ("owl@1", "no method")):
        with pytest.raises(SystemExit, match=said):
            baselines.method(wrong)


def row_of(task: str, best: float, right: float = 0.0, method: str = "bm25@1") -> Row:
    return {"task": task, "length": 64, "method": method, "best": best, "right": right}


def test_tuning_chooses_the_best_count_and_threshold(tmp_path: Path) -> None:
    one = [row_of("fact", score, right) for score, right in ((9, 1), (8, 1), (3, 1), (2, 0))]
    one += [row_of("absent", score) for score in (5, 4, 2, 1)]
    four = [row | {"method": "bm25@4", "right": 0.0} for row in one]
    found = tune(one + four)
    # from 8 on: half of the facts, no false answer; from 3 on: 0.75 less 0.5
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


def test_differences_are_paired_by_question() -> None:
    rows = [
        row_of("fact", 1, right, method) | {"question": str(at)}
        for method, some in (("memory", (1, 1, 0, 1)), ("bm25@1", (0, 1, 0, 0)), ("full", (1, 1)))
        for at, right in enumerate(some)
    ]
    line = differences(rows, 64, ["memory", "bm25@1", "full"]).splitlines()[-1]
    assert "+0.500 (-0.263 to +0.930)" in line and "+0.000 (" in line
    rows += [row_of("absent", 1) | {"question": "a"}]
    assert "| 64 " in worths(rows, ["bm25@1"]) and "-0.375" in worths(rows, ["bm25@1"])


def test_prompts_in_a_batch_are_answered_as_each_alone(tiny: Path) -> None:
    texts = [["the code of the fox is 7 ."], [], ["grass", "sky is blue"], DOCUMENTS.values()]
    pairs = [(question, list(some)) for question in QUESTIONS for some in texts]
    together = Prompted(tiny).answers(pairs)
    assert together == [Prompted(tiny).answers([pair])[0] for pair in pairs]
    assert any(answered.said for answered in together)


def test_forced_answers_are_right_if_greedy_decoding_gives_them(tiny: Path) -> None:
    prompted = Prompted(tiny)
    prompt = prompted.ids("q what is the code of the fox ? a the code is")
    said = prompted.ids(prompted.generate([prompt], 3)[0])
    assert said and prompted.forced([prompt], [said]) == [True]
    assert prompted.forced([prompt], [[said[0], (said[1] + 1) % 20]]) == [False]

    def marks(parts: tuple[str, ...], said: str, rule: str = "all") -> float:
        return Question("", "", 0, (), "", "", parts, rule).marks(said)  # type: ignore[arg-type]

    assert marks(("12", "March"), "on march 12.") == 1.0
    assert marks(("12", "March"), "in March 123") == 0.5
    assert (marks(("12", "13"), "it is 13", "any"), marks(("12",), "", "any")) == (1.0, 0.0)


def test_an_interrupted_run_continues_and_its_tables_are_complete(
    tiny: Path, tmp_path: Path
) -> None:
    blocks, prompted = Blocks(passages(tokenizer_of(tiny), 32), DOCUMENTS), Prompted(tiny)
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
    path = tmp_path / "rows.jsonl"
    ask_all(QUESTIONS[:3], methods, Results(path))  # type: ignore[arg-type]
    with path.open("a") as file:
        file.write('{"question": "4", "me')  # the line that a killed process was writing
    again = Results(path)
    absent = Question("5", "absent", 64, ("a",), "what is blue ?", "it is ", (), "forced")
    made.clear()
    ask_all([*QUESTIONS, absent], methods, again, applies=lambda q, m: m == "bm25@1")
    assert made == ["bm25@1"] and len(list(Results(path))) == 3 * 4 + 2
    rows = list(again)
    assert [row["rank"] for row in rows if row["method"] == "bm25@1"][:3] == [0, 0, 0]
    assert "| one fact, a number" in answers(rows, 64, names)
    assert "100/100/100/100" in finds(rows) and "(0." in refusals(rows)
    asked = [(one["method"], one["questions"]) for one in counts(rows) if one["task"] == "fact"]
    assert sorted(asked) == [("bm25@1", 4), ("full", 3), ("none", 3), ("right", 3)]
    passed = [
        {"task": "fact", "length": 64, "method": "memory", "answered": n < 3} for n in range(4)
    ]
    assert "| 0.750 (" in gate(passed)


def test_a_memory_is_ingested_once_and_reports_what_it_chose(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = Blocks(passages(tokenizer_of(tiny)), DOCUMENTS)

    def ask_again() -> list[list[Row]]:
        with Memory(load_reader(tiny), tmp_path / "memory", blocks) as memory:
            memory.read_in(DOCUMENTS)
            methods = [memory.method("memory@1"), memory.method("memory-right")]
            methods.append(memory.as_text(Prompted(tiny)))
            return [method.ask(QUESTIONS) for method in methods]

    first = ask_again()
    assert "2/2 documents read" in capsys.readouterr().out
    assert ask_again() == first
    assert "read" not in capsys.readouterr().out
    prompted = Prompted(tiny)
    for row, given, text, question in zip(*first, QUESTIONS):
        answered = prompted.answers([(question, blocks.texts(text["read"]))])[0]
        assert text["answered"] and answered == (text["right"], text["said"])
        assert row["rank"] == 0 and row["read"] == blocks.right(question) == given["read"]
        assert (row["right"], row["said"]) == (given["right"], given["said"])


@pytest.mark.parametrize("device", [None, "cuda"])
def test_one_passage_gives_the_first_token_that_it_gives_as_text(
    device: str | None, tmp_path: Path
) -> None:
    options = argparse.Namespace(
        model=None, shape="tiny", device=device, dtype="float32", codec="raw", passages=[1, 3],
        repeats=1, seed=0,
    )  # fmt: skip
    with nullcontext() if device is None else FakeDevice():
        reader = first_token.model_of(options)
        with first_token.opened(options, reader, tmp_path / "m") as store:
            found = first_token.measure(reader, store, options)
            _, question = first_token.text_of(reader, options)
            asked = first_token.Asked(reader, store, question, 1)
            assert asked.from_memory() == asked.from_text()
            assert len(asked.read()) == 1
    tiers = ["host tier"] if device is None else ["device tier", "host tier"]
    assert found["seconds"].keys() == {f"{w}, {n}" for w in ("text", *tiers) for n in (1, 3)}
    assert 0 < found["tokens"]["1"] < found["tokens"]["3"] and found["ingest"] > 0
    assert all(f"{tier}, ms" in first_token.report(found) for tier in tiers)
