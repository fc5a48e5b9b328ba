"""Losses of landmark training, of two kinds: whole windows by landmark attention, and chunks that
read encoded windows as a memory.

Chunks take a differentiable form of inference's forward pass (docs/appendix/method.md sections 4
and 7): old blocks are at one fixed distance, a chunk attends to every block of its visible windows
instead of the top k, and landmarks of all other windows are negatives with values.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.kernels.api import NEG, grouped_softmax_attention, local_attention
from memstore.kernels.reference import accumulate, scores, weighted
from memstore.model.landmark.transformer import Transformer
from memstore.training.batches import MemoryBatch, QuestionBatch, RecallData, WindowBatch, moved
from memstore.training.curriculum import Stage

_NEGATIVE_START = -8.0  # of the log-mass of negatives, where it rises


@dataclass(frozen=True)
class WindowMemory:
    """Blocks of W encoded windows in one layer, as a memory stores them.

    keys: [W, Hkv, nb, l + 1, D], rotated by the offset inside the block only, the landmark key
    last. values: [W, Hkv, nb, l, D].
    """

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Negatives:
    """Negative blocks of one token each, which compete with a chunk's visible blocks.

    keys, values: [Hkv, N, D], each block's landmark key and value.
    """

    keys: Tensor
    values: Tensor


def encode_windows(
    model: Transformer,
    ids: Tensor,
    controlled: Tensor | None = None,
    *,
    cmt: bool = True,
    triton: bool | None = None,
) -> tuple[Tensor, list[WindowMemory]]:
    """Encode whole windows by grouped-softmax attention at true positions.

    ids: [W, T], T a multiple of block_size + 1. controlled: [W, nb] bool, blocks under the context
    miss gate. cmt: whether the context miss token takes part (a model learns to retrieve before it
    learns to gate). triton: as for `grouped_softmax_attention`. All tensors are on the model's
    device. Returns hidden states [W, T, hidden] and each layer's blocks.
    """
    shape, rope = model.shape, model.rope
    b, num_blocks = shape.stride, ids.shape[1] // shape.stride
    positions = torch.arange(ids.shape[1], device=ids.device)
    like = torch.empty(0, dtype=model.dtype, device=ids.device)
    in_block = rope.angles_at(positions % b, like)
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
    """Negatives from all blocks, ordered by window and block: the landmark key, and the value of
    content token `token`.
    """
    return [
        Negatives(
            layer.keys[:, :, :, -1].transpose(0, 1).flatten(1, 2),
            layer.values[:, :, :, token].transpose(0, 1).flatten(1, 2),
        )
        for layer in memory
    ]


def read_memory(
    model: Transformer,
    chunks: QuestionBatch,
    memory: Sequence[WindowMemory],
    negatives: Sequence[Negatives] | None = None,
    *,
    bias: float = 0.0,
    cmt: bool = True,
    top_k: int | None = None,
) -> Tensor:
    """Encode chunks that attend to themselves, to some windows as memory, and to negatives.

    chunks: one that continues a window has its last top_k blocks (top_k of the model's lookups) at
    their true positions before it; its other blocks and other windows are at the fixed distance.
    negatives: by layer, landmarks that compete without being visible; bias: 0 or less, is added to
    their scores. top_k: number of visible blocks and negatives together that every (token, head)
    sees, the best ones, as in inference; None: all. All tensors are on the model's device. Returns
    hidden states [C, T, hidden].
    """
    cmt_keys = model.cmt_keys() if cmt else None
    reading = _Reading(model, chunks, memory, negatives, bias, cmt_keys, top_k)
    return model.hidden(chunks.ids, reading.attend)


class _Reading:
    """One forward pass; N is the number of blocks that a chunk may read."""

    def __init__(
        self,
        model: Transformer,
        chunks: QuestionBatch,
        memory: Sequence[WindowMemory],
        negatives: Sequence[Negatives] | None,
        bias: float,
        cmt_keys: Sequence[Tensor] | None,
        top_k: int | None,
    ) -> None:
        shape, rope, device = model.shape, model.rope, chunks.ids.device
        self.shape, self.rope, self.chunks, self.memory = shape, rope, chunks, memory
        self.negatives, self.bias, self.cmt_keys, self.top_k = negatives, bias, cmt_keys, top_k
        b, distance = shape.stride, shape.old_block_distance
        if distance is None:  # slots: the middle ones stand for all
            distance = 5 * b
        length = chunks.ids.shape[1]
        self.num_windows, self.num_blocks = memory[0].keys.shape[0], memory[0].keys.shape[2]
        self.count = chunks.visible.shape[1] * self.num_blocks
        self.recent = recent = min(model.lookup.top_k, self.num_blocks)
        steps = torch.arange(length, device=device)
        positions = (steps + chunks.continues[:, None] * (recent * b))[:, None]  # (C, 1, T)
        like = torch.empty(0, dtype=model.dtype, device=device)
        self.in_chunk = rope.angles_at(positions, like)
        self.old = rope.angles(distance, distance + 1, like)
        self.from_recent = [
            rope.angles((recent - r) * b, (recent - r) * b + length, like) for r in range(recent)
        ]
        self.following = chunks.continues.nonzero().flatten()
        self.columns = torch.arange(self.num_blocks - recent, self.num_blocks, device=device)
        is_recent = torch.zeros(self.count, dtype=torch.bool, device=device)
        is_recent[self.columns] = True
        self.recent_only = chunks.continues[:, None] & is_recent  # (C, N)
        self.scale = shape.head_dim**-0.5

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As Attend: to the chunk's own tokens, and to what it reads through the gate."""
        q, size = q * self.scale, self.shape.block_size
        k_cmt = None if self.cmt_keys is None else self.cmt_keys[layer]
        rotate = self.rope.rotate
        local = local_attention(
            rotate(q, *self.in_chunk), rotate(k, *self.in_chunk), v, size, k_cmt=k_cmt
        )
        searched = layer in self.shape.memory_layers
        if not searched and not len(self.following):
            return local.output
        window, visible = self.memory[layer], self.chunks.visible
        values = window.values[visible].transpose(1, 2)
        values = values.reshape(len(visible), values.shape[1], self.count * size, -1)
        far = rotate(q, *self.old)
        s = self._scores(window, q, far)
        landmark = s[..., size]
        if not searched:
            landmark = landmark.masked_fill(~self.recent_only[:, None, None], NEG)
        negatives = self.negatives[layer] if self.negatives is not None and searched else None
        competing = self._competing(landmark, far, negatives)
        share = competing.softmax(-1)
        weights = s[..., :size].softmax(-1) * share[..., : self.count, None]
        output = weighted(weights.flatten(-2), values)
        if negatives is not None:
            output = output + _shared(share[..., self.count :].to(output.dtype), negatives.values)
        gate, base = local.gate, local.output
        if k_cmt is None:
            gate = (competing.logsumexp(-1) - local.lse).sigmoid()
            base = base * (1 - gate)[..., None].to(base.dtype)
        if not searched:
            gate = gate * self.chunks.continues[:, None, None]
        return base + (output * gate[..., None]).to(base.dtype)

    def _scores(self, window: WindowMemory, q: Tensor, far: Tensor) -> Tensor:
        """[C, H, T, N, b]: scores of queries with every token of every visible block, landmarks
        last; far: the queries at the fixed distance.
        """
        visible, heads, b = self.chunks.visible, window.keys.shape[1], self.shape.stride
        keys = window.keys[visible].transpose(1, 2).reshape(len(visible), heads, self.count * b, -1)
        s = accumulate(scores(far, keys)).unflatten(-1, (self.count, b))
        following = self.following
        if len(following):
            near = torch.stack(
                [self.rope.rotate(q[following], *angles) for angles in self.from_recent], 2
            )
            group = q.shape[1] // heads
            first = self.num_blocks - self.recent
            own = window.keys[visible[following, 0], :, first:].repeat_interleave(group, 1)
            close = accumulate(near @ own.transpose(-1, -2)).transpose(2, 3)  # (F, H, T, R, b)
            s[following[:, None], :, :, self.columns[None]] = close.permute(0, 3, 1, 2, 4)
        return s

    def _competing(self, landmark: Tensor, far: Tensor, negatives: Negatives | None) -> Tensor:
        """[C, H, T, N and negatives]: scores of landmarks that compete for a row's attention."""
        competing = landmark
        if negatives is not None:
            wrong = accumulate(_shared(far, negatives.keys.transpose(-1, -2))) + self.bias
            own = self._own(wrong.shape[-1])[:, None, None]
            competing = torch.cat([landmark, wrong.masked_fill_(own, NEG)], -1)
        if self.top_k is not None and self.top_k < competing.shape[-1]:
            best = competing.detach().topk(self.top_k, dim=-1, sorted=False).values
            competing = competing.masked_fill(competing < best.amin(-1, keepdim=True), NEG)
        return competing

    def _own(self, total: int) -> Tensor:
        """[C, total] bool: negatives that are blocks of a chunk's own visible windows."""
        visible = self.chunks.visible
        mine = torch.zeros(
            len(visible), self.num_windows, dtype=torch.bool, device=visible.device
        ).scatter_(1, visible, True)
        padding = (0, total - self.num_windows * self.num_blocks)
        return F.pad(mine.repeat_interleave(self.num_blocks, 1), padding)


def _shared(x: Tensor, shared: Tensor) -> Tensor:
    """x [C, H, T, n] times a matrix shared by all chunks, [Hkv, n, m] -> [C, H, T, m]: one product
    for each KV head.
    """
    chunks, heads, rows, n = x.shape
    flat = x.transpose(0, 1).reshape(shared.shape[0], -1, n) @ shared
    return flat.view(heads, chunks, rows, -1).transpose(0, 1)


@dataclass(frozen=True)
class Loss:
    """total: weighted sum of cross entropies; weight: sum of the weights. lookups: number of tokens
    with a weight above 1, the first of each answer; correct: how many of them are predicted
    correctly.
    """

    total: Tensor
    weight: Tensor
    correct: Tensor
    lookups: int


def next_token_loss(model: Transformer, hidden: Tensor, ids: Tensor, weights: Tensor) -> Loss:
    """Weighted next-token cross entropy with the landmark rules of docs/appendix/method.md section
    7.

    ids, weights: [B, T]; a token's weight is that of predicting it (0 for landmarks). The token
    before a landmark and the landmark itself both predict the token after the landmark.
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
    first = target_weights > 1
    correct = (logits.detach().argmax(-1) == targets)[first].sum()
    total = (entropy * target_weights).sum()
    return Loss(total, target_weights.sum(), correct, int(first.sum()))


class Steps:
    """Losses of training steps; landmarks of earlier steps are negatives. Batches are drawn on the
    CPU, so that they are equal on every device.
    """

    def __init__(self, model: Transformer, data: RecallData, device: torch.device, seed: int):
        self._model, self._data, self._device = model, data, device
        self._rng = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed + 1)
        self.tokens = 0  # that steps have read, landmarks not counted
        # newest first; of each step, one entry a layer
        self._queue: list[list[Negatives]] = []

    def state(self) -> dict[str, Any]:
        """State for `restore`."""
        return {
            "data": self._data.state(),
            "tokens": self.tokens,
            "rng": torch.tensor(self._rng.getstate()[1]),
            "generator": self._generator.get_state(),
            "queue": [[(n.keys, n.values) for n in entry] for entry in self._queue],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue exactly like the object that returned `state`."""
        self._data.restore(state["data"])
        self.tokens = state["tokens"]
        self._rng.setstate((3, tuple(state["rng"].tolist()), None))
        self._generator.set_state(state["generator"])
        self._queue = [
            [Negatives(keys.to(self._device), values.to(self._device)) for keys, values in entry]
            for entry in state["queue"]
        ]

    def losses(self, stage: Stage, share: float) -> tuple[Loss, Loss | None]:
        """Losses of the next step's windows, and of the chunks that read them (None in stages of
        whole windows). share: finished share of the stage, 0 to 1.
        """
        return (self._windows if stage.kind == "windows" else self._memory)(stage, share)

    def _controlled(self, stage: Stage, windows: int, blocks: int) -> Tensor | None:
        """[windows, blocks] bool: blocks under the gate, half of them; None without a gate."""
        if not stage.cmt:
            return None
        return (torch.rand(windows, blocks, generator=self._generator) < 0.5).to(self._device)

    def _count(self, *ids: Tensor) -> None:
        """Count ids with landmarks [B, blocks * (block_size + 1)] as read in this step."""
        shape = self._model.shape
        self.tokens += sum(x.numel() for x in ids) // shape.stride * shape.block_size

    def _drawn_windows(self, stage: Stage, share: float) -> WindowBatch:
        first, last = stage.gap
        gap = first + (last - first) * min(1.0, share * 1.5)
        return moved(self._data.windows(stage.batch, stage.blocks, gap=gap), self._device)

    def _drawn_memory(self, stage: Stage) -> tuple[MemoryBatch, QuestionBatch]:
        """Windows to remember, and chunks that read them."""
        memory = self._data.memory(stage.memory_windows, stage.memory_blocks)
        chunks, blocks = stage.batch, stage.chunk_blocks
        if self._rng.random() < stage.long_chunks:
            chunks, blocks = chunks // 2, blocks * 2
        recents = self._model.lookup.top_k
        questions = self._data.questions(memory, chunks, blocks, recents=recents)
        return moved(memory, self._device), moved(questions, self._device)

    def _windows(self, stage: Stage, share: float) -> tuple[Loss, None]:
        batch = self._drawn_windows(stage, share)
        self._count(batch.ids)
        controlled = self._controlled(stage, stage.batch, stage.blocks)
        hidden, _ = encode_windows(self._model, batch.ids, controlled, cmt=stage.cmt)
        return next_token_loss(self._model, hidden, batch.ids, batch.weights), None

    def _memory(self, stage: Stage, share: float) -> tuple[Loss, Loss]:
        model, top_k = self._model, self._model.lookup.top_k
        memory, questions = self._drawn_memory(stage)
        self._count(memory.ids, questions.ids)
        controlled = self._controlled(stage, stage.memory_windows, stage.memory_blocks)
        hidden, encoded = encode_windows(model, memory.ids, controlled, cmt=stage.cmt)
        fresh = negatives_of(encoded, self._rng.randrange(model.shape.block_size))
        negatives, bias = None, 0.0
        if self._rng.random() < stage.negatives:
            negatives = self._with_earlier(fresh)
            if stage.negative_ramp:
                bias = _NEGATIVE_START * max(0.0, 1 - share / stage.negative_ramp)
        answered = read_memory(
            model,
            questions,
            encoded,
            negatives,
            bias=bias,
            cmt=stage.cmt,
            top_k=top_k if memory.runs else None,
        )
        self._enqueue(stage, fresh, memory.pass_key_window)
        return (
            next_token_loss(model, hidden, memory.ids, memory.weights),
            next_token_loss(model, answered, questions.ids, questions.weights),
        )

    def _with_earlier(self, fresh: list[Negatives]) -> list[Negatives]:
        """For each layer, this step's landmarks and those in the queue."""
        layers = [[n, *(entry[i] for entry in self._queue)] for i, n in enumerate(fresh)]
        return [
            Negatives(
                torch.cat([n.keys for n in layer], 1).to(layer[0].keys.dtype),
                torch.cat([n.values for n in layer], 1).to(layer[0].values.dtype),
            )
            for layer in layers
        ]

    def _enqueue(self, stage: Stage, fresh: list[Negatives], pass_key_window: int | None) -> None:
        """Add this step's landmarks to the queue, except a pass key's, which would answer the next
        memory's question.
        """
        window = torch.arange(stage.memory_windows).repeat_interleave(stage.memory_blocks)
        keep = window != (-1 if pass_key_window is None else pass_key_window)
        entry = [
            Negatives(n.keys.detach()[:, keep].clone(), n.values.detach()[:, keep].clone())
            for n in fresh
        ]
        held = max(1, stage.queue // (stage.memory_windows * stage.memory_blocks))
        self._queue = [entry, *self._queue][:held]
