"""The decoder of landmark models with another memory: the same layers and weights, and what the
memory itself learns beside them.
"""

import torch
from torch import Tensor, nn

from benchmarks.baselines.config import MemoryConfig
from benchmarks.baselines.infini import Gates, InfiniPast
from benchmarks.baselines.memorizing import MemorizingPast, Retrieval
from benchmarks.baselines.past import FullPast, NoPast, Past
from benchmarks.baselines.transformer_xl import CachedPast
from memstore.model.landmark.transformer import ModelConfig, Transformer


class BaselineTransformer(Transformer):
    """A Transformer whose layers see a Past. One seed gives the same layers for every kind of
    memory.
    """

    def __init__(self, config: ModelConfig, memory: MemoryConfig) -> None:
        """Raises InvalidConfig."""
        super().__init__(config)
        self.memory_config = memory.of(config)
        learned = {"infini": Gates, "memorizing": Retrieval}.get(memory.kind)
        self.memory: nn.Module | None = learned and learned(config)

    @property
    def segment(self) -> int:
        """Tokens of a segment."""
        assert self.memory_config.segment is not None
        return self.memory_config.segment

    def begin(self, cache: int | None = None) -> Past:
        """The empty past of texts that are read side by side. cache: tokens, instead of the
        configuration's.
        """
        chosen, learned = self.memory_config, self.memory
        kept = chosen.cache if cache is None else cache
        assert kept is not None
        if isinstance(learned, Gates):
            return InfiniPast(self, learned)
        if isinstance(learned, Retrieval):
            return MemorizingPast(self, kept, chosen, learned)
        if chosen.kind == "transformer-xl":
            return CachedPast(self, kept)
        return (FullPast if chosen.kind == "full" else NoPast)(self)

    def read(self, ids: Tensor, past: Past) -> Tensor:
        """Read ids [B, T] after what `past` has read -> states [B, T, hidden].

        It reads in segments. A last segment that is not full stays open.
        """
        if not ids.shape[1]:
            return self.norm.weight.new_zeros(*ids.shape, self.config.hidden_size)
        states, start = [], 0
        while start < ids.shape[1]:
            piece = ids[:, start : start + self.segment - past.length]
            states.append(self.hidden(piece, past.attend, enter=past.enter))
            past.advance(piece.shape[1])
            if past.length == self.segment:
                past.end_segment()
            start += piece.shape[1]
        return torch.cat(states, 1)
