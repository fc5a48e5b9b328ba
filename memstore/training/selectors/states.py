"""States of a model for windows and questions, computed once and stored in files, so that selectors
are trained and compared in seconds.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from memstore.model.passages.passage_encoding import encode
from memstore.model.passages.passage_protocol import PassageModel
from memstore.model.passages.selector import Captured, Captures, Query, rooted
from memstore.training.selectors.windows import Question, Window, firsts

_PIECE = 16  # windows of a file


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
    """A question of a window, and its rows [first, end) in States.rows.

    Passages are numbered over all windows: right, where the value begins (-1 if none); touched,
    those that the fact reaches into; others, those that answer the same and are not touched.
    """

    question: Question
    window: int
    right: int
    touched: frozenset[int]
    others: frozenset[int]
    first: int
    end: int


@dataclass(frozen=True)
class States:
    """States, root mean square 1, that enter the layers captured.

    ids: [N], of all passages, one passage after another; ends: [P], where each passage ends in
    them. passages: by layer, float16 [N, hidden]. rows: by layer, float16 [R, hidden], those of the
    questions' own words one after another; row_ids: [R].
    """

    ids: Tensor
    ends: Tensor
    passages: dict[int, Tensor]
    rows: dict[int, Tensor]
    row_ids: Tensor
    asked: tuple[Asked, ...]

    def captured(self, asked: Asked) -> Captured:
        """What was captured of a question's own words."""
        rows = {layer: states[asked.first : asked.end] for layer, states in self.rows.items()}
        return Captured(list(asked.question.ids), rows)

    def query(self, asked: Asked) -> Query:
        """A question as passages are searched by it."""
        return Query(self.captured(asked), asked.question.text)

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
    windows: Sequence[Window],
    reader: PassageModel,
    layers: Sequence[int],
    directory: Path,
    report: Callable[[int, int], None] | None = None,
) -> States:
    """Read the passages of windows and their questions, but what `directory` holds already.

    report: called with (windows done, of how many) after every few.
    """
    directory.mkdir(parents=True, exist_ok=True)
    pieces = []
    for first in range(0, len(windows), _PIECE):
        piece = windows[first : first + _PIECE]
        path = directory / f"states-{first:05}.safetensors"
        name = _digest(piece, layers)
        if not _holds(path, name):
            partial = path.with_suffix(".partial")
            save_file(_piece_of(piece, reader, tuple(layers)), partial, {"digest": name})
            partial.replace(path)
        pieces.append(load_file(path))
        if report:
            report(min(first + _PIECE, len(windows)), len(windows))
    passages = [torch.tensor(ids) for window in windows for ids in window.passages]
    asked = _asked(windows)
    return States(
        torch.cat(passages),
        torch.tensor([len(ids) for ids in passages]).cumsum(0),
        {layer: torch.cat([piece[f"passages.{layer}"] for piece in pieces]) for layer in layers},
        {layer: torch.cat([piece[f"rows.{layer}"] for piece in pieces]) for layer in layers},
        torch.tensor([token for one in asked for token in one.question.ids]),
        asked,
    )


def _asked(windows: Sequence[Window]) -> tuple[Asked, ...]:
    placed = []
    same: dict[str, set[int]] = defaultdict(set)  # passages that answer the same, by key
    for number, (window, before) in enumerate(zip(windows, firsts(windows), strict=True)):
        for question in window.questions:
            touched = frozenset(before + passage for passage in question.touched)
            same[question.key] |= touched if question.key else set()
            right = before + question.passage if question.passage >= 0 else -1
            placed.append((question, number, right, touched))
    ends = accumulate(len(question.ids) for question, *_ in placed)
    return tuple(
        Asked(
            question,
            window,
            right,
            touched,
            frozenset(same[question.key] - touched),
            end - len(question.ids),
            end,
        )
        for (question, window, right, touched), end in zip(placed, ends)
    )


def _piece_of(
    piece: Sequence[Window], reader: PassageModel, layers: tuple[int, ...]
) -> dict[str, Tensor]:
    passages = [ids for window in piece for ids in window.passages]
    questions = [question for window in piece for question in window.questions]
    captures = Captures(states=layers)
    shown = captured(reader, passages, captures, asked=False)
    heard = captured(reader, [one.lead + one.ids for one in questions], captures, asked=True)
    tensors = {}
    for layer in layers:
        read = [one.states[layer] for one in shown]
        own = [one.states[layer][len(of.lead) :] for one, of in zip(heard, questions, strict=True)]
        tensors[f"passages.{layer}"] = rooted(torch.cat(read)).half()
        tensors[f"rows.{layer}"] = rooted(torch.cat(own)).half()
    return tensors


def _digest(piece: Sequence[Window], layers: Sequence[int]) -> str:
    return hashlib.blake2b(repr((list(piece), list(layers))).encode(), digest_size=16).hexdigest()


def _holds(path: Path, digest: str) -> bool:
    if not path.is_file():
        return False
    with safe_open(path, "pt") as file:
        return (file.metadata() or {}).get("digest") == digest
