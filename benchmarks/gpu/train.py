"""Whole training steps of the landmark model at preset paper, by the kernel and by torch's path."""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu.part import Case, Row, Setting
from benchmarks.speed.train import Training, measure, peak_tflops
from memstore.model.landmark.config import PRESETS


def cases(setting: Setting) -> list[Case]:
    shapes = [(66, 1)] if setting.tiny else [(512, 64), (2048, 4), (2048, 16), (8192, 4)]
    return [
        (f"{windows} x {length}", partial(steps, setting, length, windows))
        for length, windows in shapes
    ]


def steps(setting: Setting, length: int, windows: int) -> Iterator[Row]:
    """See benchmarks/speed/train.py, of which this is one length."""
    paths = {"kernel": True, "reference": False} if setting.cuda else {"reference": False}
    training = Training(PRESETS["paper" if setting.cuda else "test"], setting.place, setting.seed)
    training.draw(windows, max(1, length // training.config.stride))
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
        operations = result["tokens"] * sum(result["flops_of_a_token"].values())
        yield Row(what, name, path["seconds"], operations, note=note)
    if not setting.cuda:
        yield Row(what, "kernel", note="in a whole model on CUDA only; alone: correct, softmax")
    yield Row(what, "the optimisers alone", result["optimiser_seconds"])
    if setting.cuda:
        torch.cuda.empty_cache()
