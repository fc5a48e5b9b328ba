"""What training computes: whole windows by landmark attention, and the loss of predictions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.kernels.api import grouped_softmax_attention
from memstore.model.adapter import Attend, Shape
from memstore.model.lookup_settings import LookupSettings
from memstore.model.rotary import Rope


class Trainee(Protocol):
    """A decoder that attends by landmarks, differentiable: a Transformer, or a Hugging Face decoder
    (memstore.hf.landmark_decoder).
    """

    shape: Shape
    lookup: LookupSettings  # what it will be read with
    rope: Rope
    landmark_id: int

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""

    def cmt_keys(self) -> Sequence[Tensor] | None:
        """The context miss token's key of every layer, [Hkv, D], at position -1; None for a model
        without one.
        """

    def hidden(self, ids: Tensor, attend: Attend) -> Tensor:
        """As ModelAdapter.hidden."""

    def logits(self, hidden: Tensor, /) -> Tensor:
        """States [n, hidden_size] -> next-token logits [n, vocabulary]."""


@dataclass(frozen=True)
class WindowMemory:
    """One layer's blocks of W encoded windows, as they would be stored.

    keys: [W, Hkv, nb, l + 1, D], rotated by the offset inside the block only, the landmark key
    last. values: [W, Hkv, nb, l, D].
    """

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Negatives:
    """Blocks of one token each that a chunk should not choose; they compete with what it may read.

    keys, values: [Hkv, N, D], landmark keys and the value that each block stands for.
    """

    keys: Tensor
    values: Tensor


def encode_windows(
    model: Trainee,
    ids: Tensor,
    controlled: Tensor | None = None,
    jumps: Tensor | None = None,
    *,
    cmt: bool = True,
    triton: bool | None = None,
) -> tuple[Tensor, list[WindowMemory]]:
    """Whole windows by grouped-softmax attention at true positions.

    ids: [W, T], T a multiple of block_size + 1. controlled: [W, nb] bool, blocks under the context
    miss gate. jumps: [W, nb] extra positions skipped before each block (the paper's appendix E), or
    None. cmt: whether the context miss token takes part (a model learns to retrieve before it
    learns to gate). triton: as for `grouped_softmax_attention`. All tensors are on the model's
    device. Returns hidden states [W, T, hidden] and each layer's blocks.
    """
    shape, rope = model.shape, model.rope
    b, num_blocks = shape.stride, ids.shape[1] // shape.stride
    positions = torch.arange(ids.shape[1], device=ids.device)
    like = torch.empty(0, dtype=model.dtype, device=ids.device)
    in_block = rope.angles_at(positions % b, like)
    if jumps is not None:
        positions = (positions + jumps.cumsum(1).repeat_interleave(b, 1))[:, None]
    in_window = rope.angles_at(positions, like)
    scale = shape.head_dim**-0.5
    cmt_keys = model.cmt_keys() if cmt else None
    memory: list[WindowMemory] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        blocks = v.unflatten(2, (num_blocks, b))[:, :, :, : shape.block_size]
        memory.append(WindowMemory(rope.rotate(k, *in_block).unflatten(2, (num_blocks, b)), blocks))
        k_cmt = None if cmt_keys is None else cmt_keys[layer]
        return grouped_softmax_attention(
            rope.rotate(q * scale, *in_window),
            rope.rotate(k, *in_window),
            v,
            shape.block_size,
            k_cmt=k_cmt,
            controlled=controlled,
            triton=triton,
        )

    return model.hidden(ids, attend), memory


def negatives_of(memory: list[WindowMemory], token: int) -> list[Negatives]:
    """Every block's landmark key with the value of its content token `token`, in the order window,
    block.
    """
    return [
        Negatives(
            layer.keys[:, :, :, -1].transpose(0, 1).flatten(1, 2),
            layer.values[:, :, :, token].transpose(0, 1).flatten(1, 2),
        )
        for layer in memory
    ]


@dataclass(frozen=True)
class Loss:
    """total: weighted sum of cross entropies; weight: sum of the weights; correct, answers: answer
    tokens right, and in all.

    lookups_correct, lookups: the same of the tokens that weigh more than 1, the first of each
    answer.
    """

    total: Tensor
    weight: Tensor
    correct: Tensor
    answers: int
    lookups_correct: Tensor
    lookups: int


def next_token_loss(model: Trainee, hidden: Tensor, ids: Tensor, weights: Tensor) -> Loss:
    """Weighted next-token cross entropy with the landmark rules of docs/appendix/method.md section
    7.

    ids, weights: [B, T]; a token's weight is that of predicting it (0 for landmarks). The token
    before a landmark predicts the token after it, and so does the landmark itself. Tokens of weight
    1 or more are answers and are counted.
    """
    targets, target_weights = ids[:, 1:], weights[:, 1:]
    before_landmark = targets == model.landmark_id
    later_ids, later_weights = F.pad(targets[:, 1:], (0, 1)), F.pad(target_weights[:, 1:], (0, 1))
    targets = torch.where(before_landmark, later_ids, targets)
    target_weights = torch.where(before_landmark, later_weights, target_weights)
    rows = target_weights > 0
    logits = model.logits(hidden[:, :-1][rows]).float()
    targets, target_weights = targets[rows], target_weights[rows]
    entropy = F.cross_entropy(logits, targets, reduction="none")
    answers = target_weights >= 1
    right, first = logits.detach().argmax(-1) == targets, target_weights > 1
    return Loss(
        (entropy * target_weights).sum(),
        target_weights.sum(),
        right[answers].sum(),
        int(answers.sum()),
        right[first].sum(),
        int(first.sum()),
    )
