"""Making a selector for a model: a learned projection joined with words, and measured with words,
relations and forms that it has not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch

from memstore.model.adapter import TextTokenizer
from memstore.model.passages.adaptation import Adaptation, MadeFor
from memstore.model.passages.selector import Captured, Learned, Selector, asked
from memstore.training.selectors.learn import LearnConfig, learn, rarity
from memstore.training.selectors.measure import Haystack, Outcome, Sought, gate_of, measure, recalls
from memstore.training.selectors.states import Walk, read_states
from memstore.training.selectors.windows import Cut, Window, WindowWriter, firsts

Report = Callable[[str], None]

_WORD_WEIGHTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
_HAY = 1024  # passages of training that held-out questions are asked of, too
_IDF_CHARACTERS = 8_000_000  # of text that says how rare a token is
_AMONG = 2  # of KS: scores are told for the best 8


@dataclass(frozen=True)
class AdaptOptions:
    """How much is read. windows: of about 1,024 tokens, for training; held_out: for the choice of
    weights and the score. layer: whose states are projected; None = just below the middle.
    """

    windows: int = 240
    held_out: int = 48
    layer: int | None = None
    learn: LearnConfig = field(default_factory=LearnConfig)
    seed: int = 0


@dataclass(frozen=True)
class Subject:
    """The model that a selector is made for. cut: a text as its passages, filled up to so many
    tokens; walk: reads rows of ids, each alone behind the model's prefix.
    """

    made_for: MadeFor
    tokenizer: TextTokenizer
    cut: Cut
    walk: Walk
    passage_tokens: int


def adapt(
    model: Subject,
    texts: Sequence[str],
    work: Path,
    *,
    options: AdaptOptions | None = None,
    report: Report = lambda line: None,
) -> Adaptation:
    """A selector for a model, with what held-out questions say of it.

    texts: prose to plant facts in. work: a directory for the states of what was read; an
    interrupted run goes on from there. report: told of progress, a line each. Raises InvalidInput
    for texts that are too short.
    """
    options = options or AdaptOptions()
    cut, seed = model.cut, options.seed
    training = WindowWriter(texts, model.tokenizer, cut, "train", seed)
    held_out = WindowWriter(texts, model.tokenizer, cut, "validation", seed)
    against = list(held_out.windows(options.held_out))
    learned, haystack, questions = _Making(model, options, report, training, against).learned(
        texts, work
    )
    chosen, outcomes = _with_words(learned, haystack, questions)
    literal = [outcome for outcome in outcomes if outcome.kind in ("literal", "key")]
    unanswered = [outcome for outcome in outcomes if outcome.kind == "absent"]
    found = recalls(outcomes)
    return Adaptation(
        chosen,
        gate=gate_of(literal, unanswered, haystack.passages),
        passage_tokens=model.passage_tokens,
        weights=model.made_for.weights,
        scores={kind: shares[_AMONG] for kind, shares in sorted(found.items())},
    )


@dataclass(frozen=True)
class _Making:
    """A selector in the making. training, against: windows to learn from, and to measure with."""

    model: Subject
    options: AdaptOptions
    report: Report
    training: WindowWriter
    against: Sequence[Window]

    def learned(self, texts: Sequence[str], work: Path) -> tuple[Learned, Haystack, list[Sought]]:
        layer = self.options.layer
        if layer is None:
            layer = max(1, self.model.made_for.num_layers // 2 - 1)
        windows = list(self.training.windows(self.options.windows))
        states = read_states(
            windows, self.model.walk, [layer], work / "train", _counted(self.report, "read")
        )
        sample = (
            ids
            for text in _sample(texts, self.options.seed)
            for ids in passages_in(self.model.cut, text)
        )
        idf = rarity(sample, self.model.made_for.vocabulary)

        def told(step: int, loss: float, first: float) -> None:
            self.report(f"step {step}: loss {loss:.3f}, right passage first {first:.0%}")

        learned = learn(states, layer, idf, self.options.learn, told)
        unseen = read_states(
            self.against,
            self.model.walk,
            [layer],
            work / "held-out",
            _counted(self.report, "read held-out"),
        )
        both = Selector(learned, word_weight=1.0)
        haystack = Haystack(both.spec)
        for some in (unseen, states):  # windows of self.training are hay here
            wanted = len(some.ends) if some is unseen else min(len(some.ends), _HAY)
            add(haystack, both, self.model.tokenizer, [some.shown(at) for at in range(wanted)])
        return learned, haystack, sought(self.against, unseen.question)


def _with_words(
    learned: Learned, haystack: Haystack, questions: Sequence[Sought]
) -> tuple[Selector, list[Outcome]]:
    """The selector with the weight of words that finds most, and what it finds."""
    alone = Selector(learned)
    by_landmarks, by_words = [], []
    for one in questions:
        by_landmarks.append(alone.scores(one.captured, one.text, haystack, haystack.scope))
        by_words.append(haystack.word_scores(asked(one.text), haystack.scope))
    tried = []
    for weight in _WORD_WEIGHTS:
        selector = Selector(learned, weight)
        scores = by_landmarks
        if weight:
            scores = [
                selector.joined(landmarks, words, one.text, haystack)
                for landmarks, words, one in zip(by_landmarks, by_words, questions, strict=True)
            ]
        outcomes = measure(selector, haystack, questions, scores)
        tried.append((_mean(outcomes), -weight, selector, outcomes))
    _, _, selector, outcomes = max(tried, key=lambda one: one[:2])
    return selector, outcomes


def _mean(outcomes: Sequence[Outcome]) -> float:
    """Over kinds of question, and over the best 1, 4 and 8, the mean share found."""
    shares = [share for found in recalls(outcomes).values() for share in found[:3]]
    return sum(shares) / len(shares)


def sought(windows: Sequence[Window], captured: Callable[[int, int], Captured]) -> list[Sought]:
    """The questions of windows, with the passages that answer, those of all windows counted on.

    captured: of (window, number of the question in it), what was shown of its own words.
    """
    same: dict[str, set[int]] = {}
    found = []
    for number, (window, before) in enumerate(zip(windows, firsts(windows), strict=True)):
        for place, question in enumerate(window.questions):
            right = tuple(before + passage for passage in question.touched)
            if question.key:
                same.setdefault(question.key, set()).update(right)
            found.append((question, right, captured(number, place)))
    return [
        Sought(
            question.kind,
            question.text,
            shown,
            right,
            frozenset(same.get(question.key, set()) - set(right)),
        )
        for question, right, shown in found
    ]


def add(
    haystack: Haystack, selector: Selector, tokenizer: TextTokenizer, passages: Sequence[Captured]
) -> None:
    """One more document, of these passages, with what the selector keeps of them."""
    kept = [found for one in passages if (found := selector.landmarks(one)) is not None]
    words = selector.words([tokenizer.decode(one.ids) for one in passages])
    lengths = [len(one.ids) for one in passages]
    haystack.add(lengths, torch.cat(kept) if kept else None, words)


def passages_in(cut: Cut, text: str) -> list[list[int]]:
    """The ids of a text's passages."""
    return [passage.ids.tolist() for passage in cut(text)]


def _sample(texts: Sequence[str], seed: int) -> Iterator[str]:
    """Some text from everywhere."""
    rng = Random(seed)
    length = max(1000, _IDF_CHARACTERS // len(texts))
    for text in texts:
        start = rng.randrange(max(1, len(text) - length))
        yield text[start : start + length]


def _counted(report: Report, done: str) -> Callable[[int, int], None]:
    return lambda number, of: report(f"{done} {number} of {of} windows")
