"""What the launches of Triton kernels ask about sizes and devices."""

from functools import lru_cache

import torch


def next_power(n: int) -> int:
    """The least power of two that is n or more."""
    return 1 << max(0, n - 1).bit_length()


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """How many programs a device can run side by side; for the interpreter enough that splits are
    exercised.
    """
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 8
    )
