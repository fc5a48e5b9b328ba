"""What a model's layers make of windows and questions, computed once and kept in files, so that
selectors are trained and compared in seconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from memstore.model.selector_learned import rooted
from memstore.model.tapped import Tapped, Taps
from memstore.training.selector_windows import WINDOW, Question, Window

Walk = Callable[[Sequence[Sequence[int]], Taps], list[Tapped]]
"""Reads rows of ids, each after the prefix alone, and shows what `Taps` names of each row."""

_PIECE = 8  # windows of a file
_ROWS = 24  # questions read at once


@dataclass(frozen=True)
class Asked:
    """A question, the window it belongs to, and its rows [first, end) in States.rows."""

    question: Question
    window: int
    first: int
    end: int


@dataclass(frozen=True)
class States:
    """States, root mean square 1, that enter the layers tapped.

    ids: [W, WINDOW]. windows: by layer, float16 [W, WINDOW, hidden]. rows: by layer, float16
    [R, hidden], those of the questions' own words one after another; row_ids: [R].
    """

    ids: Tensor
    windows: dict[int, Tensor]
    rows: dict[int, Tensor]
    row_ids: Tensor
    asked: tuple[Asked, ...]

    def question(self, window: int, place: int) -> Tapped:
        """What was shown of a window's question number `place`, of its own words."""
        asked = [one for one in self.asked if one.window == window][place]
        rows = {layer: states[asked.first : asked.end] for layer, states in self.rows.items()}
        return Tapped(list(asked.question.ids), rows)


def read_states(
    windows: Sequence[Window],
    walk: Walk,
    layers: Sequence[int],
    directory: Path,
    report: Callable[[int, int], None] | None = None,
) -> States:
    """Walk windows and their questions; what `directory` holds already is not read again.

    report: told (windows done, of how many) after every few.
    """
    directory.mkdir(parents=True, exist_ok=True)
    pieces = []
    for first in range(0, len(windows), _PIECE):
        piece = windows[first : first + _PIECE]
        path = directory / f"states-{first:05}.safetensors"
        name = _digest(piece, layers)
        if not _holds(path, name):
            partial = path.with_suffix(".partial")
            save_file(_walk_piece(piece, walk, tuple(layers)), partial, {"digest": name})
            partial.replace(path)
        pieces.append(load_file(path))
        if report:
            report(min(first + _PIECE, len(windows)), len(windows))
    questions = [(i, q) for i, window in enumerate(windows) for q in window.questions]
    asked, end = [], 0
    for window, question in questions:
        asked.append(Asked(question, window, end, end + len(question.ids)))
        end = asked[-1].end
    return States(
        torch.tensor([window.ids for window in windows]),
        {layer: torch.cat([piece[f"windows.{layer}"] for piece in pieces]) for layer in layers},
        {layer: torch.cat([piece[f"rows.{layer}"] for piece in pieces]) for layer in layers},
        torch.tensor([token for _, question in questions for token in question.ids]),
        tuple(asked),
    )


def _walk_piece(piece: Sequence[Window], walk: Walk, layers: tuple[int, ...]) -> dict[str, Tensor]:
    taps = Taps(states=layers)
    shown = [walk([window.ids], taps)[0] for window in piece]
    questions = [question for window in piece for question in window.questions]
    order = sorted(range(len(questions)), key=lambda i: len(questions[i].lead + questions[i].ids))
    rows: dict[int, Tapped] = {}
    todo = iter(order)
    while batch := list(islice(todo, _ROWS)):
        read = walk([questions[i].lead + questions[i].ids for i in batch], taps)
        rows.update(zip(batch, read, strict=True))
    tensors = {}
    for layer in layers:
        whole = [rooted(one.states[layer]) for one in shown]
        tensors[f"windows.{layer}"] = torch.stack(whole).half()
        own = [
            rooted(rows[i].states[layer][len(question.lead) :])
            for i, question in enumerate(questions)
        ]
        tensors[f"rows.{layer}"] = torch.cat(own).half()
    assert all(tensor.shape[1] == WINDOW for name, tensor in tensors.items() if "windows" in name)
    return tensors


def _digest(piece: Sequence[Window], layers: Sequence[int]) -> str:
    return hashlib.blake2b(repr((list(piece), list(layers))).encode(), digest_size=16).hexdigest()


def _holds(path: Path, digest: str) -> bool:
    if not path.is_file():
        return False
    with safe_open(path, "pt") as file:
        return (file.metadata() or {}).get("digest") == digest
