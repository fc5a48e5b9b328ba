"""Making a selector for a model: pointer heads by calibration, or a learned projection; either is
joined with words, and measured with words, relations and forms that it has not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from memstore.model.adaptation import Adaptation
from memstore.model.reader import TextTokenizer
from memstore.model.selector_file import MadeFor
from memstore.model.selector_heads import PointerHeads, Rotate
from memstore.model.selector_sum import Sum, Words
from memstore.model.selectors import Selector
from memstore.model.tapped import Tapped, Taps
from memstore.training.adapt_heads import rank_heads
from memstore.training.adapt_measure import Haystack, Outcome, Sought, gate_of, measure, recalls
from memstore.training.adapt_states import Walk, read_states
from memstore.training.adapt_train import LearnConfig, learn, rarity
from memstore.training.selector_windows import Encode, Window, WindowWriter

Report = Callable[[str], None]

_BLOCK = 64  # tokens of what competes in training: windows are cut into such pieces
_WORD_WEIGHTS = (0.0, 0.05, 0.1, 0.2, 0.4)
_HEADS = (1, 2, 3)  # pointer heads that are tried together
_IDF_CHARACTERS = 8_000_000  # of text that says how rare a token is
_AMONG = 2  # of KS: scores are told for the best 8


@dataclass(frozen=True)
class AdaptOptions:
    """How much is read. windows: of 1,024 tokens, for training, or for calibration; held_out: for
    the choice of weights and the score. layer: whose states are projected; None = just below the
    middle.
    """

    windows: int = 240
    calibration: int = 24
    held_out: int = 48
    layer: int | None = None
    learn: LearnConfig = field(default_factory=LearnConfig)
    seed: int = 0


@dataclass(frozen=True)
class Subject:
    """The model that a selector is made for. walk: reads rows of ids after the model's prefix."""

    made_for: MadeFor
    tokenizer: TextTokenizer
    walk: Walk
    rotate: Rotate


def adapt(
    model: Subject,
    texts: Sequence[str],
    work: Path,
    *,
    train: bool,
    options: AdaptOptions | None = None,
    report: Report = lambda line: None,
) -> Adaptation:
    """A selector for a model, with what held-out questions say of it.

    texts: prose to plant facts in. work: a directory for the states of what was read; an
    interrupted run goes on from there. train: learn a projection; otherwise pointer heads. report:
    told of progress, a line each. Raises InvalidInput for texts that are too short.
    """
    options = options or AdaptOptions()
    encode = encoder(model.tokenizer)
    size = _BLOCK
    held_out = WindowWriter(texts, encode, "validation", options.seed, size)
    against = list(held_out.windows(options.held_out))
    training = WindowWriter(texts, encode, "train", options.seed, size)
    if train:
        selector, haystack, asked = _learned(model, texts, training, against, work, options, report)
    else:
        selector, haystack, asked = _pointing(model, training, against, options, report)
    chosen, outcomes = _with_words(selector, haystack, asked)
    literal = [outcome for outcome in outcomes if outcome.kind in ("literal", "key")]
    unanswered = [outcome for outcome in outcomes if outcome.rank < 0]
    found = recalls(outcomes)
    return Adaptation(
        chosen,
        gate=gate_of(literal, unanswered, haystack.blocks),
        weights=model.made_for.weights,
        scores={kind: shares[_AMONG] for kind, shares in sorted(found.items())},
    )


