"""The decoder of landmark models with another memory: the same layers and weights, and what the
memory itself learns beside them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from memstore.model.config import ModelConfig
from memstore.model.transformer import Transformer
from memstore.rivals.config import MemoryConfig
from memstore.rivals.infini import Gates, InfiniPast
from memstore.rivals.memorizing import MemorizingPast, Retrieval, TensorMemory, TokenMemory
from memstore.rivals.past import Past
from memstore.rivals.plain import FullPast, NoPast
from memstore.rivals.transformer_xl import CachedPast, RelativePast, RelativePositions


class RivalTransformer(Transformer):
    """A Transformer whose layers see a Past. Drawn from one seed, its layers are those of every
    other memory's.
    """

    def __init__(self, config: ModelConfig, memory: MemoryConfig) -> None:
        """Raises InvalidConfig."""
        super().__init__(config)
        self.memory_config = memory.of(config)
        self.memory = _learned(config, self.memory_config)

    @property
    def segment(self) -> int:
        """Tokens of a segment."""
        assert self.memory_config.segment is not None
        return self.memory_config.segment

    def begin(
        self, batch: int = 1, *, cache: int | None = None, memory: TokenMemory | None = None
    ) -> Past:
        """The empty past of `batch` texts. cache: tokens, instead of the configuration's; memory:
        of tokens, kept elsewhere than in tensors.
        """
        chosen, learned = self.memory_config, self.memory
        kept = chosen.cache if cache is None else cache
        assert kept is not None and chosen.layer is not None
        if isinstance(learned, Gates):
            return InfiniPast(self, batch, learned, chosen.update)
        if isinstance(learned, Retrieval):
            tokens = memory or TensorMemory(chosen.top_k, chosen.tokens)
            return MemorizingPast(self, batch, kept, chosen.layer, learned, tokens)
        if isinstance(learned, nn.ModuleList):
            return RelativePast(self, batch, kept, learned)
        if chosen.kind == "transformer-xl":
            return CachedPast(self, batch, kept)
        return (FullPast if chosen.kind == "full" else NoPast)(self, batch)

    def read(self, ids: Tensor, past: Past) -> Tensor:
        """ids [B, T] behind what `past` has read, in segments -> states [B, T, hidden]. A last
        segment that is not full stays open.
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

    def own_rates(self) -> dict[str, float]:
        """Learning rates of parameters that have one of their own, by name."""
        rate = self.memory_config.gate_lr
        names = [name for name, _ in self.named_parameters() if name == "memory.gate"]
        return {} if rate is None else dict.fromkeys(names, rate)

    def configuration(self) -> dict[str, Any]:
        return super().configuration() | {"memory": self.memory_config.to_dict()}


def _learned(config: ModelConfig, memory: MemoryConfig) -> nn.Module | None:
    """The parameters of a memory; None for one without."""
    if memory.kind == "infini":
        return Gates(config)
    if memory.kind == "memorizing":
        return Retrieval(config)
    if memory.kind == "transformer-xl" and memory.positions == "relative":
        return nn.ModuleList(RelativePositions(config) for _ in range(config.num_layers))
    return None


def make(config: ModelConfig, memory: Any) -> Transformer:
    """The decoder that a checkpoint's configuration describes, with whichever memory: see
    memstore.model.checkpoint.load_checkpoint. Raises InvalidConfig.
    """
    if memory is None:
        return Transformer(config)
    return RivalTransformer(config, MemoryConfig.from_dict(memory))
