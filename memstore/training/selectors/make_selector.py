"""Making a selector for a model: a learned projection joined with words, measured with words,
relations and forms that it has not seen; and how many of the passages that it finds a model should
read, by its answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch

from memstore.disk.format.text_parts import Passage
from memstore.model.adapter import TextTokenizer
from memstore.model.passages.adaptation import Adaptation, MadeFor
from memstore.model.passages.passage_api import PassageAPI
from memstore.model.passages.passage_encoding import encode
from memstore.model.passages.passage_ingest import passages_of
from memstore.model.passages.passage_protocol import PassageModel
from memstore.model.passages.selector import Captured, Captures, Learned, Selector, asked
from memstore.store.memory_store import MemoryStore
from memstore.training.selectors.learn import LearnConfig, learn, rarity
from memstore.training.selectors.measure import Haystack, Outcome, gate_of, measure, recalls
from memstore.training.selectors.questions import Fact, Split
from memstore.training.selectors.states import States, Walk, read_states
from memstore.training.selectors.windows import Cut, WindowWriter

Report = Callable[[str], None]

_WORD_WEIGHTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
_HAY = 1024  # passages of training that held-out questions are asked of, too
_IDF_CHARACTERS = 8_000_000  # of text that says how rare a token is
_AMONG = 2  # of KS: scores are of the best 8
_RANGES = (0.0, 0.5, 1.0, 1.5, 2.0)  # standard deviations below the best, that are tried
_TOP_K = 4


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
    """The model that a selector is made for. cut: a text as its passages, filled up to
    `passage_tokens`; walk: reads rows of ids, each alone after the model's prefix.
    """

    made_for: MadeFor
    tokenizer: TextTokenizer
    cut: Cut
    walk: Walk
    passage_tokens: int

    @classmethod
    def of(cls, reader: PassageModel, made_for: MadeFor) -> Subject:
        """A model as a subject. made_for: its sizes."""

        def cut(text: str) -> list[Passage]:
            return list(passages_of(reader, [text]))

        def walk(rows: Sequence[Sequence[int]], captures: Captures) -> list[Captured]:
            order = sorted(range(len(rows)), key=lambda row: len(rows[row]))  # fuller passes
            given = (rows[row] for row in order)
            read = encode(reader, given, layers=captures.layers, captures=captures)
            found = dict(zip(order, (one.captured for one in read), strict=True))
            return [found[row] for row in range(len(rows))]

        return cls(made_for, reader.tokenizer, cut, walk, reader.passage_tokens)


def adapt(
    model: Subject,
    texts: Sequence[str],
    work: Path,
    *,
    options: AdaptOptions | None = None,
    report: Report = lambda line: None,
) -> Adaptation:
    """Make a selector for a model, and measure it with held-out questions.

    texts: prose to plant facts in. work: a directory for the states of what was read; an
    interrupted run continues from there. report: called with lines of progress. Raises InvalidInput
    for texts that are too short.
    """
    options = options or AdaptOptions()
    layer = max(1, model.made_for.num_layers // 2 - 1) if options.layer is None else options.layer

    def read(split: Split, count: int, folder: str) -> States:
        writer = WindowWriter(texts, model.tokenizer, model.cut, split, options.seed)
        windows = list(writer.windows(count))

        def progress(done: int, of: int) -> None:
            report(f"{folder}: {done} of {of} windows read")

        return read_states(windows, model.walk, [layer], work / folder, progress)

    held_out = read("validation", options.held_out, "held-out")
    states = read("train", options.windows, "train")
    sample = (
        passage.ids.tolist() for text in _sample(texts, options.seed) for passage in model.cut(text)
    )
    idf = rarity(sample, model.made_for.vocabulary)

    def learning(step: int, loss: float, first: float) -> None:
        report(f"step {step}: loss {loss:.3f}, right passage first {first:.0%}")

    learned = learn(states, layer, idf, options.learn, learning)
    both = Selector(learned, word_weight=1.0)
    haystack = Haystack(both.spec)
    for some, most in ((held_out, len(held_out.ends)), (states, _HAY)):
        passages = [some.shown(at) for at in range(min(most, len(some.ends)))]
        haystack.add_passages(both, model.tokenizer, passages)
    chosen, outcomes = _with_words(learned, haystack, held_out)
    answered = [outcome for outcome in outcomes if outcome.kind in ("literal", "key")]
    unanswered = [outcome for outcome in outcomes if outcome.kind == "absent"]
    return Adaptation(
        chosen,
        gate=gate_of(answered, unanswered, haystack.passages),
        passage_tokens=model.passage_tokens,
        weights=model.made_for.weights,
        scores={kind: shares[_AMONG] for kind, shares in sorted(recalls(outcomes).items())},
    )


def _with_words(
    learned: Learned, haystack: Haystack, states: States
) -> tuple[Selector, list[Outcome]]:
    """The selector with the weight of words that finds most, and what it finds."""
    alone, scope = Selector(learned), haystack.scope
    by_landmarks, by_words = [], []
    for one in states.asked:
        text = one.question.text
        by_landmarks.append(alone.scores(states.captured(one), text, haystack, scope))
        by_words.append(haystack.word_scores(asked(text), scope))
    tried = []
    for weight in _WORD_WEIGHTS:
        selector, scores = Selector(learned, weight), by_landmarks
        if weight:
            scores = [
                selector.joined(landmarks, words, one.question.text, haystack)
                for landmarks, words, one in zip(by_landmarks, by_words, states.asked, strict=True)
            ]
        outcomes = measure(selector, haystack, states, scores)
        tried.append((_mean(outcomes), -weight, selector, outcomes))
    _, _, selector, outcomes = max(tried, key=lambda one: one[:2])
    return selector, outcomes


def _mean(outcomes: Sequence[Outcome]) -> float:
    """The mean share found over kinds of question and over the best 1, 4 and 8."""
    shares = [share for found in recalls(outcomes).values() for share in found[:3]]
    return sum(shares) / len(shares)


def _sample(texts: Sequence[str], seed: int) -> Iterator[str]:
    """Some text from everywhere."""
    rng = Random(seed)
    length = max(1000, _IDF_CHARACTERS // len(texts))
    for text in texts:
        start = rng.randrange(max(1, len(text) - length))
        yield text[start : start + length]


# How many passages are read


@dataclass(frozen=True)
class Answers:
    """How many questions a reader answered with a range of scores, and how many passages it
    read.
    """

    score_range: float
    right: int
    questions: int
    passages: float


def calibrate_reading(
    reader: PassageAPI,
    adaptation: Adaptation,
    texts: Sequence[str],
    *,
    windows: int = 16,
    seed: int = 0,
    report: Report = lambda line: None,
) -> Adaptation:
    """The adaptation with the score_range that answers most; the wider of two that answer as many.

    reader: reads with this adaptation's selector. texts: prose to plant facts in, as many windows
    of about 1,024 tokens. One that answers nothing keeps its range. Raises InvalidInput for texts
    that are too short.
    """

    def cut(text: str) -> list[Passage]:
        return list(passages_of(reader, [text]))

    writer = WindowWriter(texts, reader.tokenizer, cut, "validation", seed + 1)
    facts, pieces = writer.facts, []
    asked: list[Fact] = []
    for _ in range(windows):
        planted = [facts.literal(), facts.literal(), facts.reworded()]
        asked += planted
        pieces.append(writer.window(planted).text)
    with TemporaryDirectory(prefix="memstore-", ignore_cleanup_errors=True) as directory:
        signature, keeps = reader.signature, reader.keeps
        with MemoryStore.create(Path(directory) / "m", signature, selector=keeps) as store:
            report(f"reading {windows} windows into a memory")
            reader.ingest("\n\n".join(pieces), store, name="calibration")
            tried = [_answers(reader, store, asked, one) for one in _RANGES]
    for one in tried:
        report(
            f"within {one.score_range} deviations: {one.right} of {one.questions} answered, "
            f"{one.passages:.1f} passages read"
        )
    best = max(tried, key=lambda one: (one.right, one.score_range))
    if not best.right:
        return adaptation
    scores = {**adaptation.scores, "answers": best.right / best.questions}
    return replace(adaptation, top_k=_TOP_K, score_range=best.score_range, scores=scores)


@torch.no_grad()
def _answers(
    reader: PassageAPI, store: MemoryStore, asked: Sequence[Fact], score_range: float
) -> Answers:
    right, passages = 0, 0
    for fact in asked:
        with reader.session(store, top_k=_TOP_K, score_range=score_range) as session:
            session.ask(fact.question, lambda: None)
            passages += len(session.chosen)
            space = " " * fact.value[0].isdigit()  # a token of its own before digits
            begun = reader.tokenizer.encode(fact.begun + space)
            value = reader.tokenizer.encode(fact.value if space else f" {fact.value}")
            states = session.feed([*begun, *value[:-1]])[-len(value) :]
            right += session.logits(states).argmax(-1).tolist() == value
    return Answers(score_range, right, len(asked), passages / len(asked))
