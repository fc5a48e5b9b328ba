"""What FAISS engines propose for a search: which part of a scope they hold, whether asking them
pays, and their candidates, which are scored exactly.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memstore.index.block_rows import Ranges, Remembered, Rows, join, to_candidates, to_rows, total
from memstore.index.faiss.faiss_gpu import GpuHead
from memstore.index.faiss.faiss_head import RESCORED, HeadIndex, selector
from memstore.index.packed import Lookup, gather
from memstore.kernels.api import NEG

_STALE = 1 / 2  # of an engine's rows: with fewer still held by a document it is rebuilt
# the least share of an engine's keys that a scope may have for the engine to be asked
_COVERED = 1 / 4
_A_ROW = 0.45  # what a further query row costs an exact search, of its first


@dataclass
class Built:
    """The engines of one layer, one a KV head, all with the same rows."""

    heads: list[HeadIndex]
    rows: Rows
    trained: int  # rows when it was trained
    scopes: Remembered = field(default_factory=Remembered)
    copies: list[GpuHead] = field(default_factory=list)  # of the heads, on the index's GPU

    @property
    def stale(self) -> bool:
        """Has it outlived what it was trained on?"""
        return self.rows.live < _STALE * self.rows.end or self.rows.end > 4 * self.trained


@dataclass(frozen=True)
class Parts:
    """A scope, divided into what the engines hold and the rest: ranges of rows, and the candidates
    they stand for.
    """

    held: Ranges  # rows of the engines
    held_candidates: Ranges
    rest: Ranges  # rows of the packed keys
    rest_candidates: Ranges
    selector: Any


def divide(built: Built, lookup: Lookup) -> Parts | None:
    """The scope in rows of the engines and the rest in packed rows; None if the engines hold too
    little of it.
    """
    packed = lookup.packed
    held: Ranges = []
    held_candidates: Ranges = []
    rest: Ranges = []
    rest_candidates: Ranges = []
    at = 0
    for document, first, end in lookup.scope:
        have_first, have_end = built.rows.span(document)
        low, high = min(max(first, have_first), end), max(min(end, have_end), first)
        pieces = [(first, low, False), (low, high, True), (high, end, False)]
        for start, stop, in_engine in pieces if low < high else [(first, end, False)]:
            if start < stop:
                rows = (built.rows if in_engine else packed.rows).ranges([(document, start, stop)])
                for some in rows:
                    join(held if in_engine else rest, *some)
                join(held_candidates if in_engine else rest_candidates, at, at + stop - start)
                at += stop - start
    if total(held) < max(1, _COVERED * built.rows.end):
        return None
    return Parts(held, held_candidates, rest, rest_candidates, selector(held, built.rows.end))


def pays(built: Built, parts: Parts, lookup: Lookup) -> bool:
    """Is asking the engines cheaper than the exact search?"""
    each = max(1.0, lookup.rows / len(built.heads))
    coverage = total(parts.held) / built.rows.end
    exact = total(parts.held) * max(1.0, _A_ROW * each)
    asking = sum(head.cost(each, lookup.top_k, coverage) for head in built.heads)
    return asking / len(built.heads) < exact


def propose(built: Built, parts: Parts, lookup: Lookup) -> Tensor:
    """Candidates int64 [H, T, RESCORED * top_k] of the engines, -1 where there is none."""
    q, count = lookup.q, RESCORED * lookup.top_k
    group, coverage = q.shape[0] // len(built.heads), total(parts.held) / built.rows.end
    found = np.full((*q.shape[:2], count), -1, dtype=np.int64)
    numbers = q.float().cpu().numpy()
    opened = None if lookup.open_rows is None else lookup.open_rows.cpu().numpy()
    for number, head in enumerate(built.heads):
        mine = slice(number * group, (number + 1) * group)
        asked = np.ones(found[mine].shape[:2], dtype=bool) if opened is None else opened[mine]
        if asked.any():
            effort = head.effort(lookup.top_k, coverage)
            found[mine][asked] = head.search(numbers[mine][asked], count, effort, parts.selector)
    return to_rows(to_candidates(torch.from_numpy(found), parts.held), parts.held_candidates)


def propose_on_gpu(built: Built, parts: Parts, lookup: Lookup, device: torch.device) -> Tensor:
    """As `propose`, without a copy to the host; all rows are searched, choosing would wait for the
    device.
    """
    q, count = lookup.q, RESCORED * lookup.top_k
    rows = q.to(device).unflatten(0, (len(built.heads), -1))  # (Hkv, group, T, D)
    if not built.copies:
        built.copies = [GpuHead(head, device.index or 0) for head in built.heads]
    found = [
        copy.search(of_head.flatten(0, 1), count, copy.head.effort(lookup.top_k, 1.0))
        for of_head, copy in zip(rows, built.copies)
    ]
    candidates = to_candidates(torch.stack(found).view(*q.shape[:2], count), parts.held)
    return to_rows(candidates, parts.held_candidates)


def rescore(
    q: Tensor,
    keys: Tensor,
    ranges: Ranges,
    candidates: Tensor,
    top_k: int,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The top_k of candidates [H, T, C] (-1 = none, in any order) by their exact scores; of equals
    the newer first.

    bias: added to the scores of the scope's candidates. Returns scores [H, T, top_k] float32 and
    candidates, padded with NEG and -1.
    """
    exact = torch.promote_types(keys.dtype, torch.float32)
    chosen = gather(keys, ranges, candidates).to(exact)  # (H, T, C, D)
    scores = (chosen @ q.to(exact)[..., None])[..., 0]
    if bias is not None:
        scores = scores + bias[candidates.clamp_min(0)]
    scores = scores.masked_fill(candidates < 0, NEG)
    newest = candidates.argsort(-1, descending=True)
    best = scores.gather(-1, newest).sort(dim=-1, descending=True, stable=True)
    candidates, scores = candidates.gather(-1, newest).gather(-1, best.indices), best.values
    missing = top_k - candidates.shape[-1]
    if missing > 0:
        candidates = torch.nn.functional.pad(candidates, (0, missing), value=-1)
        scores = torch.nn.functional.pad(scores, (0, missing), value=NEG)
    return scores[..., :top_k], candidates[..., :top_k]
