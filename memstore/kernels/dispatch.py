"""Which implementation runs: Triton for tensors on a CUDA device where Triton is installed, torch
otherwise, and where a kernel cannot take what it is given or is known to be slower (`fits`).

The environment variable MEMSTORE_KERNELS, read once, overrides that: `reference` never uses Triton;
`triton` always does, which for tensors on the CPU needs Triton's interpreter (TRITON_INTERPRET=1)
and is there for tests.
"""

import logging
import os
from collections.abc import Callable
from functools import lru_cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("memstore")


def by_triton(
    reference: Callable[P, R], module: str, *, fits: Callable[..., bool] = lambda *_, **__: True
) -> Callable[P, R]:
    """`reference`, or for tensors that go to Triton the function of its name in `module`.

    Its first two arguments are the tensors that decide. fits: whether the kernel can take these
    arguments at all.
    """

    @wraps(reference)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[:2]
        if use_triton(*first) and fits(*args, **kwargs):
            kernel: Callable[P, R] = getattr(import_module(module), reference.__name__)
            return kernel(*args, **kwargs)
        return reference(*args, **kwargs)

    return call


def use_triton(*tensors: Tensor) -> bool:
    """Do these go to a Triton kernel? Never in float64, which kernels do not keep.

    Raises ValueError for a MEMSTORE_KERNELS that is neither triton nor reference.
    """
    chosen = _chosen()
    wanted = chosen == "triton" or (chosen == "" and tensors[0].is_cuda and _installed())
    if wanted and any(x.dtype == torch.float64 for x in tensors):
        return False
    _say("Triton" if wanted else "torch", tensors[0].device.type)
    return wanted


@lru_cache(maxsize=1)
def _chosen() -> str:
    chosen = os.environ.get("MEMSTORE_KERNELS", "")
    if chosen not in ("", "triton", "reference"):
        raise ValueError(
            f"MEMSTORE_KERNELS is {chosen!r}; set it to triton or reference, or leave it out"
        )
    return chosen


@lru_cache(maxsize=1)
def _installed() -> bool:
    return find_spec("triton") is not None


@lru_cache
def _say(implementation: str, device: str) -> None:
    """Once for each pair, which is once in a process that computes in one place."""
    _log.info("kernels: %s on %s", implementation, device)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """How many programs a device can run side by side; for the interpreter enough that splits are
    exercised.
    """
    if device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count
