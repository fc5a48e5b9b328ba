"""A lookup: which blocks the rows of a layer step choose, where those stand, and how they score
there (docs/appendix/method.md sections 4 and 5).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from memstore.kernels.api import NEG
from memstore.model.adapter import Shape
from memstore.model.landmark.attention.candidates import Candidates
from memstore.model.landmark.attention.open_chunk import OpenChunk
from memstore.model.landmark.attention.selection import (
    Selection,
    in_range,
    merge,
    select,
    superseding,
)
from memstore.model.lookup_settings import LookupSettings
from memstore.store.memory_store import MemoryStore


@dataclass(frozen=True)
class OpenRows:
    """The rows of a layer step whose gate is open: rows [H, T] bool, how many, and the heads that
    have one.
    """

    rows: Tensor
    count: int
    heads: list[int]

    @classmethod
    def of(cls, rows: Tensor) -> "OpenRows":
        """Count rows [H, T]."""
        counts = [sum(of_head) for of_head in rows.tolist()]
        return cls(rows, sum(counts), [head for head, count in enumerate(counts) if count])


@dataclass
class Lookup:
    """How one session looks up: `candidates` are those of its open chunk.

    exact: the dtype of landmark scores, which choose and weigh blocks. rotated, everywhere: queries
    under every rotation for memory [R, 1, H, T, D]; see OpenChunk.append.
    """

    shape: Shape
    settings: LookupSettings
    store: MemoryStore
    chunk: OpenChunk
    candidates: Candidates
    exact: torch.dtype

    def recent_scores(self, layer_idx: int, rotated: Tensor) -> Tensor | None:
        """Landmark scores [P, H, T, R] of every recent block in every slot; None without any."""
        if not self.candidates.prefix.recent:
            return None
        keys = self.chunk.recent_landmarks(layer_idx).to(self.exact)  # (R, Hkv, D)
        keys = keys.permute(1, 2, 0).repeat_interleave(self.shape.group, 0)  # (H, D, R)
        return rotated[: self.candidates.prefix.size, 0].to(self.exact) @ keys

    def search(
        self, layer_idx: int, rotated: Tensor, near: Tensor | None, opened: OpenRows
    ) -> Selection:
        """The choice among old and recent blocks. near: the recent ones' scores. Raises
        DocumentNotFound.
        """
        shape, settings, prefix = self.shape, self.settings, self.candidates.prefix
        fixed = shape.old_block_distance is not None
        shared = settings.granularity != "per_token_per_head"
        # every old block is scored in one place
        query = rotated[prefix.size if fixed else 0, 0]
        hits = self.store.search_landmarks(
            layer_idx,
            query,
            self.candidates.old,
            settings.top_k,
            return_lse=shared,
            open_rows=opened.rows,
            bias=self.candidates.fading,
        )
        scores, candidates, lse = hits.scores.to(self.exact), hits.candidates, hits.lse
        if near is not None:
            own_slots = torch.arange(prefix.size - prefix.recent, prefix.size, device=near.device)
            recent = near[own_slots].diagonal(dim1=0, dim2=3)  # (H, T, R): each at its own slot
            scores, candidates = merge(scores, candidates, recent, prefix.old, settings.top_k)
            if lse is not None:
                lse = torch.logaddexp(lse.to(self.exact), recent.logsumexp(-1))
        # where no slot depends on it, the order among units is free
        if fixed and near is None and not shared:
            candidates = in_range(scores, candidates, settings.score_range)
            searched_heads = shape.group * len({head // shape.group for head in opened.heads})
            if opened.count < searched_heads * opened.rows.shape[1]:
                candidates = candidates.masked_fill(~opened.rows[..., None], -1)
            return Selection(candidates, scores)
        return select(
            settings.granularity,
            scores,
            candidates,
            lse,
            opened.rows,
            shape.num_kv_heads,
            settings.score_range,
        )

    def place(
        self, layer_idx: int, chosen: Selection, rotated: Tensor, near: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The rotation of every chosen unit [H, T or 1, K], and its landmark score there for every
        row [H, T, K], with what later documents' blocks gain.
        """
        slots, scores = self._place(layer_idx, chosen, rotated, near)
        weight, documents = self.settings.supersede, self.candidates.documents
        if weight and documents:
            scores = scores + superseding(scores, chosen.candidates, documents, weight)
        return slots, scores

    def _place(
        self, layer_idx: int, chosen: Selection, rotated: Tensor, near: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        prefix, rows = self.candidates.prefix, rotated.shape[3]
        fixed = self.shape.old_block_distance is not None
        if fixed and near is None and chosen.scores is not None:
            return torch.full_like(chosen.candidates, prefix.size), chosen.scores
        candidates = chosen.candidates
        present = candidates >= 0
        is_recent = candidates >= prefix.old
        rank = torch.arange(candidates.shape[-1], device=candidates.device)
        # recent ones from here on, this one included
        later = is_recent.flip(-1).cumsum(-1).flip(-1)
        slots = torch.where(is_recent, prefix.size - later, prefix.size if fixed else rank)
        slots = slots.clamp(0, rotated.shape[0] - 1)
        wide = candidates.expand(-1, rows, -1)
        h = torch.arange(wide.shape[0], device=wide.device)[:, None, None]
        t = torch.arange(rows, device=wide.device)[None, :, None]
        if fixed and chosen.scores is not None:
            scores = chosen.scores
        elif prefix.old and (present & ~is_recent).any():
            keys = self.store.landmark_keys(
                layer_idx, self.candidates.old, wide.where(wide < prefix.old, -1)
            ).to(self.exact)
            queries = rotated[slots.expand(-1, rows, -1), 0, h, t]  # (H, T, K, D)
            scores = (queries * keys).sum(-1)
            if self.candidates.fading is not None:
                scores = scores + self.candidates.fading[wide.clamp(0, prefix.old - 1)]
        else:
            scores = rotated.new_full(wide.shape, NEG, dtype=self.exact)
        if near is not None and is_recent.any():
            at_slot = near[
                slots.clamp(max=prefix.size - 1).expand(-1, rows, -1),
                h,
                t,
                (wide - prefix.old).clamp(min=0),
            ]
            scores = torch.where(is_recent.expand_as(wide), at_slot, scores)
        return slots, scores
