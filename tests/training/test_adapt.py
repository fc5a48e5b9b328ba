"""Making a selector: texts with questions, states that are read once, training, calibration."""

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
from memstore.model.lookup_settings import CAUTIONS
from memstore.model.passages.adaptation import UNADAPTED, Adaptation, load_selector, save_selector
from memstore.model.passages.passage_ingest import passages_of
from memstore.model.passages.selector import GATE_BLOCKS, Selector
from memstore.training.planted import planted_questions
from memstore.training.reading_questions import AskedContext, AskedQuestion, drawn, split_titles
from memstore.training.selectors import make_selector, states
from memstore.training.selectors.learn import LearnConfig, Trained, learn, rarity
from memstore.training.selectors.make_selector import AdaptOptions, adapt
from memstore.training.selectors.measure import Haystack, Outcome, gate_of, recalls
from memstore.training.selectors.states import read_states
from support.tiny_decoder import decoder, saved, tokenizer

LEARN = LearnConfig(width=32, steps=51, batch=16, like=2, others=16)
OPTIONS = AdaptOptions(windows=5, held_out=3, layer=1, learn=LEARN)


def prose(seed: int, sentences: int = 100) -> str:
    rng = Random(seed)
    nouns = ["river", "window", "morning", "captain", "letter", "garden", "winter", "answer"]
    verbs = ["followed", "watched", "remembered", "carried", "opened", "crossed", "noticed"]
    made = []
    for _ in range(sentences):
        first, second, third = rng.sample(nouns, 3)
        made.append(f"When the {first} came, she {rng.choice(verbs)} the {second} by the {third}.")
    return " ".join(made)


TEXTS = [prose(1), prose(2)]


@pytest.fixture(scope="module")
def reader() -> HuggingFacePassageModel:
    return HuggingFacePassageModel(decoder("llama", num_hidden_layers=2), tokenizer(), UNADAPTED)


def texts(count: int, seed: int = 0) -> list[AskedContext]:
    return planted_questions(TEXTS, count, "train", seed)


def test_questions_know_the_passages_that_answer(
    reader: HuggingFacePassageModel, tmp_path: Path
) -> None:
    contexts = texts(12, seed=3)
    read = read_states(contexts, reader, [0], tmp_path)
    decode = reader.tokenizer.decode
    cut = [p.ids.tolist() for one in contexts for p in passages_of(reader, [one.context])]
    assert [read.shown(number).ids for number in range(len(read.ends))] == cut
    assert {one.context for one in read.asked} == set(range(12))
    for one in read.asked:
        (answers,) = {
            tuple(asked.answers)
            for asked in contexts[one.context].questions
            if asked.question == one.text
        }
        assert decode(one.ids).strip() == one.text.strip()
        assert read.captured(one).ids == list(one.ids)
        assert len(read.captured(one).states[0]) == len(one.ids)
        if one.kind in ("plain", "absent"):
            assert one.right == -1 and not one.touched
            continue
        assert one.right in one.touched
        if one.kind != "passage":
            assert answers[0].lower() in decode(cut[one.right]).lower()


