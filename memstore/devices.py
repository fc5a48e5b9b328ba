"""Choose the device to compute on, and the faster dtype on it."""

import time
from functools import cache

import torch

from memstore.errors import InvalidConfig

# smallest speedup to choose bfloat16 for: a forward pass under autocast also pays for its casts
_MIN_GAIN = 1.3

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def usable_device(device: str) -> torch.device:
    """The device of this name; "auto" is the first of cuda, mps and cpu that this machine has.
    Raises InvalidConfig for a device that the machine lacks.
    """
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        usable = torch.empty(1, device=device).device
        if usable.type == "meta":
            raise RuntimeError("it holds no data")
    # torch raises any of these for a missing device
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0][:150]
        if reason.startswith("Expected one of"):  # followed by all that torch knows
            reason = "torch does not know it"
        raise InvalidConfig(
            f"device {device!r} cannot be used here ({reason}); choose auto, cuda, mps or cpu"
        ) from error
    return usable


def dtype_named(name: str | None) -> torch.dtype | None:
    """The dtype of this name; None for "auto" or None: the caller chooses.

    Raises InvalidConfig for any but float32, bfloat16 and float16.
    """
    if name in (None, "auto"):
        return None
    if name not in _DTYPES:
        raise InvalidConfig(f"dtype {name!r} is unknown; choose auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def fast_dtype(device: torch.device | str = "cpu") -> torch.dtype:
    """torch.bfloat16 if the device multiplies matrices clearly faster in it, else torch.float32.

    All CUDA devices in use do. A CPU is measured once per process: one without bfloat16
    instructions converts each number and is forty times slower than in float32.
    """
    if torch.device(device).type == "cuda" or bfloat16_gain() >= _MIN_GAIN:
        return torch.bfloat16
    return torch.float32


@cache
def bfloat16_gain() -> float:
    """Speedup of matrix products on this CPU in bfloat16 over float32.

    Alternates the dtypes and takes the best try of each, in CPU time of this thread, so that other
    processes do not count; on one thread, since one that waits for another may spin. Takes a few
    milliseconds (a quarter of a second on a CPU that is slow at bfloat16). The matrices have the
    sizes of a batch of rows and a small model's MLP.
    """
    formats = (torch.float32, torch.bfloat16)
    rows, weights = torch.ones(256, 128), torch.ones(512, 128)
    operands = {dtype: (rows.to(dtype), weights.to(dtype)) for dtype in formats}
    best = dict.fromkeys(formats, float("inf"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            for turn in range(6):
                for dtype, pair in operands.items():
                    began = time.thread_time()
                    torch.nn.functional.linear(*pair)
                    if turn:  # the first prepares kernels
                        best[dtype] = min(best[dtype], time.thread_time() - began)
    finally:
        torch.set_num_threads(threads)
    return best[torch.float32] / best[torch.bfloat16]
