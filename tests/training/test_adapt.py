"""Adapting a model: training texts with questions, the selector, the gate, and the command."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
import typer

pytest.importorskip("transformers")

from memstore.cli.main import app
from memstore.errors import InvalidInput
from memstore.hf.load import load_reader
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.hf.weights import made_here
from memstore.model.lookup_settings import CAUTIONS
from memstore.model.passages.adaptation import UNADAPTED
from memstore.model.passages.passage_encoding import passages_of
from memstore.model.passages.selector import Selector
from memstore.training.reading_questions import AskedContext, AskedQuestion, split_titles
from memstore.training.selectors.learn import LearnConfig, Trained, learn, untrained
from memstore.training.selectors.make_selector import Haystack, Outcome, adapt, drawn, gate_of
from memstore.training.selectors.states import States, read_states
from support.tiny_decoder import decoder, saved, tokenizer

LEARN = LearnConfig(width=32, steps=51, batch=16, like=2, others=16)


def prose(seed: int, sentences: int = 6) -> str:
    rng = Random(seed)
    nouns = ["river", "window", "morning", "captain", "letter", "garden", "winter", "answer"]
    verbs = ["followed", "watched", "remembered", "carried", "opened", "crossed", "noticed"]
    made = []
    for _ in range(sentences):
        first, second, third = rng.sample(nouns, 3)
        made.append(f"When the {first} came, she {rng.choice(verbs)} the {second} by the {third}.")
    return " ".join(made)


def people(count: int, source: str = "wiki") -> list[AskedContext]:
    """Texts about things with their prices and places, and two questions about each thing."""
    rng, found = Random(source), []
    for number in range(count):
        thing, place = f"lamp {source} {number}", f"house number {rng.randrange(9999)}"
        text = f"{prose(number)} The {thing} stands in {place}. {prose(number + 1)}"
        where = AskedQuestion(f"Where is the {thing}?", [place])
        what = AskedQuestion(f"What is the {thing} made of?", [])
        found.append(AskedContext(text, [where, what], f"{source} {number}", source))
    return found


@pytest.fixture(scope="module")
def reader() -> HuggingFacePassageModel:
    return HuggingFacePassageModel(decoder("llama", num_hidden_layers=2), tokenizer(), UNADAPTED)


@pytest.fixture(scope="module")
def read(reader: HuggingFacePassageModel) -> States:
    """Reads more texts than fit into one batch."""
    return read_states(people(20), reader, 1)


def test_questions_that_a_passage_answers_are_read_with_it(
    reader: HuggingFacePassageModel, read: States
) -> None:
    contexts, decode = people(20), reader.tokenizer.decode
    cut = [p.ids.tolist() for one in contexts for p in passages_of(reader, [one.context])]
    assert [read.shown(number).ids for number in range(len(read.ends))] == cut
    assert {source for source, _ in read.texts} == {"wiki en"}
    for one, context in zip(read.asked, contexts, strict=True):  # the other one has no answer
        asked = context.questions[0]
        captured = read.query(one).captured
        assert one.text == asked.question == decode(captured.ids).strip()
        assert asked.answers[0] in decode(cut[one.right]) and one.right in one.touched
        assert len(captured.states[1]) == len(captured.ids)
    again = read_states(contexts[16:], reader, 1)  # which texts are read together does not matter
    first = read.texts[15][1]
    torch.testing.assert_close(again.passage(1), read.passage(first + 1), rtol=0, atol=0.02)


def test_training_scores_passages_as_the_finished_selector_does(
    reader: HuggingFacePassageModel, read: States
) -> None:
    begin = untrained(read, reader.made_for.vocabulary, LEARN)
    model = Trained(replace(begin, idf=torch.rand(begin.idf.shape).half()), 0.0)
    torch.nn.init.normal_(model.attend, std=0.1)
    lengths = read.ends.diff(prepend=torch.tensor([0])).tolist()
    questions = [one.end - one.first for one in read.asked]
    keys = model.landmarks(read.passages.float())
    trained = model.scores(read.rows.float(), read.row_ids, questions, keys, lengths)
    selector = Selector(model.selector(1))
    haystack = Haystack(selector, reader.tokenizer)
    shown = [read.shown(number) for number in range(len(lengths))]
    haystack.add_passages(shown)
    for one, scores in zip(read.asked, trained, strict=True):
        found = selector.scores(read.query(one), haystack, haystack.scope)
        torch.testing.assert_close(found, scores.detach(), atol=0.02, rtol=0)  # int8
    wrong = model.wrong(read, 2)
    for one, scores in zip(read.asked, trained.detach(), strict=True):
        mine = [at for at in range(len(lengths)) if at not in one.touched]
        best = sorted(mine, key=lambda at: -float(scores[at]))[:2]
        assert wrong[one.first] == [at for at in best if scores[at] > 0]


def test_the_same_seed_learns_the_same_bits(reader: HuggingFacePassageModel, read: States) -> None:
    config, hard = replace(LEARN, steps=3), {one.first: [] for one in read.asked}
    start = untrained(read, reader.made_for.vocabulary, config)
    one, same, other = (
        learn(read, start, chosen, hard, reader.device).selector(1)
        for chosen in (config, config, replace(config, seed=1))
    )
    assert one.digest == same.digest != other.digest


def test_a_gate_refuses_at_most_its_allowed_share_of_answerable_questions() -> None:
    many = [Outcome(0, i / 100, 0.04) for i in range(100)]
    gate = gate_of(many, 2048)
    for caution in CAUTIONS:
        needed = gate.threshold(2048, caution)
        assert sum(outcome.confidence < needed for outcome in many) == round(100 * caution)
    assert gate.growth == pytest.approx(0.02)  # half of what blocks that do not answer gain
    assert gate.threshold(1024) == pytest.approx(gate.threshold(2048) - 0.02)


def test_a_selector_learned_from_peoples_questions_finds_held_out_answers(
    reader: HuggingFacePassageModel,
) -> None:
    told: list[str] = []
    made = adapt(reader, people(100), config=replace(LEARN, steps=201), report=told.append)
    assert made.scores["asked"] > 0.8 and made.gate is not None
    assert made.selector.learned is not None and made.selector.learned.layer == 1
    assert sum(line.startswith("step 50") for line in told) == 2  # two rounds
    begin = made.selector.learned
    on = adapt(reader, people(100), begin=begin, config=replace(LEARN, steps=0)).selector.learned
    assert on is not None and on.digest == begin.digest


def test_sources_are_drawn_by_the_root_of_their_size_and_titles_are_split() -> None:
    contexts = [*people(90), *people(10, "news")]
    some = drawn(contexts, 12, 0)
    assert [sum(one.source == name for one in some) for name in ("news", "wiki")] == [3, 9]
    train, test = split_titles(contexts, 0)
    assert len(test) == 5 and len(train) == 95
    assert not {one.title for one in train} & {one.title for one in test}
    with pytest.raises(InvalidInput, match="two titles"):
        split_titles(contexts[:1], 0)


@pytest.mark.parametrize("answer", ["perhaps", ".", prose(0)[1:7]])
def test_questions_whose_answers_no_text_holds_are_refused_before_training(
    reader: HuggingFacePassageModel, answer: str
) -> None:
    asked = [AskedQuestion("Is it so?", [answer])]
    contexts = [AskedContext(prose(n), asked, str(n)) for n in range(20)]
    for refuse in (partial(split_titles, seed=0), partial(adapt, reader, config=LEARN)):
        with pytest.raises(InvalidInput, match="verbatim"):
            refuse(contexts)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model, for commands that train it briefly."""
    monkeypatch.setenv("MEMSTORE_CACHE", str(tmp_path / "cache"))
    few = partial(LearnConfig, steps=5, batch=8, others=8)
    monkeypatch.setattr("memstore.training.selectors.learn.LearnConfig", few)
    monkeypatch.setattr("memstore.training.reading._CHECKED", 2)
    (tmp_path / "book.txt").write_text("\n\n".join(one.context for one in people(80)))
    return saved(tmp_path / "model", num_hidden_layers=2)


