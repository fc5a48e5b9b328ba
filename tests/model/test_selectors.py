"""Selectors: what they keep of tokens, what their scores are, how many blocks are read."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from memstore.errors import InvalidConfig, InvalidWeights
from memstore.hf.weights import SHIPPED
from memstore.model.passages.selectors.adaptation import Adaptation
from memstore.model.passages.selectors.captured_activations import Captured, Captures
from memstore.model.passages.selectors.learned_selector import Learned, Projection, rooted
from memstore.model.passages.selectors.pointer_heads import DISTANCE, PointerHeads
from memstore.model.passages.selectors.selector import (
    GATE_BLOCKS,
    Gate,
    covered,
    in_range,
    standardise,
)
from memstore.model.passages.selectors.selector_file import (
    MadeFor,
    load_selector,
    read_made_for,
    save_selector,
)
from memstore.model.passages.selectors.selector_sum import Sum, Words
from memstore.training.selectors.measure import Haystack
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


def rotate(layer: int, x: Tensor, positions: Tensor) -> Tensor:
    angle = positions[:, None].float() * torch.tensor([1.0, 0.3, 0.05]) * (layer + 1)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def pointers() -> PointerHeads:
    return PointerHeads([(1, 3), (1, 2), (2, 0)], (4, 2, 6), rotate)


def captured(tokens: int, seed: int = 1) -> Captured:
    draw = torch.Generator().manual_seed(seed)
    return Captured(
        torch.randint(0, VOCABULARY, (tokens,), generator=draw).tolist(),
        {2: 3 * torch.randn(tokens, HIDDEN, generator=draw)},
        {layer: torch.randn(4, tokens, 6, generator=draw) for layer in (1, 2)},
        {layer: torch.randn(2, tokens, 6, generator=draw) for layer in (1, 2)},
    )


def haystack(selector, documents: int = 3, blocks: int = 5) -> tuple[Haystack, list[Captured]]:
    held, shown = Haystack(selector.spec), []
    for number in range(documents):
        shown.append(captured(blocks * BLOCK, seed=10 + number))
        texts = [f"block {number} {i} apple{number}{i}" for i in range(blocks)]
        parts = [shown[-1].part(range(i, i + BLOCK)) for i in range(0, blocks * BLOCK, BLOCK)]
        kept = [one for part in parts if (one := selector.landmarks(part)) is not None]
        held.add([BLOCK] * blocks, torch.cat(kept) if kept else None, selector.words(texts))
    return held, shown


def test_learned_scores_are_late_interaction_of_projected_states() -> None:
    weights = projection()
    selector = Learned(2, weights)
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
    scores = selector.scores(question, "", held, held.scope)
    assert scores.shape == (15,)
    torch.testing.assert_close(scores, torch.cat(expected), atol=0.02, rtol=0)  # int8


def test_a_learned_score_is_what_the_rows_of_the_question_add() -> None:
    alike = projection()
    alike = replace(
        alike,
        question_mean=alike.document_mean,
        question_deviation=alike.document_deviation,
        attend=torch.zeros(HIDDEN),
        idf=torch.ones(VOCABULARY).half(),
    )
    selector = Learned(2, alike)
    held, documents = haystack(selector)
    states, scope = documents[1].states[2], [(1, 1, 2), (1, 4, 5), (1, 2, 3)]
    asked = Captured([1, 2, 3], {2: states[[1 * BLOCK + 1, 1 * BLOCK + 2, 4 * BLOCK + 3]]})
    adds = selector.adds(asked, held, scope)
    scores = selector.scores(asked, "", held, scope)
    torch.testing.assert_close(adds.sum(1), scores)  # a block's score is what its rows add
    both = covered(adds)
    torch.testing.assert_close(both[0], adds[0].sum())
    assert both[1] >= max(scores[:2]) - 1e-5
    torch.testing.assert_close(both[-1], adds.amax(0).sum())
    of_sum = Sum([(selector, 1.0), (Words(), 0.5)]).adds(asked, held, scope)
    assert of_sum is not None and torch.equal(of_sum, adds)
    assert Words().adds(asked, held, scope) is None


def test_learned_landmarks_do_not_depend_on_the_scale_of_states_or_where_tokens_stand() -> None:
    selector, shown = Learned(2, projection()), captured(9)
    whole = selector.landmarks(shown)
    assert whole.dtype == torch.int8 and whole.shape == (9, 1, WIDTH)
    scaled = replace(shown, states={2: shown.states[2] * 7})
    assert (selector.landmarks(scaled) - whole).abs().max() <= 1
    part = Captured(shown.ids[4:], {2: shown.states[2][4:]})
    assert_same_to_rounding(selector.landmarks(part), whole[4:])


def test_a_selector_has_another_digest_once_its_landmarks_are_others_and_only_then() -> None:
    weights = projection()
    same = replace(weights, attend=weights.attend + 1)
    other = replace(weights, document_mean=weights.document_mean + 1)
    assert Learned(2, weights).spec == Learned(2, same).spec
    assert Learned(2, weights).spec != Learned(2, other).spec
    assert Learned(2, weights).spec != Learned(1, weights).spec


def test_pointer_heads_sum_softmaxes_over_blocks_of_the_best_key_at_a_fixed_distance() -> None:
    selector = pointers()
    held, documents = haystack(selector)
    question = captured(5, seed=99)
    expected = torch.zeros(15)
    for layer, head, kv in ((1, 3, 1), (1, 2, 1), (2, 0, 0)):
        q = rotate(layer, question.q[layer][head], torch.full((5,), DISTANCE))
        best = []
        for document in documents:
            k = rotate(layer, document.k[layer][kv], torch.arange(5 * BLOCK) % BLOCK)
            best.append((q @ k.T / 6**0.5).view(5, -1, BLOCK).amax(-1))
        expected += torch.cat(best, 1).softmax(-1).mean(0) / 3
    scores = selector.scores(question, "", held, held.scope)
    torch.testing.assert_close(scores, expected, atol=5e-3, rtol=5e-3)  # float16 landmarks
    assert float(scores.sum()) == pytest.approx(1, rel=1e-4)


def test_pointer_landmarks_are_keys_rotated_from_the_passages_first_token_on() -> None:
    selector, shown = pointers(), captured(11)
    assert selector.spec.heads == 2 and selector.captures == Captures(heads=(1, 2))
    whole = selector.landmarks(shown)
    assert_same_to_rounding(selector.landmarks(shown.part(range(6))), whole[:6])
    k = rotate(1, shown.k[1][1], torch.arange(11)).half()
    assert_same_to_rounding(whole[:, 0], k)


def test_words_find_the_block_that_shares_a_rare_word() -> None:
    held, _ = haystack(Words())
    scores = Words().scores(captured(2), "Where is APPLE13?", held, held.scope)
    assert int(scores.argmax()) == 8
    assert float(scores.sum()) == pytest.approx(float(scores.max()))


def test_a_sum_adds_standardised_scores_and_keeps_what_its_parts_keep() -> None:
    learned = Learned(2, projection())
    both = Sum([(learned, 1.0), (Words(), 0.3)])
    assert both.spec.words and both.spec.heads == 1 and both.captures == learned.captures
    held, _ = haystack(both)
    question = captured(5, seed=99)
    parts = [
        selector.scores(question, "apple21", held, held.scope) for selector in (learned, Words())
    ]
    found = both.scores(question, "apple21", held, held.scope)
    expected = standardise(parts[0]) + 0.3 * standardise(parts[1])
    torch.testing.assert_close(found, parts[0].mean() + parts[0].std(correction=0) * expected)


def test_a_sum_where_no_word_is_shared_is_its_other_part() -> None:
    learned = Learned(2, projection())
    both = Sum([(learned, 1.0), (Words(), 0.3)])
    held, _ = haystack(both)
    question = captured(5, seed=99)
    found = both.scores(question, "nothing like it", held, held.scope)
    torch.testing.assert_close(found, learned.scores(question, "", held, held.scope))


def test_a_sum_of_two_kinds_of_token_landmarks_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="one selector of a sum"):
        Sum([(Learned(2, projection()), 1.0), (pointers(), 1.0)])


def test_a_range_leaves_out_blocks_far_below_the_best() -> None:
    scores = torch.zeros(100)
    scores[[7, 3, 50]] = torch.tensor([9.0, 8.5, 4.0])
    best, deviation = scores.topk(8), float(scores.std(correction=0))
    assert best.indices[in_range(best.values, scores, 0.6 / deviation)].tolist() == [7, 3]
    assert in_range(best.values, scores, 1e9).all() and in_range(best.values, scores, None).all()
    assert in_range(torch.zeros(0), torch.zeros(0), 1.0).tolist() == []


def test_a_gate_opens_for_one_block_or_for_what_the_best_cover_together() -> None:
    gate = Gate(0.6, 0.1, together=0.2)
    among = torch.zeros(2 * GATE_BLOCKS)  # where 0.7 is needed, and 0.9 together
    best = among.index_fill(0, torch.tensor([3]), 0.69)
    assert not gate.answers(best) and gate.answers(best + 0.02)
    assert not gate.answer_together(best, 0.89) and gate.answer_together(best, 0.91)
    assert not gate.answers(torch.zeros(0)) and not gate.answer_together(best, None)
    assert not Gate(0.6, 0.1).answer_together(best, 5.0)  # without a bound of its own it never does
    assert gate.answers(best, caution=0.9) and not gate.answers(best - 0.07, caution=0.9)
    assert gate.answer_together(best - 0.2, 0.84, caution=0.9)
    assert not gate.answer_together(best - 0.2, 0.82, caution=0.9)
    assert Gate(-0.5).threshold(GATE_BLOCKS, caution=0.5) == -0.5  # of scores below 0, all of it


def test_a_file_gives_back_the_selector_that_was_saved(tmp_path: Path) -> None:
    made = Adaptation(
        Sum([(Learned(2, projection()), 1.0), (Words(), 0.1)]),
        read_from=1,
        top_k=6,
        score_range=0.7,
        gate=Gate(-1.5, 0.25),
        separator="\n",
        context="heading",
        weights="abc",
        scores={"literal": 0.99},
    )
    path = tmp_path / "selector.safetensors"
    save_selector(made, MADE_FOR, path)
    loaded = load_selector(path, MADE_FOR, rotate)
    assert replace(loaded, selector=made.selector) == made
    assert loaded.selector.spec == made.selector.spec
    assert replace(loaded, selector=made.selector) == made
    held, _ = haystack(loaded.selector)
    question = captured(4, seed=5)
    assert_same_to_rounding(
        loaded.selector.scores(question, "apple10", held, held.scope),
        made.selector.scores(question, "apple10", held, held.scope),
    )


def test_pointer_heads_are_kept_in_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "selector.safetensors"
    save_selector(Adaptation(Sum([(pointers(), 1.0), (Words(), 0.5)])), MADE_FOR, path)
    loaded = load_selector(path, MADE_FOR, rotate).selector
    assert loaded.spec == Sum([(pointers(), 1.0), (Words(), 0.5)]).spec


def test_a_selector_of_another_model_or_a_damaged_one_is_refused_in_one_line(
    tmp_path: Path,
) -> None:
    path = tmp_path / "selector.safetensors"
    save_selector(Adaptation(Learned(2, projection())), MADE_FOR, path)
    with pytest.raises(InvalidWeights, match="made for another model \\(hidden_size 24, here 32"):
        load_selector(path, replace(MADE_FOR, hidden_size=32), rotate)
    with pytest.raises(InvalidWeights, match="memstore adapt"):
        load_selector(path, replace(MADE_FOR, num_layers=9), rotate)
    save_selector(Adaptation(Learned(2, projection()), weights="a"), MADE_FOR, path)
    load_selector(path, MADE_FOR, rotate)
    with pytest.raises(InvalidWeights, match="another model"):
        load_selector(path, replace(MADE_FOR, weights="b"), rotate)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    broken = dict(tensors, projection=tensors["projection"] * float("nan"))
    save_file(broken, path, metadata)
    with pytest.raises(InvalidWeights, match="damaged"):
        load_selector(path, MADE_FOR, rotate)
    save_file(tensors, path, {"memstore.selector": "{}"})
    with pytest.raises(InvalidWeights, match="no selector of this version"):
        load_selector(path, MADE_FOR, rotate)
    path.write_bytes(b"nothing")
    with pytest.raises(InvalidWeights):
        load_selector(path, MADE_FOR, rotate)
    with pytest.raises(InvalidWeights):
        load_selector(tmp_path / "absent", MADE_FOR, rotate)


def test_every_shipped_selector_loads_and_is_small() -> None:

    files = sorted(SHIPPED.glob("*.safetensors"))
    assert files
    for path in files:
        made_for = read_made_for(path)
        loaded = load_selector(path, made_for, rotate)
        assert path.stat().st_size < 1_000_000
        assert len(made_for.weights) == 32 and loaded.gate is not None
        assert loaded.scores["reworded"] > 0.9
