"""Devices to compute on: which there are, and which number format each is faster at."""

import time
from functools import cache

import torch

from memstore.errors import InvalidConfig

# bfloat16 has to win by this much: a forward pass under autocast also pays for its casts.
CLEARLY_FASTER = 1.3

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def usable_device(device: str) -> torch.device:
    """The device of that name; "auto" is the first that this machine has of cuda, mps and cpu.
    Raises InvalidConfig for one that it does not have.
    """
    if device == "auto":
        return torch.device(fastest_device())
    try:
        place = torch.empty(1, device=device).device
        if place.type == "meta":
            raise RuntimeError("it holds no data")
    # torch has no error of its own for this
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0][:150]
        raise InvalidConfig(
            f"device {device!r} cannot be used here ({reason}); choose auto, cuda, mps or cpu"
        ) from error
    return place


def fastest_device() -> str:
    """ "cuda", "mps" or "cpu": the first that this machine has."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def dtype_named(name: str | None) -> torch.dtype | None:
    """float32, bfloat16 or float16; None for "auto" or None, which leaves it to who computes.
    Raises InvalidConfig.
    """
    if name in (None, "auto"):
        return None
    if name not in DTYPES:
        raise InvalidConfig(f"dtype {name!r} is unknown; choose auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def fast_dtype(device: torch.device | str = "cpu") -> torch.dtype:
    """torch.bfloat16 where the device multiplies matrices clearly faster in it, else torch.float32.

    Every CUDA device that we run on does; a CPU is measured, once a process. Without instructions
    for bfloat16 a CPU converts number by number: forty times slower than float32, not faster.
    """
    if torch.device(device).type == "cuda" or bfloat16_gain() >= CLEARLY_FASTER:
        return torch.bfloat16
    return torch.float32


@cache
def bfloat16_gain() -> float:
    """How many times as fast as float32 this CPU multiplies matrices in bfloat16.

    The best of several tries in turn, in the CPU time of this thread: what other processes do in
    between counts for neither. It takes some milliseconds (a quarter of a second on a CPU that is
    slow at bfloat16); the matrices are those of a batch of rows and a small model's MLP.
    """
    formats = (torch.float32, torch.bfloat16)
    rows, weights = torch.ones(256, 128), torch.ones(512, 128)
    operands = {dtype: (rows.to(dtype), weights.to(dtype)) for dtype in formats}
    best = dict.fromkeys(formats, float("inf"))
    with torch.inference_mode():
        for turn in range(6):
            for dtype, pair in operands.items():
                began = time.thread_time()
                torch.nn.functional.linear(*pair)
                if turn:  # the first prepares kernels
                    best[dtype] = min(best[dtype], time.thread_time() - began)
    return best[torch.float32] / best[torch.bfloat16]
