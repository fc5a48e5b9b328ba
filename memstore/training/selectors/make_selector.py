"""Making a selector for a model: a learned projection joined with words, trained on people's
questions and on facts planted in prose, and measured with others; and how many of the passages that
it finds a model should read, by its answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch

from memstore.errors import InvalidInput
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.model.passages.adaptation import Adaptation
from memstore.model.passages.passage_ingest import passages_of
from memstore.model.passages.passage_session import PassageAPI
from memstore.model.passages.selector import Learned, Selector
from memstore.model.tokenizer import TokenText
from memstore.store.memory_store import MemoryStore
from memstore.training.planted import PlantedQuestion, planted_questions
from memstore.training.reading_questions import AskedContext, AskedQuestion, drawn, split_titles
from memstore.training.selectors.learn import LearnConfig, learn, rarity
from memstore.training.selectors.measure import Haystack, Outcome, gate_of, measure, recalls
from memstore.training.selectors.states import States, read_states
from memstore.training.vocabulary import Split

Report = Callable[[str], None]

_WORD_WEIGHTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
_HAY = 1024  # passages of training that held-out questions are asked of, too
_IDF_CHARACTERS = 8_000_000  # of text that says how rare a token is
_AMONG = 2  # of KS: scores are of the best 8
_RANGES = (0.0, 0.5, 1.0, 1.5, 2.0)  # standard deviations below the best, that are tried
_TOP_K = 4
_PLANTED, _CONTEXTS = 2, 8  # texts of a window: with planted questions, with people's
# with people's questions
_WITH_PEOPLES = LearnConfig(
    steps=1500, batch=48, like=3, shares=(*LearnConfig.shares, ("asked", 1.5))
)
_MINED, _BY_WORDS, _BY_STATES = 12, 6, 8  # hard negatives: of the first round, of the second


@dataclass(frozen=True)
class AdaptOptions:
    """How much is read. windows: for training, each of two texts with planted questions and eight
    with people's; held_out: the same for the choice of weights and the score. layer: whose states
    are projected; None = just below the middle. learn: None = the usual.
    """

    windows: int = 240
    held_out: int = 48
    layer: int | None = None
    learn: LearnConfig | None = None
    seed: int = 0


def adapt(
    reader: HuggingFacePassageModel,
    texts: Sequence[str],
    work: Path,
    *,
    contexts: Sequence[AskedContext] = (),
    options: AdaptOptions | None = None,
    report: Report = lambda line: None,
) -> Adaptation:
    """Make a selector for a model, and measure it with held-out questions.

    texts: prose to plant facts in; contexts: texts with people's questions. One of the two may be
    left out. work: a directory for the states of what was read; an interrupted run continues from
    there. report: called with lines of progress. Raises InvalidInput for texts that are too short,
    for questions of fewer than two titles, and where too few answers stand in a passage.
    """
    options = options or AdaptOptions()
    made_for, tokenizer, seed = reader.made_for, reader.tokenizer, options.seed
    layer = max(1, made_for.num_layers // 2 - 1) if options.layer is None else options.layer
    train, test = split_titles(contexts, seed) if contexts else ([], [])

    def read(split: Split, count: int, asked: Sequence[AskedContext], folder: str) -> States:
        some = planted_questions(texts, _PLANTED * count, split, seed) if texts else []
        some += drawn(asked, _CONTEXTS * count, seed)

        def progress(done: int, of: int) -> None:
            report(f"{folder}: {done} of {of} texts read")

        found = read_states(some, reader, [layer], work / folder, seed=seed, report=progress)
        if contexts and not any(one.kind == "asked" for one in found.asked):
            raise InvalidInput(
                "too few questions: training and evaluation each need some whose answer is in the "
                "text verbatim"
            )
        return found

    held_out = read("held_out", options.held_out, test, "held-out")
    states = read("train", options.windows, train, "train")
    prose = texts or [one.context for one in train]
    sample = passages_of(reader, _sample(prose, seed))
    idf = rarity((passage.ids.tolist() for passage in sample), made_for.vocabulary)

    def learning(step: int, loss: float, first: float) -> None:
        report(f"step {step}: loss {loss:.3f}, right passage first {first:.0%}")

    config = options.learn or (_WITH_PEOPLES if contexts else LearnConfig())
    kinds = {one.kind for one in states.asked}
    config = replace(config, shares=tuple(pair for pair in config.shares if pair[0] in kinds))
    by_words = _alike(states, Selector(), tokenizer)
    learned = learn(states, layer, idf, config, learning, by_words)
    if by_words:
        report("learning again, with passages that were wrongly found")
        by_states = _alike(states, Selector(learned), tokenizer)
        hard = {
            first: [*some[:_BY_WORDS], *by_states[first][:_BY_STATES]]
            for first, some in by_words.items()
        }
        learned = learn(states, layer, idf, config, learning, hard)
    both = Selector(learned, word_weight=1.0)
    haystack = Haystack(both.spec)
    for some, most in ((held_out, len(held_out.ends)), (states, _HAY)):
        passages = [some.shown(at) for at in range(min(most, len(some.ends)))]
        haystack.add_passages(both, tokenizer, passages)
    chosen, outcomes = _with_words(learned, haystack, held_out)
    answered = [outcome for outcome in outcomes if outcome.rank >= 0]
    unanswered = [outcome for outcome in outcomes if outcome.kind == "absent"]
    return Adaptation(
        chosen,
        gate=gate_of(answered, unanswered, haystack.passages),
        passage_tokens=reader.passage_tokens,
        weights=made_for.weights,
        scores={kind: shares[_AMONG] for kind, shares in sorted(recalls(outcomes).items())},
    )


def _alike(states: States, selector: Selector, tokenizer: TokenText) -> dict[int, list[int]]:
    """By Asked.first of people's questions, the passages of the same source that the selector finds
    first and that do not answer.
    """
    haystack, first = Haystack(selector.spec), 0
    scopes: dict[str, tuple[int, tuple[int, int, int]]] = {}  # of a source: first passage, scope
    for source, texts in groupby(states.texts, lambda text: text[0]):
        *_, (_, end) = texts
        scopes[source] = first, (len(haystack.scope), 0, end - first)
        shown = [states.shown(at) for at in range(first, end)] if source else []
        haystack.add_passages(selector, tokenizer, shown)
        first = end
    found = {}
    for one in states.asked:
        if one.kind != "asked":
            continue
        first, scope = scopes[states.texts[one.context][0]]
        scores = selector.scores(states.query(one), haystack, [scope])
        scores[[at - first for at in one.touched]] = -torch.inf
        best = scores.topk(min(_MINED, len(scores)))
        pairs = zip(best.values.tolist(), best.indices.tolist())
        found[one.first] = [first + at for score, at in pairs if score > 0]
    return found


def _with_words(
    learned: Learned, haystack: Haystack, states: States
) -> tuple[Selector, list[Outcome]]:
    """The selector with the weight of words that finds most, and what it finds."""
    alone, scope = Selector(learned), haystack.scope
    by_landmarks, by_words = [], []
    for one in states.asked:
        query = states.query(one)
        by_landmarks.append(alone.scores(query, haystack, scope))
        by_words.append(haystack.word_scores(query.words, scope))
    tried = []
    for weight in _WORD_WEIGHTS:
        selector, scores = Selector(learned, weight), by_landmarks
        if weight:
            scores = [
                selector.joined(landmarks, words, states.query(one), haystack)
                for landmarks, words, one in zip(by_landmarks, by_words, states.asked, strict=True)
            ]
        outcomes = measure(selector, haystack, states, scores)
        tried.append((_mean(outcomes), -weight, selector, outcomes))
    _, _, selector, outcomes = max(tried, key=lambda one: one[:2])
    return selector, outcomes


def _mean(outcomes: Sequence[Outcome]) -> float:
    """The mean share found over the best 1, 4 and 8: of people's questions and of the kinds of
    planted ones, which count as much together.
    """
    means = {kind: sum(found[:3]) / 3 for kind, found in recalls(outcomes).items()}
    asked = [means.pop("asked")] if "asked" in means else []
    planted = [sum(means.values()) / len(means)] if means else []
    return sum(asked + planted) / len(asked + planted)


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
    contexts: Sequence[AskedContext] = (),
    windows: int = 16,
    seed: int = 0,
    report: Report = lambda line: None,
) -> Adaptation:
    """The adaptation with the score_range that answers most; the wider of two that answer as many.

    reader: reads with this adaptation's selector. Three questions are asked for each of so many
    windows: people's about held-out `contexts`, or without these about facts planted in `texts`.
    One that answers nothing keeps its range. Raises InvalidInput for texts that are too short.
    """
    if contexts:
        some = drawn(split_titles(contexts, seed)[1], _CONTEXTS * windows, seed)
    else:
        some = planted_questions(texts, _PLANTED * windows, "held_out", seed + 1, facts_only=True)
    every = [_expected(asked) for one in some for asked in one.questions if asked.answers]
    asked = Random(seed).sample(every, min(3 * windows, len(every)))
    with TemporaryDirectory(prefix="memstore-", ignore_cleanup_errors=True) as directory:
        signature, keeps = reader.signature, reader.keeps
        with MemoryStore.create(Path(directory) / "m", signature, selector=keeps) as store:
            report(f"reading {len(some)} texts into a memory")
            reader.ingest("\n\n".join(one.context for one in some), store, name="calibration")
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


def _expected(asked: AskedQuestion) -> tuple[str, str, str]:
    """A question, how its answer begins, and what has to follow."""
    answer = asked.answers[0]
    if not isinstance(asked, PlantedQuestion):
        return asked.question, "", answer
    if answer[0].isdigit():  # the space before a number is a token of its own
        return asked.question, f"{asked.begun} ", answer
    return asked.question, asked.begun, f" {answer}"


@torch.no_grad()
def _answers(
    reader: PassageAPI,
    store: MemoryStore,
    asked: Sequence[tuple[str, str, str]],
    score_range: float,
) -> Answers:
    """asked: as `_expected` gives them."""
    right, passages = 0, 0
    for question, beginning, answer in asked:
        with reader.session(store, top_k=_TOP_K, score_range=score_range) as session:
            state = session.ask(question, lambda: None)
            passages += len(session.chosen)
            begun, value = map(reader.tokenizer.encode, (beginning, answer))
            states = torch.cat([state[None], session.feed([*begun, *value[:-1]])])[-len(value) :]
            logits = session.logits(states)
            if session.first_logits is not None and not begun:
                logits[0] = session.first_logits  # without a refusal
            right += logits.argmax(-1).tolist() == value
    return Answers(score_range, right, len(asked), passages / len(asked))
