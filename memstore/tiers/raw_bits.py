"""Tensors and their raw bits: NumPy has no bfloat16, so records hold bits as integers of the same
width.
"""

import numpy as np
import torch
from torch import Tensor

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype for a name in memstore.block.KV_DTYPES."""
    found: torch.dtype = getattr(torch, name)
    return found


def raw_view(tensor: Tensor) -> np.ndarray:
    """A tensor's bits as an integer array of the same shape.

    Shares memory with a CPU tensor (a slab can be filled through it); a tensor elsewhere is copied.
    """
    return tensor.detach().cpu().view(_INTEGERS[tensor.element_size()]).numpy()


def from_raw(bits: np.ndarray, dtype: str) -> Tensor:
    """The tensor with these raw bits, of KV dtype `dtype`; shares memory with a writable array."""
    own = bits if bits.flags.writeable else bits.copy()
    return torch.from_numpy(own).view(torch_dtype(dtype))
