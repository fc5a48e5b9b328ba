"""Texts and questions as a model reads them: their states are computed once and stored in files, so
that selectors are trained and compared in seconds.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from memstore.model.passages.passage_encoding import encode
from memstore.model.passages.repositioned_attention import PassageModel
from memstore.model.passages.selector import Captured, Captures, Query, rooted
from memstore.training.planted import PlantedQuestion
from memstore.training.reading_questions import AskedContext, Example, Examples

_ASKED = 4  # of people's questions about a text
_PIECE = 16  # texts of a file


def captured(
    reader: PassageModel, rows: Sequence[Sequence[int]], captures: Captures, *, asked: bool
) -> list[Captured]:
    """What the reader shows of rows of ids, each read alone after the prefix. asked: the rows are
    questions, otherwise passages; a reading adapter may adapt these alone.
    """
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))  # fuller passes
    given = (rows[row] for row in order)
    adapt = reader.adapted_turns if asked else reader.adapted_passages
    read = encode(reader, given, layers=captures.layers, captures=captures, adapt=adapt)
    found = dict(zip(order, (one.captured for one in read), strict=True))
    return [found[row] for row in range(len(rows))]


@dataclass(frozen=True)
class Asked:
    """A question as it is read, which passages answer it, and its rows [first, end) in States.rows.

    kind, key: as in PlantedQuestion, or "asked" (by people). text: the user's words; ids: of these
    words; lead: ids that are read before them. context: the number of the text. Passages are
    numbered over all texts: right, the one that answers (-1 if none); touched, those that hold the
    answer or are needed for it; others, those that answer the same question about another text.
    """

    kind: str
    key: str
    text: str
    lead: tuple[int, ...]
    ids: tuple[int, ...]
    context: int
    right: int
    touched: frozenset[int]
    others: frozenset[int] = frozenset()
    first: int = 0
    end: int = 0


@dataclass(frozen=True)
class States:
    """States, root mean square 1, that enter the layers captured.

    ids: [N], of all passages, one passage after another; ends: [P], where each passage ends in
    them. passages: by layer, float16 [N, hidden]. rows: by layer, float16 [R, hidden], those of the
    questions' own words one after another; row_ids: [R]. texts: of each text the collection of
    people's questions ("" for planted facts) and the number of the passage after its last.
    """

    ids: Tensor
    ends: Tensor
    passages: dict[int, Tensor]
    rows: dict[int, Tensor]
    row_ids: Tensor
    asked: tuple[Asked, ...]
    texts: tuple[tuple[str, int], ...]

    def captured(self, asked: Asked) -> Captured:
        """What was captured of a question's own words."""
        rows = {layer: states[asked.first : asked.end] for layer, states in self.rows.items()}
        return Captured(list(asked.ids), rows)

    def query(self, asked: Asked) -> Query:
        """A question as passages are searched by it."""
        return Query(self.captured(asked), asked.text)

    def shown(self, passage: int) -> Captured:
        """What was captured of a passage."""
        at = self._place(passage)
        states = {layer: states[at] for layer, states in self.passages.items()}
        return Captured(self.ids[at].tolist(), states)

    def passage(self, layer: int, passage: int) -> Tensor:
        """The states float16 [n, hidden] of a passage."""
        return self.passages[layer][self._place(passage)]

    def _place(self, passage: int) -> slice:
        start = int(self.ends[passage - 1]) if passage else 0
        return slice(start, int(self.ends[passage]))


