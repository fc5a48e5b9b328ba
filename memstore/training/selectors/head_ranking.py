"""Finding pointer heads: every query head is ranked by how well it points at planted facts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from memstore.model.passages.selectors.captured_activations import Captures
from memstore.model.passages.selectors.pointer_heads import DISTANCE, Rotate
from memstore.training.selectors.states import Walk
from memstore.training.selectors.windows import Question, Window, firsts

_ROWS = 256  # query rows scored at once
_KINDS = frozenset({"literal", "key"})  # reworded questions are found by other heads, and rarely


class RankedHead(NamedTuple):
    """A query head and the mean reciprocal rank of the passages that answer, among all."""

    layer: int
    head: int
    reciprocal_rank: float


def rank_heads(
    windows: Sequence[Window],
    walk: Walk,
    layers: int,
    rotate: Rotate,
    kinds: frozenset[str] = _KINDS,
    report: Callable[[int, int], None] | None = None,
) -> list[RankedHead]:
    """All query heads of `layers` layers, best first, by the score of `PointerHeads` on questions
    of these kinds over the passages of all windows.

    Memory: the keys of all windows in float16. report: told (windows read, of how many).
    """
    captures = Captures(heads=tuple(range(layers)))
    keys: dict[int, list[Tensor]] = {layer: [] for layer in captures.heads}
    queries: dict[int, list[Tensor]] = {layer: [] for layer in captures.heads}
    asked: list[tuple[int, Question]] = []
    for number, (window, before) in enumerate(zip(windows, firsts(windows), strict=True)):
        for passage in walk(window.passages, captures):
            offsets = torch.arange(len(passage.ids))
            for layer in captures.heads:
                k = passage.k[layer]
                keys[layer].append(rotate(layer, k, offsets.to(k.device)).half().cpu())
        questions = [question for question in window.questions if question.kind in kinds]
        rows = walk([question.lead + question.ids for question in questions], captures)
        for question, row in zip(questions, rows, strict=True):
            positions = torch.full((len(question.ids),), DISTANCE)
            for layer in captures.heads:
                own = row.q[layer][:, len(question.lead) :]
                queries[layer].append(rotate(layer, own, positions.to(own.device)).half().cpu())
            asked.append((before, question))
        if report:
            report(number + 1, len(windows))
    same = _same(asked)
    ranked = []
    for layer in captures.heads:
        shares = _shares(queries.pop(layer), keys.pop(layer))
        for head in range(shares.shape[0]):
            found = [
                1 / (1 + _rank(shares[head, i], before, question, same))
                for i, (before, question) in enumerate(asked)
            ]
            ranked.append(RankedHead(layer, head, sum(found) / len(found)))
    return sorted(ranked, key=lambda head: -head.reciprocal_rank)


def _shares(questions: Sequence[Tensor], passages: Sequence[Tensor]) -> Tensor:
    """Rotated queries [H, R, D] of each question and keys [Hkv, n, D] of each passage -> the sum
    over a question's rows of their softmax over passages, float32 [H, questions, passages].
    """
    rows, held = torch.cat(list(questions), dim=1), torch.cat(list(passages), dim=1)
    heads, total, width = rows.shape
    group = heads // held.shape[0]
    starts = np.cumsum([0, *(part.shape[1] for part in passages[:-1])])
    lengths = torch.tensor([part.shape[1] for part in questions])
    owner = torch.arange(len(questions)).repeat_interleave(lengths)
    out = torch.zeros(heads, len(questions), len(passages))
    for head in range(heads):
        own = held[head // group].float().T.contiguous()
        for first in range(0, total, _ROWS):
            piece = rows[head, first : first + _ROWS].float() * width**-0.5
            best = np.maximum.reduceat((piece @ own).numpy(), starts, axis=1)
            out[head].index_add_(
                0, owner[first : first + _ROWS], torch.from_numpy(best).softmax(-1)
            )
    return out


def _same(asked: Sequence[tuple[int, Question]]) -> dict[str, set[int]]:
    same: dict[str, set[int]] = {}
    for before, question in asked:
        passages = {before + passage for passage in question.touched}
        same.setdefault(question.key, set()).update(passages)
    return same


def _rank(shares: Tensor, before: int, question: Question, same: dict[str, set[int]]) -> int:
    """How many passages that do not answer have a greater share than the best that does; before:
    passages of the windows before the question's.
    """
    right = [before + passage for passage in question.touched]
    above = shares > shares[right].max()
    above[list(same[question.key])] = False
    return int(above.sum())
