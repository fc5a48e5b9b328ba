"""Training a reading adapter: examples, packs that compute what sessions compute, and resuming."""

import json
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import msgspec
import pytest
import torch

from memstore.errors import InvalidInput
from support.paths import ROOT
from support.tiny_decoder import decoder, random_adapter, tokenizer

pytest.importorskip("transformers")

from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.hf.reading_adapter import UNKNOWN, ReadingAdapter
from memstore.model.passages.adaptation import UNADAPTED
from memstore.model.passages.passage_encoding import encode
from memstore.model.passages.repositioned_attention import RepositionedAttention
from memstore.training.doubt import _ask, _fit, fit_doubt
from memstore.training.reading import Pack, Reading, ReadingOptions, Steps, adapt_reading
from memstore.training.reading_examples import Composed, Examples
from memstore.training.reading_questions import (
    AskedContext,
    AskedQuestion,
    questions_of,
    read_questions,
)

THINGS = ("lantern", "barrel", "anchor", "ladder", "kettle", "saddle")
CONTEXTS = [
    AskedContext(
        context=f"The {thing} of the mill weighs {40 + at} pounds. It was bought in the year "
        f"{1800 + at} from a trader. Nobody remembers why the {thing} stands by the door. "
        f"The owner of the {thing} is called {thing.title()} Smith, who lives by the river.",
        title=thing,
        questions=[
            AskedQuestion(f"How much does the {thing} of the mill weigh?", [f"{40 + at} pounds"]),
            AskedQuestion(f"Who painted the {thing}?"),
        ],
    )
    for at, thing in enumerate(THINGS)
]


def model_of(kind="llama", adapter=None, **changed) -> HuggingFacePassageModel:
    form = {"generating": "full", "kv_dtype": torch.float32}
    model = decoder(kind, **changed)
    return HuggingFacePassageModel(model, tokenizer(), UNADAPTED, adapter=adapter, **form)


def composed(examples, one, most, seed, unanswerable=0.0):
    return examples.compose(one, examples.texts, most, Random(seed), unanswerable)


def test_examples_hold_the_answering_passage_and_hard_negatives():
    reader = model_of()
    examples = Examples(CONTEXTS, reader)
    decode = reader.tokenizer.decode
    weighs, painted = examples.texts[0].examples
    for seed in range(20):
        one = composed(examples, weighs, 4, seed)
        texts = [decode(ids) for ids in one.passages]
        assert len(texts) <= 4 and any("weighs 40 pounds" in text for text in texts)
        assert one.answer == "40 pounds"
        left_out = composed(examples, weighs, 4, seed, unanswerable=1.0)
        texts = [decode(ids) for ids in left_out.passages]
        assert texts and left_out.answer == UNKNOWN
        assert not any("40 pounds" in text for text in texts)
        about = [decode(ids) for ids in composed(examples, painted, 4, seed).passages]
        assert any("lantern" in text for text in about)


def test_a_pool_shares_passages_and_stays_within_its_tokens():
    examples = Examples(CONTEXTS, model_of())
    for pool in islice(examples.pools(Random(2), 300, 8, 0.1), 20):
        passages = {id(one): one for some in pool for one in some.passages}
        assert 0 < sum(map(len, passages.values())) <= 300
        assert {one.question for one in pool} <= {
            asked.question for context in CONTEXTS for asked in context.questions
        }


@pytest.mark.parametrize(("kind", "of"), [("llama", "both"), ("gemma2", "writer")])
def test_a_pack_computes_what_a_session_computes(kind, of):
    reader = model_of(kind)
    adapter = random_adapter(reader.model, of)
    reading = Reading(reader, adapter)
    asked = HuggingFacePassageModel(
        reader.model, tokenizer(), UNADAPTED, adapter=adapter, kv_dtype=torch.float32
    )
    examples = Examples(CONTEXTS, reader)
    some = [
        composed(examples, one, 3, 4) for one in (examples.texts[n].examples[0] for n in range(3))
    ]
    pack = Pack(reader, some, as_text=False)
    with torch.no_grad():
        found = reading.logits(pack).split(pack.counts)
    for one, logits in zip(some, found):
        kept = list(encode(asked, one.passages))
        adapt = asked.adapted_turns
        context = RepositionedAttention(asked, asked.prefix(adapt), adapt=adapt)
        for layer in range(asked.shape.num_layers):
            k, v = (torch.cat([each[half][:, layer] for each in kept]) for half in (0, 1))
            context.remember([layer], k.transpose(0, 1)[None], v.transpose(0, 1)[None])
        turn, _ = asked.turn_ids(one.question, first=True)
        answer = asked.tokenizer.encode(one.answer)
        said = torch.tensor([[*asked.separator_ids, *turn, *answer]])
        with torch.no_grad():
            states = asked.hidden(said, context.attend, adapt=adapt)[0, -len(answer) - 1 :]
            expected = asked.logits(states)
        atol = 2e-4 * float(expected.abs().max())
        torch.testing.assert_close(logits, expected, rtol=0, atol=atol)


