"""Whole training steps of the landmark model at preset paper, by the kernel and by torch's path.

A step is that of `memstore train` in a stage of whole windows: forward in bfloat16 autocast
(float32 on a CPU that is not faster at it), loss, backward, clipping, Muon and AdamW. Both paths
train the same model on the same windows of random token ids, taken in turns (A B B A ...), the
device waited for around every step; medians after three turns that do not count. Tokens are
positions, landmarks included. Memory is what a step takes at its peak beyond weights and
optimisers' states.

Operations of a token: 6 x parameters in matrix products (those of the layers, and the tied
embedding as the output) + 6 x layers x heads x head_dim x window length (scores and weighted sums
over the causal half, forward and backward). What is computed beyond that is not counted.
"""

import time
from collections.abc import Iterator
from functools import partial
from statistics import median

import torch
from torch import Tensor

from benchmarks.common.timing import interleaved
from benchmarks.gpu.part import Case, Row, Setting
from memstore.devices import fast_dtype
from memstore.model.landmark.transformer import PRESETS, Transformer
from memstore.training.curriculum import default_curriculum
from memstore.training.objectives import encode_windows, next_token_loss
from memstore.training.train import make_optimizers, update

WARM_UP = 3


def cases(setting: Setting) -> list[Case]:
    shapes = [(66, 1)] if setting.tiny else [(512, 64), (2048, 4), (2048, 16), (8192, 4)]
    return [
        (f"{windows} x {length}", partial(steps, setting, length, windows))
        for length, windows in shapes
    ]


def steps(setting: Setting, length: int, windows: int) -> Iterator[Row]:
    """The rows of one length."""
    training = Training(setting, windows, length)
    paths = {"kernel": True, "reference": False} if setting.cuda else {"reference": False}
    repeats = WARM_UP + (1 if setting.tiny else 8)
    measured = interleaved(
        {name: partial(training.step, triton) for name, triton in paths.items()}, repeats
    )
    shape = training.ids.shape
    for name, times in measured.items():
        taken = median(times[WARM_UP:])
        note = f"{shape.numel() / taken:,.0f} tokens/s"
        if setting.cuda:
            note += f", {training.peak[paths[name]] / 1e9:.2f} GB a step"
        operations = shape.numel() * training.operations
        yield Row(f"a step of {shape[0]} x {shape[1]}", name, taken, operations, note=note)


class Training:
    """A model with its optimisers, and the random windows that a step trains it on."""

    def __init__(self, setting: Setting, windows: int, length: int) -> None:
        config = PRESETS["paper" if setting.cuda else "test"]
        stage = default_curriculum()[0]
        generator = torch.Generator().manual_seed(setting.seed)
        self.setting, self.peak = setting, {True: 0, False: 0}  # bytes, by path
        self.model = Transformer(config)
        self.model.initialise(generator)
        self.model.to(setting.place)
        self.optimizers = make_optimizers(self.model, stage.lr, stage.muon_lr)
        shape = windows, max(1, length // config.shape.stride), config.shape.stride
        ids = torch.randint(config.vocab_size - 2, shape, generator=generator)
        ids[:, :, -1] = config.landmark_id
        self.ids = ids.flatten(1).to(setting.place)
        self.weights = (self.ids != config.landmark_id).float()
        matrices = sum(p.numel() for p in self.model.parameters() if p.dim() == 2)
        width = config.num_layers * config.num_heads * config.head_dim
        self.operations = 6.0 * (matrices + width * self.ids.shape[1])  # of a token

    def loss(self, triton: bool) -> Tensor:
        half = fast_dtype(self.setting.place) == torch.bfloat16
        with torch.autocast(self.setting.place.type, torch.bfloat16, enabled=half):
            hidden, _ = encode_windows(self.model, self.ids, cmt=False, triton=triton)
            loss = next_token_loss(self.model, hidden, self.ids, self.weights)
        return loss.total / loss.weight

    def step(self, triton: bool, _: int) -> float:
        """Seconds of a step; notes the bytes that it took at its peak."""
        held = 0
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if self.setting.cuda:
            torch.cuda.reset_peak_memory_stats(self.setting.place)
            held = torch.cuda.memory_allocated(self.setting.place)
            torch.cuda.synchronize(self.setting.place)
        began = time.perf_counter()
        update(self.model, self.optimizers, self.loss(triton))
        if self.setting.cuda:
            torch.cuda.synchronize(self.setting.place)
            peak = torch.cuda.max_memory_allocated(self.setting.place) - held
            self.peak[triton] = max(self.peak[triton], peak)
        return time.perf_counter() - began
