"""What one step of a stage computes: batches are drawn, read as windows or as memory and chunks,
and the landmarks of earlier steps compete.
"""

import random
from typing import Any

import torch
from torch import Tensor

from memstore.model.landmark.transformer import Transformer
from memstore.training.batches import MemoryBatch, QuestionBatch, RecallData, WindowBatch, moved
from memstore.training.curriculum import Stage
from memstore.training.objectives import (
    Loss,
    Negatives,
    encode_windows,
    negatives_of,
    next_token_loss,
    read_memory,
)

_NEGATIVE_START = -8.0  # of the log-mass of negatives, where it rises


class Steps:
    """The losses of steps, and what they draw from. Draws are made on the CPU, so that they are the
    same on every device.
    """

    def __init__(self, model: Transformer, data: RecallData, device: torch.device, seed: int):
        self._model, self._data, self._device = model, data, device
        self._rng = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed + 1)
        self.tokens = 0  # that steps have read, landmarks not counted
        # newest first; of each step, one entry a layer
        self._queue: list[list[Negatives]] = []

    def state(self) -> dict[str, Any]:
        """What `restore` needs to go on with the next step."""
        return {
            "data": self._data.state(),
            "tokens": self.tokens,
            "rng": torch.tensor(self._rng.getstate()[1]),
            "generator": self._generator.get_state(),
            "queue": [[(n.keys, n.values) for n in entry] for entry in self._queue],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on as the steps whose `state()` this is."""
        self._data.restore(state["data"])
        self.tokens = state["tokens"]
        self._rng.setstate((3, tuple(state["rng"].tolist()), None))
        self._generator.set_state(state["generator"])
        self._queue = [
            [Negatives(keys.to(self._device), values.to(self._device)) for keys, values in entry]
            for entry in state["queue"]
        ]

    def losses(self, stage: Stage, share: float) -> tuple[Loss, Loss | None]:
        """Of the next step's windows, and of the chunks that read them (None where whole windows
        are all). share: of the stage that is done, 0 to 1.
        """
        return (self._windows if stage.kind == "windows" else self._memory)(stage, share)

    def _controlled(self, stage: Stage, windows: int, blocks: int) -> Tensor | None:
        """[windows, blocks] bool: landmarks under the gate, half of them; None without a gate."""
        if not stage.cmt:
            return None
        return (torch.rand(windows, blocks, generator=self._generator) < 0.5).to(self._device)

    def _jumps(self, stage: Stage, windows: int, blocks: int) -> Tensor | None:
        """[windows, blocks]: positions skipped before each block, none before the first; None
        without jumps.
        """
        if stage.max_jump <= 1:
            return None
        jumps = torch.randint(stage.max_jump, (windows, blocks), generator=self._generator)
        jumps[:, 0] = 0
        return jumps.to(self._device)

    def _count(self, *ids: Tensor) -> None:
        """ids with landmarks [B, blocks * (block_size + 1)] are read in this step."""
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
        jumps = self._jumps(stage, stage.batch, stage.blocks)
        controlled = self._controlled(stage, stage.batch, stage.blocks)
        hidden, _ = encode_windows(self._model, batch.ids, controlled, jumps, cmt=stage.cmt)
        return next_token_loss(self._model, hidden, batch.ids, batch.weights), None

    def _memory(self, stage: Stage, share: float) -> tuple[Loss, Loss]:
        model, top_k = self._model, self._model.lookup.top_k
        memory, questions = self._drawn_memory(stage)
        self._count(memory.ids, questions.ids)
        jumps = self._jumps(stage, stage.memory_windows, stage.memory_blocks)
        controlled = self._controlled(stage, stage.memory_windows, stage.memory_blocks)
        hidden, encoded = encode_windows(model, memory.ids, controlled, jumps, cmt=stage.cmt)
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
        """This step's landmarks and those in the queue, of each layer."""
        layers = [[n, *(entry[i] for entry in self._queue)] for i, n in enumerate(fresh)]
        return [
            Negatives(
                torch.cat([n.keys for n in layer], 1).to(layer[0].keys.dtype),
                torch.cat([n.values for n in layer], 1).to(layer[0].values.dtype),
            )
            for layer in layers
        ]

    def _enqueue(self, stage: Stage, fresh: list[Negatives], pass_key_window: int | None) -> None:
        """Keep this step's landmarks for later steps, but never a pass key's: it would answer the
        next memory's question.
        """
        window = torch.arange(stage.memory_windows).repeat_interleave(stage.memory_blocks)
        keep = window != (-1 if pass_key_window is None else pass_key_window)
        entry = [
            Negatives(n.keys.detach()[:, keep].clone(), n.values.detach()[:, keep].clone())
            for n in fresh
        ]
        held = max(1, stage.queue // (stage.memory_windows * stage.memory_blocks))
        self._queue = [entry, *self._queue][:held]