def read_states(
    contexts: Sequence[AskedContext],
    reader: PassageModel,
    layers: Sequence[int],
    directory: Path,
    *,
    seed: int = 0,
    report: Callable[[int, int], None] | None = None,
) -> States:
    """Read the passages of texts and their questions, but what `directory` holds already.

    A text has at most four of people's questions, of those whose answer a passage holds, and of
    planted ones these and those without an answer. report: called with (texts done, of how many)
    after every few.
    """
    directory.mkdir(parents=True, exist_ok=True)
    examples = Examples(contexts, reader)
    asked = _asked(examples, len(contexts), reader, seed)
    texts, pieces = [], []
    for number, context in enumerate(contexts):
        planted = any(isinstance(one, PlantedQuestion) for one in context.questions)
        texts.append(("" if planted else context.collection, examples.own(number).stop))
    for first in range(0, len(contexts), _PIECE):
        last = min(first + _PIECE, len(contexts))
        passages = [ids for number in range(first, last) for ids in examples.passages(number)]
        questions = [one for one in asked if first <= one.context < last]
        path = directory / f"states-{first:05}.safetensors"
        name = _digest(
            reader.signature, passages, [one.lead + one.ids for one in questions], layers
        )
        if not _holds(path, name):
            partial = path.with_suffix(".partial")
            tensors = _states(passages, questions, reader, tuple(layers))
            save_file(tensors, partial, {"digest": name})
            partial.replace(path)
        pieces.append(load_file(path))
        if report:
            report(last, len(contexts))
    every = [
        torch.tensor(ids) for number in range(len(contexts)) for ids in examples.passages(number)
    ]
    return States(
        torch.cat(every),
        torch.tensor([len(ids) for ids in every]).cumsum(0),
        {layer: torch.cat([piece[f"passages.{layer}"] for piece in pieces]) for layer in layers},
        {layer: torch.cat([piece[f"rows.{layer}"] for piece in pieces]) for layer in layers},
        torch.tensor([token for one in asked for token in one.ids]),
        asked,
        tuple(texts),
    )


def _asked(examples: Examples, contexts: int, reader: PassageModel, seed: int) -> tuple[Asked, ...]:
    """The questions that a selector learns from, in the order of the texts."""
    rng, chosen = Random(seed), list[Example]()
    for number in range(contexts):
        people = []
        for one in examples.of(number):
            if not isinstance(one.asked, PlantedQuestion):
                people += [one] if one.right else []
            elif one.right or not one.asked.answers:
                chosen.append(one)
        chosen += rng.sample(people, min(_ASKED, len(people)))
    asked = [_as_read(example, reader) for example in chosen]
    same: dict[str, set[int]] = defaultdict(set)  # passages that answer the same, by key
    for question in asked:
        same[question.key] |= question.touched if question.key else set()
    placed, first = [], 0
    for question in asked:
        end = first + len(question.ids)
        others = frozenset(same[question.key] - question.touched)
        placed.append(replace(question, others=others, first=first, end=end))
        first = end
    return tuple(placed)


def _as_read(example: Example, reader: PassageModel) -> Asked:
    asked, kind, key = example.asked, "asked", ""
    if isinstance(asked, PlantedQuestion):
        kind, key = asked.kind, asked.key
    ids, words = reader.turn_ids(asked.question, first=True)
    lead, own = tuple(ids[: words.start]), tuple(ids[words.start : words.stop])
    right = min(example.right, key=lambda at: at not in example.holding, default=-1)
    touched = example.holding | set(example.right)
    return Asked(kind, key, asked.question, lead, own, example.context, right, touched)


def _states(
    passages: Sequence[Sequence[int]],
    questions: Sequence[Asked],
    reader: PassageModel,
    layers: tuple[int, ...],
) -> dict[str, Tensor]:
    captures = Captures(states=layers)
    shown = captured(reader, passages, captures, asked=False)
    heard = captured(reader, [one.lead + one.ids for one in questions], captures, asked=True)
    tensors = {}
    for layer in layers:
        read = [one.states[layer] for one in shown]
        own = [one.states[layer][len(of.lead) :] for one, of in zip(heard, questions, strict=True)]
        own.append(read[0][:0])  # texts without a question
        tensors[f"passages.{layer}"] = rooted(torch.cat(read)).half()
        tensors[f"rows.{layer}"] = rooted(torch.cat(own)).half()
    return tensors


def _digest(*read: object) -> str:
    return hashlib.blake2b(repr(read).encode(), digest_size=16).hexdigest()


def _holds(path: Path, digest: str) -> bool:
    if not path.is_file():
        return False
    with safe_open(path, "pt") as file:
        return (file.metadata() or {}).get("digest") == digest
