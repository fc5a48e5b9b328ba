"""Whole training steps of the landmark model at preset paper, by the kernel and by torch's path.

A step is that of `memstore train` in a stage of whole windows: forward in bfloat16 autocast
(float32 on a CPU that is not faster at it), loss, backward, clipping, Muon and AdamW. Both paths
train the same model on the same windows of random token ids (what they say does not change what
they cost), in one process, taken in turns (A B B A ...), the device waited for around every step;
medians after three turns that do not count. Tokens are positions, landmarks included. The losses
are those of both paths before the first step. Memory is what a step takes at its peak beyond
weights and optimisers' states. A path that runs out of the device's memory is reported so and
measured no further.

Model FLOPs of a token: 6 x parameters in matrix products (those of the layers, and the tied
embedding as the output) + 6 x layers x heads x head_dim x window length (scores and weighted sums
over the causal half, forward and backward). What is computed beyond that, such as scores made again
in the backward pass, the context miss gate or Muon's products, is not counted. Utilisation: their
rate over the device's dense bfloat16 peak, known by name for H200, H100 and A100.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.common.tables import spread
from benchmarks.common.timing import paired_ratio
from benchmarks.gpu.part import Case, Row, Setting
from memstore.devices import fast_dtype
from memstore.model.landmark.transformer import PRESETS, ModelConfig, Transformer
from memstore.training.curriculum import default_curriculum
from memstore.training.objectives import encode_windows, next_token_loss
from memstore.training.optimizer import make_optimizers
from memstore.training.train import update

T = TypeVar("T")
WARM_UP = 3
# Dense bfloat16 TFLOP/s of the makers' data sheets; the first name that a device's holds.
PEAKS = {"H200 NVL": 836, "H200": 989, "H100 NVL": 836, "H100 PCIe": 756, "H100": 989, "A100": 312}


def cases(setting: Setting) -> list[Case]:
    shapes = [(66, 1)] if setting.tiny else [(512, 64), (2048, 4), (2048, 16), (8192, 4)]
    return [
        (f"{windows} x {length}", partial(steps, setting, length, windows))
        for length, windows in shapes
    ]


def steps(setting: Setting, length: int, windows: int) -> Iterator[Row]:
    """The rows of one length."""
    paths = {"kernel": True, "reference": False} if setting.cuda else {"reference": False}
    training = Training(PRESETS["paper" if setting.cuda else "test"], setting.place, setting.seed)
    training.draw(windows, max(1, length // training.config.shape.stride))
    peak = peak_tflops(setting.place)
    result = measure(training, paths, 1 if setting.tiny else 8, peak)
    what = f"a step of {windows} x {result['length']}"
    for name, path in result["paths"].items():
        if "out_of_memory" in path:
            yield Row(what, name, note="out of memory")
            continue
        note = f"{path['tokens_a_second']:,.0f} tokens/s, {path['step_bytes'] / 1e9:.2f} GB a step"
        if path["utilisation"] is not None:
            note += f", {path['utilisation']:.3f} of {peak:.0f} TFLOP/s"
        note += f", loss {path['loss_before']:.4f}"
        if name == "kernel" and "reference/kernel" in result:
            note += f", the reference takes {spread(result['reference/kernel'])} times as long"
        operations = result["tokens"] * sum(result["flops_of_a_token"].values())
        yield Row(what, name, path["seconds"], operations, note=note)
    if not setting.cuda:
        yield Row(what, "kernel", note="in a whole model on CUDA only; alone: correct, softmax")
    yield Row(what, "the optimisers alone", result["optimiser_seconds"])
    if setting.cuda:
        torch.cuda.empty_cache()


class Training:
    """A model with its optimisers, and the windows that a step trains it on."""

    def __init__(self, config: ModelConfig, device: torch.device, seed: int) -> None:
        stage = default_curriculum()[0]
        self.config, self.device = config, device
        self.generator = torch.Generator().manual_seed(seed)
        self.model = Transformer(config)
        self.model.initialise(self.generator)
        self.model.to(device)
        self.optimizers = make_optimizers(self.model, stage.lr, stage.muon_lr)
        self.ids = self.weights = torch.empty(0)

    def draw(self, windows: int, blocks: int) -> None:
        """Take random windows [windows, blocks * (block_size + 1)] from here on."""
        ids = torch.randint(
            self.config.vocab_size - 2,
            (windows, blocks, self.config.shape.stride),
            generator=self.generator,
        )
        ids[:, :, -1] = self.config.landmark_id
        self.ids = ids.flatten(1).to(self.device)
        self.weights = (self.ids != self.config.landmark_id).float()

    def loss(self, triton: bool) -> Tensor:
        half = fast_dtype(self.device) == torch.bfloat16
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            hidden, _ = encode_windows(self.model, self.ids, cmt=False, triton=triton)
            loss = next_token_loss(self.model, hidden, self.ids, self.weights)
        return loss.total / loss.weight

    @torch.no_grad()
    def loss_now(self, triton: bool) -> float:
        """Of the weights as they are."""
        return float(self.loss(triton))

    def seconds(self, work: Callable[[], object]) -> float:
        """That work takes, until the device has done it."""
        self.wait()
        began = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - began

    def step(self, triton: bool) -> tuple[float, int]:
        """Seconds of a step, and the bytes that it took at its peak (0 on a CPU, which does not
        count them).
        """
        on_cuda, held = self.device.type == "cuda", 0
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
            held = torch.cuda.memory_allocated(self.device)
        seconds = self.seconds(lambda: update(self.model, self.optimizers, self.loss(triton)))
        return seconds, torch.cuda.max_memory_allocated(self.device) - held if on_cuda else 0

    def optimise(self) -> None:
        """The optimisers' part of a step alone."""
        for optimizer in self.optimizers:
            optimizer.step()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def flops_of_a_token(model: Transformer, length: int) -> dict[str, float]:
    """See the module."""
    config = model.config
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    return {
        "matrices": 6.0 * matrices,
        "attention": 6.0 * config.num_layers * config.num_heads * config.head_dim * length,
    }


