"""Which blocks a question reads of those that score best, and what opens the gate."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from memstore.model.chosen import Candidates, rest_of_sentence
from memstore.model.selectors import Matches
from memstore.model.settings import LookupSettings
from memstore.model.tapped import Tapped

SIZE = 64
SCOPE = [(7, 0, 6), (9, 2, 4)]  # candidates 0..5 and 6, 7
SCORES = torch.tensor([0.1, 0.5, 0.1, 0.4, 0.1, 0.1, 0.38, 0.36])


def candidates(
    adds: list[list[float]] | None, place: tuple[int, int] = (20, 40), scores: Tensor = SCORES
) -> Candidates:
    """The best, each found by the tokens of a place. adds: of the best, best first."""
    asked: list[Any] = []

    def matches(tapped: Tapped, store: Any, scope: Any) -> Matches | None:
        asked.extend(scope)
        if adds is None:
            return None
        return Matches(torch.tensor([place]).expand(len(scope), 2), torch.tensor(adds))

    selector: Any = SimpleNamespace(matches=matches)
    found = Candidates(scores, selector, Tapped([], {}), selector, SCOPE, 4)
    assert asked == [(7, 1, 2), (7, 3, 4), (9, 2, 3), (9, 3, 4)]  # best first
    return found


def words(document: int, first: int, end: int) -> list[str]:
    """A text whose sentences end with two tokens: in the best block, the second, and behind it."""
    return [" end." if token in (85, 159) else " word" for token in range(first, end)]


def nothing(document: int, first: int, end: int) -> list[str]:
    """A text that is not known."""
    return []


def test_a_block_is_read_for_a_part_of_the_question_that_no_better_one_says() -> None:
    adds = [[0.3, 0.2, 0.0], [0.25, 0.15, 0.0], [0.1, 0.1, 0.18], [0.1, 0.1, 0.16]]
    meant = candidates(adds).meant(LookupSettings(score_range=0.1), SIZE, nothing, parts=True)
    assert [(c.document, c.block) for c in meant] == [(7, 1), (9, 2)]
    adds[2][2], adds[3][2] = 0.03, 0.16  # too little of its own; then enough
    meant = candidates(adds).meant(LookupSettings(score_range=0.1), SIZE, nothing, parts=True)
    assert [(c.document, c.block) for c in meant] == [(7, 1), (9, 3)]
    alone = candidates(adds).meant(LookupSettings(score_range=0.1), SIZE, nothing, parts=False)
    assert [(c.document, c.block) for c in alone] == [(7, 1)]


def test_blocks_that_score_nearly_as_high_are_read_whatever_they_add() -> None:
    alike = [[0.3, 0.2]] * 4
    for score_range, blocks in ((0.0, [1]), (0.8, [1, 3, 2]), (None, [1, 3, 2, 3])):
        meant = candidates(alike).meant(
            LookupSettings(score_range=score_range), SIZE, nothing, parts=False
        )
        assert [c.block for c in meant] == blocks


def test_a_selector_that_does_not_know_by_what_reads_around_whole_blocks() -> None:
    found = candidates(None)
    assert found.together is None
    meant = found.meant(LookupSettings(score_range=0.0, margin=24), SIZE, nothing, parts=False)
    assert [c[:2] + c[3:] for c in meant] == [(7, 0, 40, 64), (7, 1, 0, 64), (7, 2, 0, 24)]


@pytest.mark.parametrize(
    ("place", "around"),
    [
        ((0, 3), {0: (40, 64)}),
        ((60, 63), {2: (0, 32)}),
        ((16, 47), {2: (0, 32)}),
        ((16, 34), {2: (0, 32)}),
        ((3, 50), {0: (40, 64), 2: (0, 32)}),
    ],
)
def test_beside_a_block_are_read_a_margin_and_the_rest_of_the_sentence(
    place: tuple[int, int], around: dict[int, tuple[int, int]]
) -> None:
    settings = LookupSettings(score_range=0.0, margin=24)
    meant = candidates([[0.5]] * 4, place).meant(settings, SIZE, words, parts=False)
    assert {c.block: c[3:] for c in meant} == {1: (0, 64), **around}
    unknown = candidates([[0.5]] * 4, place).meant(settings, SIZE, nothing, parts=False)
    near = {block: part for block, part in around.items() if block == 0 or place[1] >= 48}
    near |= {2: (0, 24)} if 2 in near else {}
    assert {c.block: c[3:] for c in unknown} == {1: (0, 64), **near}
    alone = candidates([[0.5]] * 4, place).meant(
        LookupSettings(score_range=0.0), SIZE, words, parts=False
    )
    assert [c.block for c in alone] == [1]


def test_what_is_read_beside_a_block_ends_with_the_run_of_a_document() -> None:
    settings = LookupSettings(score_range=None, margin=24)
    meant = candidates([[0.5]] * 4, (10, 50)).meant(settings, SIZE, words, parts=False)
    read = {c[:2]: c[3:] for c in meant}
    assert read[7, 0] == (40, 64) and read[7, 2] == (0, 64) and read[7, 4][0] == 0
    assert set(read) == {(7, block) for block in range(5)} | {(9, 2), (9, 3)}


@pytest.mark.parametrize(
    ("texts", "rest"),
    [
        ([" it", " is", " 4", ".", "5", " kg", ".", " Then"], 7),
        ([" it", ' ends."', " Then"], 2),
        ([" e", ".", "g"], 0),
        ([" so", "!\n", "x"], 2),
        (["a", "b"], 0),
        (["end", "."], 2),
        ([], 0),
    ],
)
def test_a_sentence_ends_with_a_stop_that_nothing_goes_on_behind(
    texts: list[str], rest: int
) -> None:
    assert rest_of_sentence(texts) == rest


def test_together_the_best_four_cover_what_each_says_best() -> None:
    adds = [[0.3, 0.2, 0.0], [0.25, 0.25, 0.0], [0.0, 0.1, 0.2], [0.4, 0.1, 0.1]]
    assert candidates(adds).together == pytest.approx(0.4 + 0.25 + 0.2)


def test_where_one_of_the_four_says_nothing_of_its_own_no_question_has_so_many_parts() -> None:
    adds = [[0.3, 0.2, 0.0], [0.25, 0.25, 0.0], [0.0, 0.1, 0.2], [0.3, 0.1, 0.1]]
    assert candidates(adds).together is None
