"""Grouped softmax of whole windows, forward and backward, beside causal attention by others."""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.common.tables import tokens_text
from benchmarks.gpu.part import Case, Row, Setting
from benchmarks.kernels.training import Sizes, grouped_softmax


def cases(setting: Setting) -> list[Case]:
    lengths = (48,) if setting.tiny else (8192, 32768, 2048)
    sizes = Sizes(heads=2, dim=16, blocks=(7,)) if setting.tiny else Sizes()
    return [(tokens_text(n), partial(measured, setting, n, sizes)) for n in lengths]


def measured(setting: Setting, length: int, sizes: Sizes) -> Iterator[Row]:
    if setting.cuda:
        torch._dynamo.reset()  # or one shape after the other would be one too many to compile
    shape = f"{tokens_text(length)}, {sizes.heads} heads x {sizes.dim}"
    for found in grouped_softmax(setting.meter, length, sizes):
        yield Row(
            f"{found['kernel']}, {shape}",
            found["by"],
            found.get("seconds"),
            found.get("operations", 0),
            found.get("bytes", 0),
            note=found.get("note", ""),
        )