def peak_tflops(device: torch.device) -> float | None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((float(peak) for known, peak in PEAKS.items() if known in name), None)


def if_it_fits(work: Callable[[], T]) -> T | None:
    """What the work returns; None where the device's memory does not suffice."""
    try:
        return work()
    except torch.OutOfMemoryError:
        pass
    gc.collect()  # only now, with the error gone, does nothing hold the step's tensors
    torch.cuda.empty_cache()
    return None


def measure(
    training: Training, paths: dict[str, bool], repeats: int, peak: float | None
) -> dict[str, Any]:
    """Every path on the windows that the training has."""
    windows, length = training.ids.shape
    losses = {
        name: if_it_fits(partial(training.loss_now, triton)) for name, triton in paths.items()
    }
    fitting = [name for name in paths if losses[name] is not None]
    steps: dict[str, list[tuple[float, int]]] = {name: [] for name in paths}
    optimiser = []
    for turn in range(WARM_UP + repeats):
        for name in fitting if turn % 2 == 0 else fitting[::-1]:
            taken = if_it_fits(partial(training.step, paths[name]))
            if taken is None:
                fitting = [other for other in fitting if other != name]
            elif turn >= WARM_UP:
                steps[name].append(taken)
        if fitting and turn >= WARM_UP:
            optimiser.append(training.seconds(training.optimise))
    flops = flops_of_a_token(training.model, length)
    result: dict[str, Any] = {
        "windows": windows,
        "length": length,
        "tokens": windows * length,
        "flops_of_a_token": flops,
        "optimiser_seconds": statistics.median(optimiser) if optimiser else None,
        "paths": {},
    }
    for name in paths:
        if name not in fitting:
            result["paths"][name] = {"out_of_memory": True}
            continue
        seconds = statistics.median(taken for taken, _ in steps[name])
        rate = windows * length / seconds
        tflops = rate * sum(flops.values()) / 1e12
        result["paths"][name] = {
            "seconds": seconds,
            "tokens_a_second": rate,
            "tflops": tflops,
            "utilisation": None if peak is None else tflops / peak,
            "step_bytes": max(taken for _, taken in steps[name]),
            "loss_before": losses[name],
        }
    if len(fitting) == 2:
        times = {name: [taken for taken, _ in steps[name]] for name in fitting}
        result["reference/kernel"] = paired_ratio(times["reference"], times["kernel"])
    return result
