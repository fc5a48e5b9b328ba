"""The kernels of inference, on data that does not fit the cache: landmark top-k against streaming
the keys once, attention to blocks in their slots, units gathered from page-locked memory.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.part import Case, Row, Setting
from benchmarks.kernels import inference
from benchmarks.kernels.inference import TINY, Sizes


def cases(setting: Setting) -> list[Case]:
    sizes = TINY if setting.tiny else Sizes()
    found: list[Case] = []
    for n in sizes.keys:
        for dtype in (torch.float16, torch.float32):
            name = f"search of {n} keys, {str(dtype)[6:]}"
            found.append((name, partial(searched, setting, sizes, n, dtype)))
    for name, part in (("attention", inference.attention_part), ("gather", inference.gather_part)):
        found.append((name, partial(measured, setting, partial(part, sizes=sizes))))
    return found


def searched(setting: Setting, sizes: Sizes, n: int, dtype: torch.dtype) -> Iterator[Row]:
    from memstore.kernels.triton_landmark_topk import landmark_topk

    yield from measured(
        setting, lambda meter: inference.searches(meter, sizes, n, dtype, landmark_topk)
    )


def measured(setting: Setting, part: Callable[[Any], Iterator[dict[str, Any]]]) -> Iterator[Row]:
    """The rows of a script of benchmarks/kernels, each of its implementations on a line."""
    for found in part(setting.meter):
        needs = (found["operations"], found["bytes"])
        up = "one by one" in found
        called = found.get("called")
        note = "" if called is None else f"{called * 1e6:,.0f} µs a call from Python"
        yield Row(found["what"], "ours", found["seconds"], *needs, up=up, note=note)
        for name in ("torch", "streamed once", "one by one"):
            if name in found:
                operations = 0.0 if name == "streamed once" else needs[0]
                ratio = f"{found[name] / found['seconds']:.2f} of ours"
                yield Row(found["what"], name, found[name], operations, needs[1], up, note=ratio)
