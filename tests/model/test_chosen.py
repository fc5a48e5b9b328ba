"""Which of the best passages a question reads, and what opens the gate."""

from typing import Any

import pytest
import torch
from torch import Tensor

from memstore.model.lookup_settings import LookupSettings
from memstore.model.passages.selector import Candidates, Gate, Scored

SCOPE = [(7, 0, 6), (9, 2, 4)]  # candidates 0..5 and 6, 7
SCORES = torch.tensor([0.1, 0.5, 0.1, 0.4, 0.1, 0.1, 0.38, 0.36])
BEST = [(7, 1), (7, 3), (9, 2), (9, 3)]


def scored(scores: Tensor) -> Scored:
    store: Any = None
    return Scored(scores, SCOPE, store, float(scores.std(correction=0)), len(scores))


def candidates(adds: list[list[float]] | None, scores: Tensor = SCORES) -> Candidates:
    """The best four; adds: of these, best first."""
    asked: list[Any] = []

    def adding(scope: Any) -> Tensor | None:
        asked.extend(scope)
        return None if adds is None else torch.tensor(adds)

    found = Candidates(scored(scores), 4, adding, lambda *place: place)
    found.together  # noqa: B018 - looked up once, when it is first needed
    assert asked == [(document, block, block + 1) for document, block in BEST]
    return found


def places(chosen: Any) -> list[tuple[int, int]]:
    return [(one.document, one.block) for one in chosen]


def test_a_passage_is_read_for_a_part_of_the_question_that_better_ones_lack() -> None:
    settings = LookupSettings(score_range=0.1)
    adds = [[0.3, 0.2, 0.0], [0.25, 0.15, 0.0], [0.1, 0.1, 0.18], [0.1, 0.1, 0.16]]
    assert places(candidates(adds).meant(settings, parts=True)) == [(7, 1), (9, 2)]
    adds[2][2], adds[3][2] = 0.03, 0.16  # too little of its own; then enough
    assert places(candidates(adds).meant(settings, parts=True)) == [(7, 1), (9, 3)]
    assert places(candidates(adds).meant(settings, parts=False)) == [(7, 1)]


def test_passages_that_score_nearly_as_high_are_read_in_the_order_of_the_text() -> None:
    found = candidates([[0.3, 0.2]] * 4)
    assert places(found.meant(LookupSettings(score_range=1.0), parts=True)) == BEST
    assert places(candidates(None).meant(LookupSettings(score_range=None), parts=True)) == BEST
    assert places(candidates(None).meant(LookupSettings(score_range=0.0), parts=True)) == [(7, 1)]


def test_attention_to_a_passage_falls_with_its_score() -> None:
    settings = LookupSettings(score_bias=2.0)
    meant = candidates(None).meant(settings, parts=True)
    below = (torch.tensor([0.0, 0.1, 0.12, 0.14]) / SCORES.std(correction=0) - 0.5).clamp(min=0)
    assert below[0] == 0 < below[1]
    torch.testing.assert_close(torch.tensor([one.bias for one in meant]), -2 * below)
    # but not one that is read for a part of the question
    adds = [[0.3, 0.2, 0.0], [0.25, 0.15, 0.0], [0.1, 0.1, 0.18], [0.1, 0.1, 0.16]]
    settings = LookupSettings(score_range=0.1, score_bias=2.0)
    assert [one.bias for one in candidates(adds).meant(settings, parts=True)] == [0, 0]


COPIES = torch.tensor([0.5, 0.1, 0.5, 0.2, 0.5, 0.5, 0.4, 0.3])
TEXTS = {(7, 0): "same", (7, 2): "same", (9, 2): "another"}


def chosen(scores: Tensor) -> list[Any]:
    """Those meant of passages (7, 0) and (7, 2), one text, and others."""
    content = lambda *at: TEXTS.get(at, at)  # noqa: E731
    found = Candidates(scored(scores), 4, lambda asked: None, content)
    return found.meant(LookupSettings(score_range=None), parts=False)


@pytest.mark.parametrize("steps", [0, 1, -1, 1000, -1000])
def test_copies_are_one_candidate_also_if_their_scores_differ_in_the_last_bits(steps: int) -> None:
    scores = COPIES.clone()
    scores[2] *= 1 + steps * torch.finfo(torch.float32).eps
    assert (scores[2] == scores[0]) == (steps == 0)
    meant = chosen(scores)
    assert places(meant) == [(7, 2), (7, 4), (7, 5), (9, 2)]
    assert [one.same for one in meant] == [((7, 0),), (), (), ()]


def test_a_copy_that_ranks_after_another_passage_is_not_a_second_candidate() -> None:
    scores = torch.tensor([0.5, 0.1, 0.4999, 0.2, 0.49995, 0.1, 0.4, 0.3])  # (7, 4) between copies
    meant = chosen(scores)
    assert places(meant) == [(7, 2), (7, 4), (9, 2), (9, 3)]
    assert meant[0].same == ((7, 0),) and meant[0].score == 0.5


def test_a_question_that_refers_to_one_before_prefers_the_document_that_answered_that() -> None:
    before = scored(torch.tensor([0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.9, 0.2])).best
    assert before == (9, 2)
    found = scored(COPIES).after(before, refers=True)
    more = torch.tensor([-2.0] * 6 + [0.0, 0.5]) * COPIES.std(correction=0)
    torch.testing.assert_close(found.scores, COPIES + more)  # the best one keeps its own
    same = scored(COPIES).after(before, refers=False)
    torch.testing.assert_close(same.scores[6:], COPIES[6:])  # in their order
    assert scored(COPIES * 9).after((8, 0), refers=True).best == (7, 0)
    # a text that another document holds, too, is read once
    held = {(7, 0): "same", (7, 2): "same", (9, 2): "same"}
    best = Candidates(found, 4, lambda asked: None, lambda *at: held.get(at, at)).distinct(3)
    assert places(best) == [(9, 2), (9, 3), (7, 4)]
    assert best[0].same == ((7, 0), (7, 2))


def test_four_passages_that_each_add_a_part_open_the_gate_together() -> None:
    gate = Gate((0.6,) * 5, together=0.1)
    parts = [[0.3, 0, 0, 0], [0, 0.2, 0, 0], [0, 0, 0.2, 0], [0, 0, 0, 0.1]]
    together = candidates(parts).together
    assert together is not None and abs(together - 0.8) < 1e-6
    assert gate.answer_together(together, 8) and not gate.answers(SCORES, 8)
    parts[3] = [0.3, 0, 0, 0.01]
    assert candidates(parts).together is None  # one of them says nothing of its own
    assert candidates(None).together is None and not gate.answer_together(None, 8)