def run(model: Path, *options: str | Path) -> object:
    command = ["adapt", str(model), "--json", "--reading-tokens", "1000", "--device", "cpu"]
    return app([*command, *map(str, options)], standalone_mode=False)


def test_the_adapt_command_makes_the_selector_and_adapter_that_loading_finds(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    unadapted = load_reader(model)
    assert unadapted.selector.spec.name == "words"
    present = made_here(unadapted.made_for.weights)
    present.parent.mkdir(parents=True, exist_ok=True)
    present.write_bytes(b"of an earlier version")
    lines = [
        {
            "context": f"The {thing} weighs {at + 40} pounds. It stands by the door of the mill.",
            "questions": [
                {"question": f"How much is the {thing}?", "answers": [f"{at + 40}"]},
                {"question": f"Where is the {thing}?", "answers": ["by the door"]},
            ],
        }
        for at, thing in enumerate(f"{n} lantern" for n in range(16))
    ]
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\ufeff" + "\n".join(map(json.dumps, lines)))  # as Windows writes it
    assert run(model, "--questions", questions) in (None, 0)
    printed = capsys.readouterr()
    assert "30 questions to train on, 2 held out (few, so" in printed.err
    assert "asking about en: 1 of 1" in printed.err
    assert "the present selector cannot be read" in printed.err
    told = json.loads(printed.out)
    assert set(told) == {"adapter", "reading", "selector", "file", "scores"}
    assert len(told["scores"]) == 1 + len(CAUTIONS) and "asked" in told["scores"]
    reader = load_reader(model)
    assert reader.adapter is not None and reader.adapter.tokens >= 1000
    assert reader.selector.spec.name == told["selector"] != "words"
    assert reader.adaptation.doubt is not None
    assert reader.refusal.doubt == reader.adaptation.doubt
    assert reader.adaptation.weights == reader.signature.weights
    assert not (tmp_path / "cache" / "adapting" / reader.adaptation.weights).exists()
    # a text without questions makes another selector, and this adapter can still refuse
    assert run(model, "--text", tmp_path / "book.txt") in (None, 0)
    assert "adapter" not in json.loads(capsys.readouterr().out)
    again = load_reader(model)
    assert again.adapter is not None and again.adapter.digest == reader.adapter.digest
    assert again.refusal is not None and again.refusal.doubt is None


def test_the_command_adapts_a_model_to_texts_without_questions(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(typer.BadParameter, match="--questions or --text"):
        run(model)
    with pytest.raises(typer.BadParameter, match="is a directory"):  # before it trains
        run(model, "--text", tmp_path / "book.txt", "--out", tmp_path)
    short = tmp_path / "short.txt"
    short.write_text(prose(0))
    assert run(model, "--text", short) not in (None, 0)
    assert "two titles; give more or longer texts" in capsys.readouterr().err
    assert run(model, "--text", tmp_path / "book.txt") in (None, 0)
    assert set(json.loads(capsys.readouterr().out)["scores"]) == {"asked"}
    reader = load_reader(model)
    assert reader.adapter is not None and reader.adapter.kind == "writer"
    assert reader.selector.spec.name.startswith("learned") and reader.refusal is None