def encoder(tokenizer: TextTokenizer) -> Encode:
    """What tells ids and the characters of each, of any tokenizer that counts characters."""

    def encode(text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids = tokenizer.encode(text)
        spans, at = [], 0
        for token in ids:
            begun = tokenizer.characters([token])
            spans.append((at, at + max(1, begun)))
            at += begun
        return ids, spans

    return encode


def _learned(
    model: Subject,
    texts: Sequence[str],
    training: WindowWriter,
    against: Sequence[Window],
    work: Path,
    options: AdaptOptions,
    report: Report,
) -> tuple[Selector, Haystack, list[Sought]]:
    layer = options.layer
    if layer is None:
        layer = max(1, model.made_for.num_layers // 2 - 1)
    windows = list(training.windows(options.windows))
    states = read_states(windows, model.walk, [layer], work / "train", _counted(report, "read"))
    idf = rarity(
        _sample(model, texts, options.seed), model.made_for.vocabulary, training.block_size
    )

    def told(step: int, loss: float, first: float) -> None:
        report(f"step {step}: loss {loss:.3f}, right block first {first:.0%}")

    selector = learn(states, layer, idf, options.learn, training.block_size, told)
    unseen = read_states(
        against, model.walk, [layer], work / "held-out", _counted(report, "read held-out")
    )
    both = Sum([(selector, 1.0), (Words(), 0.0)])
    haystack = Haystack(both.form, training.block_size)
    for states_of in (unseen, states):  # windows of training are hay here
        for number, ids in enumerate(states_of.ids):
            shown = Tapped(ids.tolist(), {layer: states_of.windows[layer][number]})
            _add(haystack, both, model, shown, training.block_size)
    return selector, haystack, sought(against, unseen.question, training.block_size)


def _pointing(
    model: Subject,
    training: WindowWriter,
    against: Sequence[Window],
    options: AdaptOptions,
    report: Report,
) -> tuple[Selector, Haystack, list[Sought]]:
    made_for, size = model.made_for, training.block_size
    ranked = rank_heads(
        list(training.windows(options.calibration)),
        model.walk,
        made_for.num_layers,
        model.rotate,
        size,
        report=_counted(report, "calibrated on"),
    )
    best = ranked[: max(_HEADS)]
    for head in best:
        report(f"layer {head.layer} head {head.head}: reciprocal rank {head.reciprocal_rank:.2f}")
    shape = (made_for.num_heads, made_for.num_kv_heads, made_for.head_dim)
    taps = Taps(heads=tuple(sorted({head.layer for head in best})))
    shown = [model.walk([window.ids], taps)[0] for window in against]

    def of_question(window: int, place: int) -> Tapped:
        question = against[window].questions[place]
        shown = model.walk([question.lead + question.ids], taps)[0]
        return shown.part(range(len(question.lead), len(shown.ids)))

    asked = sought(against, of_question, size)
    tried = []
    for count in _HEADS:
        heads = [(head.layer, head.head) for head in best[:count]]
        selector = PointerHeads(heads, shape, model.rotate)
        both = Sum([(selector, 1.0), (Words(), 0.0)])
        haystack = Haystack(both.form, size)
        for one in shown:
            _add(haystack, both, model, one, size)
        outcomes = measure(selector, haystack, asked)
        tried.append((_mean(outcomes), -count, selector, haystack))
    _, _, selector, haystack = max(tried, key=lambda one: one[:2])
    return selector, haystack, asked


def _with_words(
    selector: Selector, haystack: Haystack, asked: Sequence[Sought]
) -> tuple[Selector, list[Outcome]]:
    """The selector with the weight of words that finds most, and what it finds."""
    tried = []
    for weight in _WORD_WEIGHTS:
        joined: Selector = Sum([(selector, 1.0), (Words(), weight)]) if weight else selector
        outcomes = measure(joined, haystack, asked)
        tried.append((_mean(outcomes), -weight, joined, outcomes))
    _, _, joined, outcomes = max(tried, key=lambda one: one[:2])
    return joined, outcomes


def _mean(outcomes: Sequence[Outcome]) -> float:
    """Over kinds of question, and over the best 1, 4 and 8, the mean share found."""
    shares = [share for found in recalls(outcomes).values() for share in found[:3]]
    return sum(shares) / len(shares)


def sought(
    windows: Sequence[Window], tapped: Callable[[int, int], Tapped], block_size: int
) -> list[Sought]:
    """The questions of windows that have an answer; blocks are numbered window after window.

    tapped: of (window, number of the question in it), what was shown of its own words.
    """
    per_window = len(windows[0].ids) // block_size
    same: dict[str, set[int]] = {}
    for number, window in enumerate(windows):
        for question in window.questions:
            blocks = {number * per_window + block for block in question.touched}
            same.setdefault(question.key, set()).update(blocks)
    found = []
    for number, window in enumerate(windows):
        for place, question in enumerate(window.questions):
            if question.block < 0:
                continue
            right = tuple(number * per_window + block for block in question.touched)
            others = same[question.key] - set(right) if question.key else set()
            shown = tapped(number, place)
            found.append(Sought(question.kind, question.text, shown, right, frozenset(others)))
    return found


def _add(haystack: Haystack, selector: Selector, model: Subject, shown: Tapped, size: int) -> None:
    texts = [
        model.tokenizer.decode(shown.ids[i : i + size]) for i in range(0, len(shown.ids), size)
    ]
    parts = (shown.part(range(i, i + size)) for i in range(0, len(shown.ids), size))
    landmarks = [found for part in parts if (found := selector.landmarks(part)) is not None]
    haystack.add(len(texts), torch.cat(landmarks) if landmarks else None, selector.words(texts))


def _sample(model: Subject, texts: Sequence[str], seed: int) -> Tensor:
    """Ids of some text from everywhere."""
    rng, ids = Random(seed), list[int]()
    length = max(1000, _IDF_CHARACTERS // len(texts))
    for text in texts:
        start = rng.randrange(max(1, len(text) - length))
        ids += model.tokenizer.encode(text[start : start + length])
    return torch.tensor(ids)


def _counted(report: Report, done: str) -> Callable[[int, int], None]:
    return lambda number, of: report(f"{done} {number} of {of} windows")
