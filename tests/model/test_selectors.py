"""Selectors: landmarks of tokens, scores, scores on a shortlist, gates, files."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from memstore.errors import InvalidWeights
from memstore.hf.weights import SHIPPED
from memstore.index.word_index import split_words
from memstore.model.passages.adaptation import (
    Adaptation,
    Doubt,
    MadeFor,
    load_selector,
    read_made_for,
    save_selector,
)
from memstore.model.passages.selector import (
    GATE_BLOCKS,
    Candidates,
    Captured,
    Gate,
    Learned,
    Projection,
    Query,
    Scored,
    Selector,
    covered,
    rooted,
    score_blocks,
)
from memstore.store.retrieve import first_stage
from memstore.training.selectors.make_selector import Haystack
from support.many_passages import SPEC, add, create, everything, question
from support.rounding import assert_same_to_rounding

HIDDEN, WIDTH, VOCABULARY, BLOCK = 24, 8, 50, 4
MADE_FOR = MadeFor(HIDDEN, 3, 4, 2, 6, VOCABULARY)


def projection(seed: int = 0) -> Projection:
    draw = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    return Projection(
        random(HIDDEN, WIDTH),
        random(HIDDEN) / 10,
        random(HIDDEN).abs() + 0.5,
        random(HIDDEN) / 10,
        random(HIDDEN).abs() + 0.5,
        random(HIDDEN) / 10,
        random(VOCABULARY).abs().half(),
    )


def captured(tokens: int, seed: int = 1) -> Captured:
    draw = torch.Generator().manual_seed(seed)
    return Captured(
        torch.randint(0, VOCABULARY, (tokens,), generator=draw).tolist(),
        {2: 3 * torch.randn(tokens, HIDDEN, generator=draw)},
    )


def haystack(selector, documents: int = 3, blocks: int = 5) -> tuple[Haystack, list[Captured]]:
    places = [(number, i) for number in range(documents) for i in range(blocks)]
    texts = iter([f"block {number} {i} apple{number}{i}" for number, i in places])
    tokenizer: Any = SimpleNamespace(decode=lambda ids: next(texts))
    held, shown = Haystack(selector, tokenizer), []
    for number in range(documents):
        shown.append(captured(blocks * BLOCK, seed=10 + number))
        starts = range(0, blocks * BLOCK, BLOCK)
        held.add_passages([shown[-1].part(range(i, i + BLOCK)) for i in starts])
    return held, shown


def test_learned_scores_are_late_interaction_of_projected_states() -> None:
    weights = projection()
    selector = Selector(Learned(2, weights))
    held, documents = haystack(selector)
    question = captured(5, seed=99)

    def units(states: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
        z = ((rooted(states) - mean) / deviation) @ weights.projection
        return z / z.norm(dim=-1, keepdim=True)

    q = units(question.states[2], weights.question_mean, weights.question_deviation)
    x = (rooted(question.states[2]) - weights.question_mean) / weights.question_deviation
    share = (x @ weights.attend).exp() * weights.idf[question.ids].float().clamp_min(0.05)
    expected = []
    for document in documents:
        d = units(document.states[2], weights.document_mean, weights.document_deviation)
        best = (q @ d.T).view(len(q), -1, BLOCK).amax(-1)
        expected.append((share / share.sum()) @ best)
    scores = selector.scores(Query(question, ""), held, held.scope)
    assert scores.shape == (15,)
    torch.testing.assert_close(scores, torch.cat(expected), atol=0.02, rtol=0)  # int8


def test_a_learned_score_is_the_sum_over_the_rows_of_the_question() -> None:
    alike = projection()
    alike = replace(
        alike,
        question_mean=alike.document_mean,
        question_deviation=alike.document_deviation,
        attend=torch.zeros(HIDDEN),
        idf=torch.ones(VOCABULARY).half(),
    )
    selector = Selector(Learned(2, alike))
    held, documents = haystack(selector)
    states, scope = documents[1].states[2], [(1, 1, 2), (1, 4, 5), (1, 2, 3)]
    shown = Captured([1, 2, 3], {2: states[[1 * BLOCK + 1, 1 * BLOCK + 2, 4 * BLOCK + 3]]})
    asked = Query(shown, "")
    adds = selector.adds(asked, held, scope)
    scores = selector.scores(asked, held, scope)
    torch.testing.assert_close(adds.sum(1), scores)  # a block's score is what its rows add
    both = covered(adds)
    torch.testing.assert_close(both[0], adds[0].sum())
    assert both[1] >= max(scores[:2]) - 1e-5
    torch.testing.assert_close(both[-1], adds.amax(0).sum())
    with_words = Selector(selector.learned, 0.5).adds(asked, held, scope)
    assert with_words is not None and torch.equal(with_words, adds)
    assert Selector().adds(asked, held, scope) is None


def test_learned_landmarks_do_not_depend_on_scale_or_position() -> None:
    selector, shown = Learned(2, projection()), captured(9)
    whole = selector.landmarks(shown)
    assert whole.dtype == torch.int8 and whole.shape == (9, WIDTH)
    scaled = replace(shown, states={2: shown.states[2] * 7})
    assert (selector.landmarks(scaled) - whole).abs().max() <= 1
    part = Captured(shown.ids[4:], {2: shown.states[2][4:]})
    assert_same_to_rounding(selector.landmarks(part), whole[4:])


def test_the_digest_of_a_selector_changes_only_with_its_landmarks() -> None:
    weights = projection()
    same = replace(weights, attend=weights.attend + 1)
    other = replace(weights, document_mean=weights.document_mean + 1)
    assert Learned(2, weights).digest == Learned(2, same).digest
    assert Learned(2, weights).digest != Learned(2, other).digest
    assert Learned(2, weights).digest != Learned(1, weights).digest


def test_words_find_the_block_that_shares_a_rare_word() -> None:
    held, _ = haystack(Selector())
    scores = Selector().scores(Query(captured(2), "Where is APPLE13?"), held, held.scope)
    assert int(scores.argmax()) == 8
    assert scores.nonzero().flatten().tolist() == [5, 6, 7, 8, 9]  # of one text
    assert float(scores.max()) > 1.5 * float(scores[[5, 6, 7, 9]].max())


def test_the_squared_share_of_words_is_added_to_the_learned_score_and_both_are_kept() -> None:
    learned = Learned(2, projection())
    both = Selector(learned, 0.3)
    assert both.spec.words and both.spec.width and both.layer == 2
    held, _ = haystack(both)
    question = Query(captured(5, seed=99), "apple21")
    parts = [
        selector.scores(question, held, held.scope) for selector in (Selector(learned), Selector())
    ]
    found = both.scores(question, held, held.scope)
    torch.testing.assert_close(found, parts[0] + 0.3 * parts[1] ** 2)
    found = both.scores(replace(question, text="nothing like it"), held, held.scope)
    torch.testing.assert_close(found, parts[0])  # where no word is shared


def test_the_words_of_the_question_before_count_a_quarter_its_tokens_a_fifth() -> None:
    both = Selector(Learned(2, projection()), 0.3)
    held, _ = haystack(both)
    before = Query(captured(3, seed=7), "apple13 shared")
    now = Query(captured(5, seed=99), "apple21 shared")
    leaning = replace(now, before=before)
    weight = {
        word: leaning.words[split_words(word)[0]] for word in ("apple13", "apple21", "shared")
    }
    assert weight == {"apple13": 0.75, "apple21": 3.0, "shared": 1.0}
    learned = Selector(both.learned)
    apart = [learned.scores(query, held, held.scope) for query in (now, before)]
    together = learned.scores(leaning, held, held.scope)
    torch.testing.assert_close(together, (apart[0] + 0.2 * apart[1]) / 1.2)
    assert int(Selector().scores(leaning, held, held.scope).argmax()) != int(
        Selector().scores(before, held, held.scope).argmax()
    )
    adds = both.adds(leaning, held, held.scope)
    assert adds is not None and adds.shape[1] == 5 + 3
    torch.testing.assert_close(adds.sum(1), together)


def test_a_gate_opens_for_one_block_or_for_what_the_best_cover_together() -> None:
    gate = Gate((0.5, 0.55, 0.6, 0.65, 0.7), 0.1, together=0.2)
    best, many = torch.tensor([0.0, 0.69]), 2 * GATE_BLOCKS  # 0.7 is needed, and 0.9 together
    assert not gate.answers(best, many) and gate.answers(best + 0.02, many)
    assert not gate.answer_together(0.89, many) and gate.answer_together(0.91, many)
    assert not gate.answers(torch.zeros(0), 0) and not gate.answer_together(None, many)
    never = Gate((0.6,) * 5, 0.1)  # without a bound of its own it never does
    assert not never.answer_together(5.0, many)
    assert gate.answers(best, many, 0.05) and not gate.answers(best, many, 0.2)
    assert gate.answer_together(0.81, many, 0.02) and not gate.answer_together(0.79, many, 0.02)
    assert gate.threshold(GATE_BLOCKS, 0.15) == pytest.approx(0.625)  # half way between two steps
    assert gate.threshold(GATE_BLOCKS, 0.01) == 0.5 and gate.answers(best - 9, many, 0.0)


def test_a_file_gives_back_the_selector_that_was_saved(tmp_path: Path) -> None:
    made = Adaptation(
        Selector(Learned(2, projection()), 0.1),
        read_from=1,
        top_k=6,
        score_range=0.7,
        gate=Gate((-1.5, -1.0, 0.0, 0.5, 1.0), 0.25),
        separator="\n",
        doubt=Doubt((0.5, -1.0, -0.25, 0.125), 0.75, (0.9, 0.7, 0.5, 0.3, 0.25), "def"),
        weights="abc",
        scores={"literal": 0.99},
    )
    path = tmp_path / "selector.safetensors"
    save_selector(made, MADE_FOR, path)
    loaded = load_selector(path, MADE_FOR)
    path.write_bytes(bytes(path.stat().st_size))  # what is written over the file changes nothing
    assert replace(loaded, selector=made.selector) == made
    assert loaded.selector.spec == made.selector.spec
    held, _ = haystack(loaded.selector)
    question = Query(captured(4, seed=5), "apple10")
    assert_same_to_rounding(
        loaded.selector.scores(question, held, held.scope),
        made.selector.scores(question, held, held.scope),
    )


def test_a_damaged_selector_or_one_of_another_model_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "selector.safetensors"
    save_selector(Adaptation(Selector(Learned(2, projection()))), MADE_FOR, path)
    with pytest.raises(InvalidWeights, match="made for another model \\(hidden_size 24, here 32"):
        load_selector(path, replace(MADE_FOR, hidden_size=32))
    with pytest.raises(InvalidWeights, match="memstore adapt"):
        load_selector(path, replace(MADE_FOR, num_layers=9))
    save_selector(Adaptation(Selector(Learned(2, projection())), weights="a"), MADE_FOR, path)
    load_selector(path, MADE_FOR)
    with pytest.raises(InvalidWeights, match="another model"):
        load_selector(path, replace(MADE_FOR, weights="b"))
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    broken = dict(tensors, projection=tensors["projection"] * float("nan"))
    save_file(broken, path, metadata)
    with pytest.raises(InvalidWeights, match="damaged"):
        load_selector(path, MADE_FOR)
    save_selector(Adaptation(Selector(Learned(2, projection()), 0.6)), MADE_FOR, path)
    with pytest.raises(InvalidWeights, match=r"<= 0\.5"):  # a large memory is not searched so
        load_selector(path, MADE_FOR)
    save_file(tensors, path, {"memstore.selector": "{}"})
    with pytest.raises(InvalidWeights, match="not a selector of this version"):
        load_selector(path, MADE_FOR)
    path.write_bytes(b"nothing")
    with pytest.raises(InvalidWeights):
        load_selector(path, MADE_FOR)
    with pytest.raises(InvalidWeights):
        load_selector(tmp_path / "absent", MADE_FOR)


def test_every_shipped_selector_loads_and_is_small() -> None:
    files = sorted(SHIPPED.glob("*.safetensors"))
    assert files
    for path in files:
        made_for = read_made_for(path)
        loaded = load_selector(path, made_for)
        assert path.stat().st_size < 1_000_000
        assert len(made_for.weights) == 32 and loaded.gate is not None
        assert loaded.scores["reworded"] > 0.9


# Large scopes, by a shortlist

NOTHING = Query(Captured([], {}), "")


class Given(Learned):
    """A learned part, of a question whose rows are given."""

    layer, width, digest = 0, SPEC.width, SPEC.digest

    def __init__(self, rows: Tensor, weights: Tensor) -> None:
        self._given = rows, weights

    def rows(self, captured: Captured) -> tuple[Tensor, Tensor]:
        return self._given


def test_a_shortlist_gives_the_same_choice_as_the_exact_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("faiss")
    monkeypatch.setattr(first_stage, "PAYING", 1)
    monkeypatch.setattr(first_stage, "PROPOSED", (100, 100))
    with create(tmp_path / "m") as store:
        for text in (1, 2, 3):
            add(store, str(text), text, 300)
        store.build_index()
        scope = everything(store)
        for seed in range(12):
            late = Given(*question(1 + seed % 3, 50 + seed, seed))
            for selector in (Selector(late), Selector(late, 0.05)):
                # a word that is in one block of fifty, as the store's texts have it
                weighed = "memstore.index.word_index.weigh_words"
                monkeypatch.setattr(weighed, lambda text: {1004: 1.0, 7: 1.0})
                found = score_blocks(selector, NOTHING, store, scope)
                assert len(found.scores) <= 100 < found.blocks == 900
                exact = selector.scores(NOTHING, store.retrieval.selected, scope)
                given = 4, lambda runs: None, lambda *place: place
                deviation = float(exact.std(correction=0))
                whole = Scored(exact, scope, store.retrieval, deviation, len(exact))
                best = Candidates(whole, *given).best(4)
                short = Candidates(found, *given)
                chosen = short.best(4)
                assert [(one.document, one.block) for one in chosen] == [
                    (one.document, one.block) for one in best
                ]
                scores = [one.score for one in best]
                assert [one.score for one in chosen] == pytest.approx(scores, abs=0.1 * deviation)
                assert found.deviation == pytest.approx(deviation, rel=0.15)
                # the bound grows with the blocks that there are, not with those that are scored
                gate = Gate((float(exact.max()) - 0.01 - 0.1,) * 5, growth=0.2)
                assert short.blocks == 900
                told = gate.answers(found.scores, found.blocks)
                assert told == gate.answers(exact, len(exact))
                added = selector.adds(NOTHING, found.store, found.scope[:2])
                torch.testing.assert_close(
                    added, selector.adds(NOTHING, store.retrieval.selected, found.scope[:2])
                )
