"""Which blocks a question reads of those that score best, and what opens the gate."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memstore.model.chosen import Candidates
from memstore.model.selectors import Matches
from memstore.model.settings import LookupSettings
from memstore.model.tapped import Tapped

SIZE = 64
SCOPE = [(7, 0, 6), (9, 2, 4)]  # candidates 0..5 and 6, 7
SCORES = torch.tensor([0.1, 0.5, 0.1, 0.4, 0.1, 0.1, 0.38, 0.36])


def candidates(adds: list[list[float]] | None, scores: torch.Tensor = SCORES) -> Candidates:
    """The best as found in the middle of each block. adds: of the best, best first."""
    asked: list[Any] = []

    def matches(tapped: Tapped, store: Any, scope: Any) -> Matches | None:
        asked.extend(scope)
        if adds is None:
            return None
        middle = torch.tensor([[20, 40]]).expand(len(scope), 2)
        return Matches(middle, torch.tensor(adds[: len(scope)]))

    selector: Any = SimpleNamespace(matches=matches)
    found = Candidates(scores, selector, Tapped([], {}), selector, SCOPE, 4)
    assert asked == [(7, 1, 2), (7, 3, 4), (9, 2, 3), (9, 3, 4)]  # best first
    return found


def test_a_block_is_read_for_a_part_of_the_question_that_no_better_one_says() -> None:
    adds = [[0.3, 0.2, 0.0], [0.25, 0.15, 0.0], [0.1, 0.1, 0.18], [0.1, 0.1, 0.16]]
    meant = candidates(adds).meant(LookupSettings(score_range=0.1), SIZE)
    assert [(c.document, c.block) for c in meant] == [(7, 1), (9, 2)]
    adds[2][2], adds[3][2] = 0.04, 0.16  # too little of its own; then more than .05
    meant = candidates(adds).meant(LookupSettings(score_range=0.1), SIZE)
    assert [(c.document, c.block) for c in meant] == [(7, 1), (9, 3)]


def test_blocks_that_score_nearly_as_high_are_read_whatever_they_add() -> None:
    alike = [[0.3, 0.2]] * 4
    for score_range, blocks in ((0.0, [1]), (0.8, [1, 3, 2]), (None, [1, 3, 2, 3])):
        meant = candidates(alike).meant(LookupSettings(score_range=score_range), SIZE)
        assert [c.block for c in meant] == blocks


def test_a_selector_that_does_not_know_by_what_reads_around_whole_blocks() -> None:
    found = candidates(None)
    assert found.together is None
    meant = found.meant(LookupSettings(score_range=0.0, margin=24), SIZE)
    assert [c[:2] + c[3:] for c in meant] == [(7, 0, 40, 64), (7, 1, 0, 64), (7, 2, 0, 24)]


def test_margins_end_with_the_run_of_a_document() -> None:
    alike = [[0.3, 0.2]] * 4
    meant = candidates(alike).meant(LookupSettings(score_range=None, margin=64), SIZE)
    read = {c[:2]: c[3:] for c in meant}
    assert read[7, 0] == (20, 64) and read[7, 2] == (0, 64) and read[9, 2] == (0, 64)
    assert set(read) == {(7, block) for block in range(5)} | {(9, 2), (9, 3)}


def test_together_the_best_four_cover_what_each_says_best() -> None:
    adds = [[0.3, 0.2, 0.0], [0.25, 0.25, 0.0], [0.0, 0.1, 0.2], [0.4, 0.1, 0.1]]
    assert candidates(adds).together == pytest.approx(0.4 + 0.25 + 0.2)