def test_a_pack_of_text_is_the_stock_models_prompt():
    reader = model_of()
    reading = Reading(reader, random_adapter(reader.model))
    (ids,) = [[*range(30, 50)]]
    one = Composed([ids, ids[:5]], "How many?", "Seven.")
    pack = Pack(reader, [one], as_text=True)
    with torch.no_grad():
        found = reading.logits(pack, stock=True)
        turn, _ = reader.turn_ids(one.question, first=True)
        answer = reader.tokenizer.encode(one.answer)
        prompt = [*reader.prefix_ids, *ids, *ids[:5], *reader.separator_ids, *turn, *answer]
        expected = reader.model(torch.tensor([prompt])).logits[0, -len(answer) - 1 :]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("of", ["both", "writer"])
def test_training_an_adapter_learns_and_resumes_after_an_interrupt(of, tmp_path, monkeypatch):
    monkeypatch.setattr("memstore.training.reading._CHECKED", 2)
    monkeypatch.setattr("memstore.training.reading._EVERY", 0)  # a checkpoint after every step
    options = ReadingOptions(tokens=8_000, pool_tokens=300, pools=1, most_passages=2)
    options = replace(options, learning_rate=0.02 if of == "both" else 0.001)
    fresh = model_of(num_hidden_layers=3)

    def run(name, report=lambda line: None, adapter=None, **others):
        model = model_of(num_hidden_layers=3, adapter=adapter)
        changed = replace(options, **others)
        return adapt_reading(model, CONTEXTS, of, tmp_path / name, changed, report)

    def untrained(rank):
        return ReadingAdapter.untrained(fresh.model, rank, kind=of)

    drawn = Steps(fresh, of, Examples(CONTEXTS, fresh), replace(options, pools=16, joined=4))
    passes = drawn[0]
    assert len(passes) == 4
    readings = (Reading(fresh, one) for one in (run("whole"), untrained(16)))
    with torch.no_grad():
        after, before = (sum(float(one.loss(*packs)) for packs in passes) for one in readings)
    assert after < 0.9 * before

    def interrupt(line):
        if "right" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("parts", interrupt)
    checkpoint = tmp_path / "parts" / f"{of}.pt"
    assert torch.load(checkpoint)["step"] == 1
    said: list[str] = []
    again, ended = run("parts", said.append, tokens=1_000, workers=2), torch.load(checkpoint)
    assert said[1].startswith("resuming at step 1: ") and str(checkpoint) in said[1]
    assert ended["step"] > 1 and again.tokens == ended["seen"] >= 1_000
    assert again.digest == run("uninterrupted", tokens=1_000).digest
    again.save(tmp_path / "adapter")  # a run that ended here goes on with its selector
    stored = ReadingAdapter.load(tmp_path / "adapter", fresh.model)
    assert run("parts", adapter=stored, tokens=1_000).digest == again.digest
    assert torch.load(checkpoint)["step"] == ended["step"]
    with pytest.raises(InvalidInput, match="another adapter"):
        run("parts", adapter=untrained(8))
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    with pytest.raises(InvalidInput, match="damaged"):
        run("parts")


def test_texts_ask_about_a_word_of_one_of_their_sentences():
    texts = [" ".join(one.context for one in CONTEXTS)] * 2
    found = questions_of(texts, 100, 0)
    assert len({one.title for one in found}) == 2
    for one in found:
        for asked in one.questions:
            (answer,) = asked.answers
            word = asked.question.removeprefix("What does it say about ").rstrip("?")
            assert answer in one.context and word in answer
            assert word not in one.context.replace(answer, "")
    assert found == questions_of(texts, 100, 0) != questions_of(texts, 100, 1)
    assert questions_of(texts, 1, 0)[0] in found


def test_a_word_with_an_accent_gets_its_true_rarity():
    text = "Le café de la place est fermé en août. Un café du port reste ouvert toute la nuit."
    (found,) = questions_of([text], 1, 0)
    assert len(found.questions) == 2
    assert not any("café" in asked.question for asked in found.questions)


