"""Fit a Doubt: a model answers questions from memories that lack some of the answers, and a
logistic regression learns to tell when the passages that it read do not hold the answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from memstore.errors import InvalidInput
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.model.lookup_settings import CAUTIONS
from memstore.model.passages.adaptation import Doubt
from memstore.store.memory_store import MemoryStore
from memstore.training.reading_questions import AskedContext, stands_in

_LEFT_OUT = 0.3  # of the contexts: nothing answers their questions
# documents that every second question is asked of, in place of all: the right one if there is one,
# half of them of its article
_FEW = (3, 8, 25, 60)
_SETS = 8  # the largest ones are asked about
_FOLDS = 5
_NOT_READ = 0.5  # doubt wanted where a document holds the answer, but no passage that was read

Case = tuple[tuple[float, float, float, float], float, float]
"""Of a question: Evidence.numbers; 1 if all documents lack the answer, a half if only the passages
that were read do, else 0; and 1 if all documents do, else 0.
"""


def fit_doubt(
    reader: HuggingFacePassageModel,
    contexts: Sequence[AskedContext],
    *,
    questions: int = 2000,
    seed: int = 0,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[Doubt, dict[str, float]] | None:
    """Fit a Doubt to a model that can refuse; also returns the share of unanswerable questions
    refused at each of CAUTIONS, by cross-validation.

    Texts of one source and language make a memory; `questions` are divided among the largest
    memories. Only questions whose text holds the answer verbatim are asked. Returns None for too
    few questions. Raises InvalidInput for a model without an adapter that refuses.
    """
    if reader.refusal is None or reader.adapter is None:
        raise InvalidInput("the model has no reading adapter that refuses; train one first")
    sets: dict[str, list[AskedContext]] = defaultdict(list)
    for one in contexts:
        if asked := [q for q in one.questions if stands_in(q, one.context)]:
            sets[one.collection].append(msgspec.structs.replace(one, questions=asked))
    names = sorted(sets, key=lambda name: (-len(sets[name]), name))[:_SETS]
    sets = {name: sets[name] for name in names if len(sets[name]) >= 1 / _LEFT_OUT}
    cases = list[Case]()
    for number, (name, some) in enumerate(sorted(sets.items())):
        report(f"asking about {name}: {number + 1} of {len(sets)}")
        cases += _ask(reader, some, questions // len(sets), Random(f"{seed} {name}"))
    columns = zip(*cases) if cases else ([], [], [])
    numbers, wanted, unanswered = (torch.tensor(column) for column in columns)
    if min(int(unanswered.sum()), int((1 - unanswered).sum())) < _FOLDS:
        return None
    fold = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed)) % _FOLDS
    told = torch.zeros(len(numbers))
    for held in range(_FOLDS):
        weights, bias = _fit(numbers[fold != held], wanted[fold != held])
        told[fold == held] = (numbers[fold == held] @ weights + bias).sigmoid()
    shares = 1 - torch.tensor(CAUTIONS)
    above = told[unanswered == 0].quantile(shares).tolist()
    weights, bias = _fit(numbers, wanted)
    refused = [float((told[unanswered == 1] > least).float().mean()) for least in above]
    scores = {
        f"unanswerable refused, caution {caution}": share
        for caution, share in zip(CAUTIONS, refused)
    }
    doubt = Doubt(tuple(weights.tolist()), float(bias), tuple(above), reader.adapter.digest)
    return doubt, scores


def _ask(
    reader: HuggingFacePassageModel, contexts: Sequence[AskedContext], count: int, rng: Random
) -> list[Case]:
    """Ask `count` questions of a memory that lacks some of their texts."""
    titles = sorted({one.title for one in contexts})
    place = {title: at for at, title in enumerate(rng.sample(titles, len(titles)))}
    some = sorted(contexts, key=lambda one: place[one.title])[: max(8, count // 2)]
    names = [str(at) for at in range(len(some))]
    out = set(rng.sample(names, round(_LEFT_OUT * len(some))))
    kept = [name for name in names if name not in out]
    asked = [(name, q) for name, one in zip(names, some) for q in one.questions if q.answers]
    cases = list[Case]()
    with TemporaryDirectory(prefix="memstore-", ignore_cleanup_errors=True) as directory:
        store = MemoryStore.create(Path(directory) / "m", reader.signature, selector=reader.keeps)
        with store:
            for name in kept:
                reader.ingest(some[int(name)].context, store, name=name)
            for name, question in rng.sample(asked, min(count, len(asked))):
                like = [n for n in kept if some[int(n)].title == some[int(name)].title]
                size = min(rng.choice(_FEW), len(kept))
                near = rng.sample(like, min(size // 2, len(like)))
                right = [name] if name in kept else []
                few = list(dict.fromkeys([*right, *near, *rng.sample(kept, len(kept))]))[:size]
                with reader.session(store, kept if rng.random() < 0.5 else few) as session:
                    session.ask(question.question, lambda: None)
                    if session.evidence is not None:
                        document = None if name in out else store.document(name).id
                        texts = [
                            reader.tokenizer.decode(passage.ids.tolist())
                            for one in session.chosen
                            if one.document == document
                            for passage in store.passages(one.document, one.block, one.block + 1)
                        ]
                        lacking = not any(stands_in(question, one) for one in texts)
                        # then an answer would be wrong; but so would "no document answers"
                        wanted = 1.0 if name in out else _NOT_READ * lacking
                        cases.append((session.evidence.numbers, wanted, float(name in out)))
    return cases


def _fit(numbers: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [columns] and bias of a logistic regression of wanted [n], 0 to 1, on numbers
    [n, columns].
    """
    mean, deviation = numbers.mean(0), numbers.std(0) + 1e-6
    x = (numbers - mean) / deviation
    weights = torch.zeros(x.shape[1], requires_grad=True)
    bias = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights, bias], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        lost = binary_cross_entropy_with_logits(x @ weights + bias, wanted)
        lost = lost + 1e-3 * weights.square().sum()
        lost.backward()
        return lost

    optimizer.step(loss)
    found = weights.detach() / deviation
    return found, bias.detach() - found @ mean