def test_states_are_read_once_and_an_interrupted_reading_goes_on(
    reader: HuggingFacePassageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts = texts(18)
    rows: list[int] = []
    captured = states.captured

    def counted(*given, **asked):
        rows.append(len(given[1]))
        return captured(*given, **asked)

    monkeypatch.setattr(states, "captured", counted)

    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_states(contexts, reader, [0, 1], tmp_path, report=stop)
    rows.clear()
    resumed = read_states(contexts, reader, [0, 1], tmp_path)
    left = [one for one in resumed.asked if one.context >= 16]
    assert sum(rows) == len(resumed.ends) - resumed.texts[15][1] + len(left)
    whole = read_states(contexts, reader, [0, 1], tmp_path / "other")
    assert torch.equal(resumed.passages[1], whole.passages[1])
    assert torch.equal(resumed.rows[0], whole.rows[0])
    assert resumed.asked == whole.asked
    assert torch.equal(resumed.passage(1, 20), resumed.shown(20).states[1])
    rows.clear()
    read_states(contexts[:8], reader, [1], tmp_path)
    assert sum(rows) > 0  # other layers are other states


def test_passages_that_answer_the_same_question_count_neither_way(
    reader: HuggingFacePassageModel, tmp_path: Path
) -> None:
    first, second = texts(8)[-2:]
    asked = first.questions[0]
    again = AskedContext(f"{second.context} {asked.answers[0]}", [asked])
    read = read_states([first, again], reader, [1], tmp_path).asked
    one, other = (
        next(q for q in read if q.text == asked.question and q.context == n) for n in (0, 1)
    )
    assert one.others == other.touched and other.others == one.touched
    assert one.touched and other.touched and not one.touched & other.touched
    assert not any(one.others for one in read if not one.key)


def test_what_is_trained_scores_passages_as_the_selector_that_comes_of_it(
    reader: HuggingFacePassageModel, tmp_path: Path
) -> None:
    read = read_states(texts(4, seed=2), reader, [1], tmp_path)
    model = Trained(read, 1, torch.rand(reader.made_for.vocabulary), 32, 0.0)
    torch.nn.init.normal_(model.attend, std=0.1)
    lengths = read.ends.diff(prepend=torch.tensor([0])).tolist()
    rows = read.rows[1].float(), read.row_ids
    questions = [one.end - one.first for one in read.asked]
    trained = model.scores(*rows, questions, model.landmarks(read.passages[1].float()), lengths)
    selector = Selector(model.selector(1))
    haystack = Haystack(selector.spec)
    shown = [read.shown(number) for number in range(len(lengths))]
    haystack.add_passages(selector, reader.tokenizer, shown)
    for one, scores in zip(read.asked, trained, strict=True):
        found = selector.scores(read.query(one), haystack, haystack.scope)
        torch.testing.assert_close(found, scores.detach(), atol=0.02, rtol=0)  # int8


def test_a_projection_is_learned_that_finds_held_out_facts_and_is_kept_in_a_file(
    reader: HuggingFacePassageModel, tmp_path: Path
) -> None:
    told: list[str] = []
    made = adapt(reader, TEXTS, tmp_path, options=OPTIONS, report=told.append)
    assert made.selector.learned is not None and made.selector.learned.layer == 1
    assert made.scores["literal"] > 0.8 and made.gate is not None and made.gate.growth > 0
    assert any(line.startswith("step 50") for line in told)
    path = tmp_path / "selector.safetensors"
    save_selector(made, reader.made_for, path)
    loaded = load_selector(path, reader.made_for)
    assert isinstance(loaded, Adaptation)
    assert loaded.selector.spec == made.selector.spec and loaded.scores == made.scores


def test_the_same_seed_learns_the_same_bits(
    reader: HuggingFacePassageModel, tmp_path: Path
) -> None:
    read = read_states(texts(12, seed=2), reader, [1], tmp_path)
    passages = (read.shown(number).ids for number in range(len(read.ends)))
    idf = rarity(passages, reader.made_for.vocabulary)
    config = replace(LEARN, steps=3)
    one, same, other = (
        learn(read, 1, idf, chosen) for chosen in (config, config, replace(config, seed=1))
    )
    assert one.digest == same.digest != other.digest


def test_a_gate_loses_at_most_what_it_may_and_ranks_become_recalls() -> None:
    outcomes = [
        Outcome("literal", rank, confidence, 0.0)
        for rank, confidence in zip([0, 0, 3, 20], [0.9, 0.8, 0.7, 0.1], strict=True)
    ]
    assert recalls(outcomes) == {"literal": [0.5, 0.75, 0.75, 0.75]}
    many = [Outcome("literal", 0, i / 100, 0.04) for i in range(100)]
    gate = gate_of(many, [], 2048)
    assert gate is not None and gate.together is None and gate_of([], many, 2048) is None
    for caution in CAUTIONS:
        needed = gate.threshold(2048, caution)
        assert sum(outcome.confidence < needed for outcome in many) == round(100 * caution)
    assert gate.growth == pytest.approx(0.02)  # half of what blocks that do not answer gain
    assert gate.threshold(1024) == pytest.approx(gate.threshold(2048) - 0.02)


def test_of_questions_that_nothing_answers_few_more_pass_for_what_blocks_cover_together() -> None:
    answered = [Outcome("literal", 0, 0.5 + i / 128, 0.0) for i in range(40)]
    absent = [Outcome("absent", -1, i / 128, 0.0, i / 128 + 0.25) for i in range(100)]
    gate = gate_of(answered, absent, GATE_BLOCKS, let=0.1)
    assert gate is not None and gate.together is not None
    assert gate.threshold(GATE_BLOCKS) == 68 / 128  # refuses 4 of 40
    scores = [torch.full((GATE_BLOCKS,), outcome.confidence) for outcome in absent]
    assert sum(map(gate.answers, scores)) == 32
    together = [gate.answer_together(*of) for of in zip(scores, [o.together for o in absent])]
    assert sum(together) == 32 + 10  # those, and so many more
    few = gate_of(answered, [absent[0], absent[99]], GATE_BLOCKS, let=0.9)  # all may pass
    assert few is not None and few.together == pytest.approx(0.25 - few.threshold(GATE_BLOCKS))


def test_the_command_makes_a_selector_that_the_model_is_then_read_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("MEMSTORE_CACHE", str(tmp_path / "cache"))
    model = saved(tmp_path / "model", num_hidden_layers=2)
    prose_file = tmp_path / "prose.txt"
    prose_file.write_text(TEXTS[0])
    assert load_reader(model).selector.spec.name == "words"
    here = "memstore.training.selectors.make_selector"
    few = partial(AdaptOptions, learn=LearnConfig(steps=5, batch=8, others=8))
    monkeypatch.setattr(f"{here}.AdaptOptions", few)
    monkeypatch.setattr(f"{here}._WORD_WEIGHTS", (0.1,))
    monkeypatch.setattr("memstore.training.reading._CHECKED", 2)
    monkeypatch.setattr(f"{here}._RANGES", (1.0,))
    command = ["adapt", str(model), "--text", str(prose_file), "--windows", "8", "--json"]
    command += ["--reading-tokens", "1000", "--device", "cpu"]
    assert app(command, standalone_mode=False) in (None, 0)
    told = json.loads(capsys.readouterr().out)
    assert set(told["scores"]) >= {"literal", "reworded", "synonyms"}
    reader = load_reader(model)
    assert reader.selector.spec.name == told["selector"]
    assert reader.selector.spec.name.startswith("learned")
    assert reader.adapter is not None and reader.adapter.kind == "writer"
    assert reader.adapter.tokens >= 1000 and set(told["reading"]) == set(reader.adapter.scores)
    assert reader.adaptation.weights == reader.signature.weights


def test_the_command_trains_a_reading_adapter_on_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("MEMSTORE_CACHE", str(tmp_path / "cache"))
    model = saved(tmp_path / "model", num_hidden_layers=2)
    lines = [
        {
            "context": f"The {thing} weighs {at + 40} pounds. It stands by the door of the mill.",
            "title": thing,
            "questions": [
                {"question": f"How much is the {thing}?", "answers": [f"{at + 40}"]},
                {"question": f"Where is the {thing}?", "answers": ["by the door"]},
            ],
        }
        for at, thing in enumerate(f"{n} lantern" for n in range(16))
    ]
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(map(json.dumps, lines)))
    here = "memstore.training.selectors.make_selector"
    monkeypatch.setattr(
        f"{here}._WITH_PEOPLES", replace(make_selector._WITH_PEOPLES, steps=5, batch=8, others=8)
    )
    monkeypatch.setattr(f"{here}._WORD_WEIGHTS", (0.1,))
    monkeypatch.setattr("memstore.training.reading._CHECKED", 2)
    monkeypatch.setattr(f"{here}._RANGES", (1.0,))
    command = ["adapt", str(model), "--questions", str(questions), "--json"]
    command += ["--reading-tokens", "1000", "--device", "cpu"]
    assert app(command, standalone_mode=False) in (None, 0)
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"adapter", "reading", "selector", "file", "scores", "refusals"}
    assert len(told["refusals"]) == len(CAUTIONS)
    assert "asked" in told["scores"]
    reader = load_reader(model)
    assert reader.adapter is not None and reader.adapter.kind == "both"
    assert reader.selector.spec.name == told["selector"]
    assert reader.selector.spec.name.startswith("learned")
    assert reader.refusal is not None and reader.refusal.doubt == reader.adaptation.doubt
    assert reader.adaptation.doubt is not None
    with pytest.raises(typer.BadParameter, match="--text"):
        app(["adapt", str(model)], standalone_mode=False)


