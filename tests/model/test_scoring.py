"""Scores of a large scope, by a shortlist, are those that all blocks would get; so are what is told
from them: which are best, how far from each other, whether anything answers.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from memstore.model.passages.selectors.captured_activations import Captured
from memstore.model.passages.selectors.learned_selector import Learned
from memstore.model.passages.selectors.passage_choice import Candidates
from memstore.model.passages.selectors.scoring import score_blocks
from memstore.model.passages.selectors.selector import Gate, spread
from memstore.model.passages.selectors.selector_sum import Sum, Words
from memstore.store.retrieve import first_stage
from support.many_passages import SPEC, add, create, everything, question

pytest.importorskip("faiss")

NOTHING = Captured([], {}, {}, {})


class Given(Learned):
    """The learned selector, of a question whose rows are given."""

    spec = SPEC

    def __init__(self, rows: Tensor, weights: Tensor) -> None:
        self._given = rows, weights

    def rows(self, captured: Captured) -> tuple[Tensor, Tensor]:
        return self._given


def test_a_shortlist_is_chosen_from_as_everything_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_stage, "PAYING", 1)
    monkeypatch.setattr(first_stage, "PROPOSED", (100, 100))
    with create(tmp_path / "m") as store:
        for text in (1, 2, 3):
            add(store, str(text), text, 300)
        store.build_index()
        scope = everything(store)
        for seed in range(12):
            late: Any = Given(*question(1 + seed % 3, 50 + seed, seed))
            for selector in (late, Sum([(late, 1.0), (Words(), 0.05)])):
                # a word that is in one block of fifty, as the store's texts have it
                monkeypatch.setattr("memstore.index.text_words.split", lambda text: [1004, 7])
                found = score_blocks(selector, NOTHING, "", store, scope)
                assert len(found.scores) <= 100 < found.blocks == 900
                exact = selector.scores(NOTHING, "", store, scope)
                given = 4, lambda runs: None, lambda *place: place
                best = Candidates(exact, scope, *given).best(4)
                short = Candidates(
                    found.scores,
                    found.scope,
                    *given,
                    deviation=found.deviation,
                    blocks=found.blocks,
                )
                chosen = short.best(4)
                assert [(one.document, one.block) for one in chosen] == [
                    (one.document, one.block) for one in best
                ]
                scores = [one.score for one in best]
                deviation = spread(exact)[1]
                assert [one.score for one in chosen] == pytest.approx(scores, abs=0.1 * deviation)
                assert found.deviation == pytest.approx(deviation, rel=0.15)
                # the bound grows with the blocks that there are, not with those that are scored
                gate = Gate(float(exact.max()) - 0.01 - 0.1, growth=0.2)
                assert short.blocks == 900
                told = gate.answers(found.scores, blocks=found.blocks)
                assert told == gate.answers(exact)
                added = selector.adds(NOTHING, found.store, found.scope[:2])
                torch.testing.assert_close(added, selector.adds(NOTHING, store, found.scope[:2]))


def test_what_words_decide_is_not_left_to_landmarks() -> None:
    late: Any = Given(*question(1, 0, 0))
    added = Sum([(late, 2.0), (Words(), 0.1)])
    assert added.rows(NOTHING) is not None
    beside = added.beside("the mare")
    assert beside is not None and len(beside.words) == 2 and beside.weight == 0.05
    assert Sum([(late, 1.0)]).beside("the mare") is None
    assert Sum([(late, 1.0), (Words(), 0.3)]).rows(NOTHING) is None
    assert Sum([(Words(), 1.0), (late, 0.05)]).rows(NOTHING) is None
