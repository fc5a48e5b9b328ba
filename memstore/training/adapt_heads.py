"""Finding pointer heads: every query head is ranked by how well it points at planted facts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memstore.model.selector_heads import DISTANCE, Rotate
from memstore.model.tapped import Taps
from memstore.training.adapt_states import Walk
from memstore.training.selector_windows import Question, Window

_ROWS = 256  # query rows scored at once
_KINDS = frozenset({"literal", "key"})  # reworded questions are found by other heads, and rarely


class RankedHead(NamedTuple):
    """A query head and the mean reciprocal rank of the blocks that answer, among all blocks."""

    layer: int
    head: int
    reciprocal_rank: float


def rank_heads(
    windows: Sequence[Window],
    walk: Walk,
    layers: int,
    rotate: Rotate,
    block_size: int = 64,
    kinds: frozenset[str] = _KINDS,
    report: Callable[[int, int], None] | None = None,
) -> list[RankedHead]:
    """All query heads of `layers` layers, best first, by the score of `PointerHeads` on questions
    of these kinds over the blocks of all windows.

    Memory: the keys of all windows in float16. report: told (windows read, of how many).
    """
    taps = Taps(heads=tuple(range(layers)))
    keys: dict[int, list[Tensor]] = {layer: [] for layer in taps.heads}
    queries: dict[int, list[Tensor]] = {layer: [] for layer in taps.heads}
    asked: list[tuple[int, Question]] = []
    for number, window in enumerate(windows):
        shown = walk([window.ids], taps)[0]
        offsets = torch.arange(len(window.ids)) % block_size
        for layer in taps.heads:
            k = shown.k[layer]
            keys[layer].append(rotate(layer, k, offsets.to(k.device)).half().cpu())
        questions = [question for question in window.questions if question.kind in kinds]
        for question in questions:
            row = walk([question.lead + question.ids], taps)[0]
            positions = torch.full((len(question.ids),), DISTANCE)
            for layer in taps.heads:
                own = row.q[layer][:, len(question.lead) :]
                queries[layer].append(rotate(layer, own, positions.to(own.device)).half().cpu())
            asked.append((number, question))
        if report:
            report(number + 1, len(windows))
    per_window = len(windows[0].ids) // block_size
    same = _same(asked, per_window)
    ranked = []
    for layer in taps.heads:
        held = torch.cat(keys.pop(layer), dim=1)  # (Hkv, tokens, D)
        shares = _shares(torch.cat(queries[layer], dim=1), held, block_size, queries.pop(layer))
        for head in range(shares.shape[0]):
            found = [
                1 / (1 + _rank(shares[head, i], number, question, same, per_window))
                for i, (number, question) in enumerate(asked)
            ]
            ranked.append(RankedHead(layer, head, sum(found) / len(found)))
    return sorted(ranked, key=lambda head: -head.reciprocal_rank)


def _shares(rows: Tensor, held: Tensor, block_size: int, parts: Sequence[Tensor]) -> Tensor:
    """Rotated rows [H, R, D] of questions `parts`, keys [Hkv, tokens, D] -> the sum over a
    question's rows of their softmax over blocks, float32 [H, questions, blocks].
    """
    heads, total, width = rows.shape
    group, blocks = heads // held.shape[0], held.shape[1] // block_size
    lengths = torch.tensor([part.shape[1] for part in parts])
    owner = torch.arange(len(parts)).repeat_interleave(lengths)
    out = torch.zeros(heads, len(parts), blocks)
    for head in range(heads):
        own = held[head // group].float().T.contiguous()
        for first in range(0, total, _ROWS):
            piece = rows[head, first : first + _ROWS].float() * width**-0.5
            best = (piece @ own).view(len(piece), blocks, block_size).amax(-1)
            out[head].index_add_(0, owner[first : first + _ROWS], best.softmax(-1))
    return out


def _same(asked: Sequence[tuple[int, Question]], per_window: int) -> dict[str, set[int]]:
    same: dict[str, set[int]] = {}
    for number, question in asked:
        blocks = {number * per_window + block for block in question.touched}
        same.setdefault(question.key, set()).update(blocks)
    return same


def _rank(
    shares: Tensor, number: int, question: Question, same: dict[str, set[int]], per_window: int
) -> int:
    """How many blocks that do not answer have a greater share than the best that does."""
    right = [number * per_window + block for block in question.touched]
    above = shares > shares[right].max()
    above[list(same[question.key])] = False
    return int(above.sum())