def people(count: int, source: str = "wiki") -> list[AskedContext]:
    """Texts about things with their prices and places, and two questions about each."""
    rng, found = Random(source), []
    for number in range(count):
        thing, place = f"lamp {source} {number}", f"house number {rng.randrange(9999)}"
        text = f"{prose(number, 6)} The {thing} stands in {place}. {prose(number + 1, 6)}"
        where = AskedQuestion(f"Where is the {thing}?", [place])
        what = AskedQuestion(f"What is the {thing} made of?", [])
        found.append(AskedContext(text, [where, what], f"{source} {number}", source))
    return found


def test_of_peoples_questions_those_are_learned_that_a_passage_answers(
    reader: HuggingFacePassageModel, tmp_path: Path
) -> None:
    contexts = people(12)
    read = read_states(contexts, reader, [0], tmp_path)
    assert {source for source, _ in read.texts} == {"wiki en"}
    for one, context in zip(read.asked, contexts, strict=True):  # the other one has no answer
        assert one.kind == "asked" and one.text == context.questions[0].question
        answering = reader.tokenizer.decode(read.shown(one.right).ids)
        assert context.questions[0].answers[0] in answering and one.right in one.touched


def test_sources_are_drawn_by_the_root_of_their_size_and_titles_are_split() -> None:
    contexts = [*people(90), *people(10, "news")]
    some = drawn(contexts, 12, 0)
    assert [sum(one.source == name for one in some) for name in ("news", "wiki")] == [3, 9]
    train, test = split_titles(contexts, 0)
    assert len(test) == 5 and len(train) == 95
    assert not {one.title for one in train} & {one.title for one in test}
    with pytest.raises(InvalidInput, match="two titles"):
        split_titles(contexts[:1], 0)


def test_a_selector_learned_from_peoples_questions_alone_finds_held_out_answers(
    reader: HuggingFacePassageModel, tmp_path: Path
) -> None:
    told: list[str] = []
    config = replace(LEARN, shares=(("asked", 1.0),))
    contexts = people(60)
    made = adapt(
        reader,
        [],
        tmp_path,
        contexts=contexts,
        options=replace(OPTIONS, learn=config),
        report=told.append,
    )
    assert made.scores["asked"] > 0.8 and set(made.scores) == {"asked"}
    assert any("wrongly found" in line for line in told)
    assert made.gate is not None


def test_questions_whose_answers_no_text_holds_are_refused(
    reader: HuggingFacePassageModel, tmp_path: Path
) -> None:
    asked = [AskedQuestion("Is it so?", ["perhaps"])]
    contexts = [AskedContext(prose(n, 6), asked, str(n)) for n in range(20)]
    with pytest.raises(InvalidInput, match="verbatim"):
        adapt(reader, [], tmp_path, contexts=contexts, options=OPTIONS)
