"""How many of the passages that a selector finds a model should read: by its answers to questions
of forms and words that no selector was trained with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from memstore.disk.format.text_parts import Passage
from memstore.model.passages.adaptation import Adaptation
from memstore.model.passages.passage_api import PassageAPI
from memstore.model.passages.passage_ingest import passages_of
from memstore.store.memory_store import MemoryStore
from memstore.training.selectors.questions import Fact
from memstore.training.selectors.windows import WindowWriter

Report = Callable[[str], None]

RANGES = (0.0, 0.5, 1.0, 1.5, 2.0)  # standard deviations below the best, that are tried
_TOP_K = 4


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
            tried = [_answers(reader, store, asked, one) for one in RANGES]
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