def test_texts_longer_than_a_pass_are_refused_and_a_short_one_is_drawn():
    long = msgspec.structs.replace(CONTEXTS[0], context=CONTEXTS[0].context * 9)
    with pytest.raises(InvalidInput, match="more than 300 tokens"):
        next(Examples([long], model_of()).pools(Random(0), 300, 8, 0.1))
    some = Examples([long, CONTEXTS[1]], model_of())
    for pool in islice(some.pools(Random(0), 300, 8, 0.1), 3):
        assert {one.question for one in pool} == {one.question for one in CONTEXTS[1].questions}
    # of a text of one passage, nothing is left of a question whose answer is left out
    asked = [AskedQuestion("How much does it weigh?", ["40 pounds"])]
    alone = Examples([AskedContext("It weighs 40 pounds.", asked)], model_of())
    assert all(islice(alone.pools(Random(0), 300, 8, 0.5), 20))


def test_wrong_files_of_questions_are_refused_with_the_line(tmp_path):
    path, good = tmp_path / "asked.jsonl", b'{"context": "A.", "questions": [{"question": "B?"}]}\n'
    asked = b'{"context": "A.", "questions": [{"question": "B?", "%s": %s}]}'
    for wrong, why in (
        (b'{"context": 3}', "asked.jsonl line 2: Expected `str`, got `int`"),
        (b'{"context": "A', "line 2: .*truncated"),
        (b'{"context": "A."}', "line 2: .*missing required field `questions`"),
        (asked % (b"answer", b'"C"'), "line 2: .*unknown field `answer`"),
        (asked % (b"answers", b'[""]'), "line 2: .*length >= 1"),
        (b"\xff", "no UTF-8 text"),
    ):
        path.write_bytes(good + wrong)
        with pytest.raises(InvalidInput, match=why):
            read_questions(path)
    (tmp_path / "asked.jsonl.zst").write_bytes(b"not compressed")
    with pytest.raises(InvalidInput, match="no zstandard-compressed"):
        read_questions(tmp_path / "asked.jsonl.zst")
    path.write_text('{"context": "A.", "questions": []}\n')
    with pytest.raises(InvalidInput, match="holds no questions"):
        read_questions(path)


def test_the_program_of_the_page_makes_questions_of_squad(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = {"question": "What turns?", "id": "1", "answers": [{"text": "A mill"}]}
    others = {"question": "Who?", "answers": [], "is_impossible": True}
    texts = [{"context": "A mill turns.", "qas": [asked, others]}] * 2
    page = (ROOT / "docs/models.md").read_text()
    shown, program = re.findall(r"```(?:json|python)\n(.*?)```", page, re.DOTALL)
    Path("train-v2.0.json").write_text(
        json.dumps({"data": [{"title": "Mills", "paragraphs": texts}]})
    )
    exec(program, {})
    questions = [AskedQuestion("What turns?", ["A mill"]), AskedQuestion("Who?")]
    expected = AskedContext("A mill turns.", questions, "Mills")
    assert read_questions(Path("questions.jsonl")) == [expected, expected]
    Path("questions.jsonl").write_text(shown)
    assert len(read_questions(Path("questions.jsonl"))) == 1


def test_a_doubt_is_fitted_to_questions_with_and_without_an_answer():
    plain = decoder("llama", num_hidden_layers=2)
    adapter = replace(random_adapter(plain), refuse_above=0.5)
    reader = model_of(num_hidden_layers=2, adapter=adapter)
    contexts = [
        msgspec.structs.replace(one, title=f"{one.title} {n}", source=source)
        for n in range(3)
        for source in ("mill", "barn")
        for one in CONTEXTS
    ]
    found, shares = fit_doubt(reader, contexts, questions=48)
    assert found.adapter == adapter.digest
    assert [*found.above] == sorted(found.above, reverse=True)
    assert [*shares.values()] == sorted(shares.values())
    numbers, lacking, unanswered = map(torch.tensor, zip(*_ask(reader, contexts, 24, Random(0))))
    assert numbers.shape == (12, 4) and 0 < unanswered.sum() < 9
    # the passages may miss an answer that the memory holds
    assert unanswered.sum() <= lacking.sum() < 12 and (lacking >= unanswered).all()
    assert fit_doubt(reader, contexts[:2]) is None
    with pytest.raises(InvalidInput, match="no reading adapter that refuses"):
        fit_doubt(model_of(), contexts)


def test_a_logistic_regression_separates_two_classes():
    rng = torch.Generator().manual_seed(0)
    numbers = torch.randn(400, 4, generator=rng) * torch.tensor([3.0, 0.01, 1.0, 5.0]) + 7
    truth = torch.tensor([0.7, 100.0, 0.0, -0.1])
    odds = (numbers - 7) @ truth
    wanted = torch.bernoulli(odds.sigmoid(), generator=rng)
    weights, bias = _fit(numbers, wanted)
    told = numbers @ weights + bias
    assert torch.corrcoef(torch.stack([told, odds]))[0, 1] > 0.97
    assert abs(told.sigmoid().mean() - wanted.mean()) < 0.01
