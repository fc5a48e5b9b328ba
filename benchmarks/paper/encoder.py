"""An encoder by landmarks, for masked language modelling: the decoder's layers, with every token
attending to both sides (arXiv 2305.16300, appendix F).

A block's landmark is visible from before it and from behind it; nothing is causal. There is no
context miss token: its id stands for what is masked.
"""

import torch
from torch import Tensor

from memstore.errors import InvalidInput
from memstore.kernels.products import accumulate, scores, weighted
from memstore.kernels.types import NEG
from memstore.model.landmark.transformer import ModelConfig, Transformer


def both_sides_attention(
    q: Tensor, k: Tensor, v: Tensor, block_size: int, top_k: int | None = None
) -> Tensor:
    """Grouped softmax over whole blocks in both directions, in the adjusted-logit form of
    docs/appendix/method.md section 2.

    q: [B, H, T, D] rotated and scaled; k, v: [B, Hkv, T, D]; T a multiple of block_size + 1, a
    landmark behind every block_size positions. A row's own section is all content of its block;
    every other block, before or behind, gets the mass of its landmark. Nobody sees the landmark of
    their own block. top_k: of the other blocks every row reads those whose landmarks score best
    (None = all). Returns [B, H, T, D].
    """
    b = block_size + 1
    num_blocks = k.shape[2] // b
    raw = accumulate(scores(q, k)).unflatten(-1, (num_blocks, b))  # (B, H, T, nb, b)
    content, mass = raw[..., :block_size], raw[..., block_size]
    block = torch.arange(k.shape[2], device=q.device) // b
    own = block[:, None] == torch.arange(num_blocks, device=q.device)  # (T, nb)
    if top_k is not None and top_k < num_blocks - 1:
        others = mass.masked_fill(own, NEG)
        weakest = others.detach().topk(top_k, -1).values[..., -1:]
        mass = mass.masked_fill(others < weakest, NEG)
    logits = torch.where(own[..., None], content, content.log_softmax(-1) + mass[..., None])
    values = v.unflatten(2, (num_blocks, b))[:, :, :, :block_size].flatten(2, 3)
    return weighted(logits.flatten(-2).softmax(-1), values)


class Encoder(Transformer):
    """The layers of a ModelConfig, reading a text as a whole. Weights are those of a decoder."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.mask_id = config.vocab_size - 1

    def encode(self, ids: Tensor, top_k: int | None = None) -> Tensor:
        """Texts [B, n] of content, n a multiple of block_size -> the states [B, n, hidden_size] of
        their tokens; `logits` of these say what stands where mask_id does.

        top_k: blocks beside its own that every token and head reads; None = all. Raises
        InvalidInput for a text that does not fill its blocks.
        """
        size = self.shape.block_size
        if ids.shape[1] == 0 or ids.shape[1] % size:
            raise InvalidInput(
                f"an encoder reads whole blocks of {size} tokens; {ids.shape[1]} tokens do not "
                "fill theirs: cut the text, or fill it up"
            )
        if top_k is not None and top_k < 1:
            raise InvalidInput(f"top_k must be at least 1, is {top_k}")
        landmarks = ids.new_full((*ids.shape[:1], ids.shape[1] // size, 1), self.landmark_id)
        marked = torch.cat([ids.unflatten(1, (-1, size)), landmarks], 2).flatten(1)
        like = torch.empty(0, dtype=self.dtype, device=ids.device)
        cos, sin = self.rope.angles(0, marked.shape[1], like)
        scale = self.shape.head_dim**-0.5

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = self.rope.rotate(q * scale, cos, sin), self.rope.rotate(k, cos, sin)
            return both_sides_attention(q, k, v, size, top_k).to(v.dtype)

        states = self.hidden(marked, attend)
        return states.unflatten(1, (-1, size + 1))[:, :, :size].flatten(1, 2)
