"""Attention and search as inference and training call them, and the choice of their implementation.

Each call has the signature and docstring of its reference in torch. On a CUDA device with Triton a
kernel of the same signature runs instead, unless it cannot take the tensors or is known to be
slower. The environment variable MEMSTORE_KERNELS, read once, overrides that: `reference` never uses
Triton; `triton` always does, for tensors on the CPU by Triton's interpreter (TRITON_INTERPRET=1,
for tests).

A layer step runs `local_attention` first, because the gate must be known before anything is
searched; `landmark_topk` for the rows whose gate is open; and `memory_attention`, which adds the
retrieved blocks to the local result (softmax parts merge exactly, so the chunk is never scored
twice). Training reads whole windows by `grouped_softmax_attention`. Queries arrive scaled by
1/sqrt(D) and rotated; nothing here knows positions, documents or tiers.
"""

import os
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from memstore.kernels import reference
from memstore.kernels.reference import NEG, Hits, LocalAttention

__all__ = [
    "NEG", "Hits", "LocalAttention",
    "grouped_softmax_attention", "landmark_topk", "local_attention", "memory_attention",
]  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")

_MOST_IN_REGISTERS = 64  # of top_k, that the search kernel keeps
# The kernel multiplies float32 without tensor cores: of 256 rows and 64K keys torch takes .29 of
# its time (H200), where all scores may be written.
_ROWS, _SCORES = 16, 1 << 30  # rows of float32; bytes of their scores, of which torch has a few


def use_triton(*tensors: Tensor) -> bool:
    """Are these tensors for a Triton kernel? Never in float64, which kernels do not support.

    Raises ValueError for a MEMSTORE_KERNELS that is neither triton nor reference.
    """
    chosen = _chosen()
    wanted = chosen == "triton" or (chosen == "" and tensors[0].is_cuda)
    return wanted and all(x.dtype != torch.float64 for x in tensors)


@lru_cache(maxsize=1)
def _chosen() -> str:
    chosen = os.environ.get("MEMSTORE_KERNELS", "")
    if chosen not in ("", "triton", "reference"):
        raise ValueError(
            f"MEMSTORE_KERNELS is {chosen!r}; set it to triton or reference, or leave it out"
        )
    return chosen or ("" if find_spec("triton") else "reference")


def _by_triton(
    by_torch: Callable[P, R], module: str, fits: Callable[..., bool] = lambda *_, **__: True
) -> Callable[P, R]:
    """`by_torch`, or for tensors that go to Triton the function of the same name in `module`.

    The first two arguments decide. fits: can the kernel take these arguments?
    """

    @wraps(by_torch)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[:2]
        if use_triton(*first) and fits(*args, **kwargs):
            kernel: Callable[P, R] = getattr(import_module(module), by_torch.__name__)
            return kernel(*args, **kwargs)
        return by_torch(*args, **kwargs)

    return call


def _searched_by_kernel(
    q: Tensor, landmarks: Tensor, ranges: Sequence[tuple[int, int]], top_k: int, **_: object
) -> bool:
    wide = q.is_cuda and q.dtype == torch.float32 and q.shape[-2] > _ROWS
    keys = sum(end - start for start, end in ranges)
    return top_k <= _MOST_IN_REGISTERS and not (wide and q[..., 0].numel() * keys * 4 <= _SCORES)


local_attention = reference.local_attention
memory_attention = _by_triton(
    reference.memory_attention, "memstore.kernels.triton_memory_attention"
)
landmark_topk = _by_triton(
    reference.landmark_topk, "memstore.kernels.triton_landmark_topk", _searched_by_kernel
)


def grouped_softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_size: int,
    *,
    k_cmt: Tensor | None = None,
    controlled: Tensor | None = None,
    triton: bool | None = None,
) -> Tensor:
    """Grouped softmax of whole windows, differentiable in q, k, v and k_cmt
    (docs/appendix/method.md sections 2, 3 and 7).

    q: [B, H, T, D] rotated and scaled; k, v: [B, Hkv, T, D]; k_cmt: [Hkv, D]; block_size as for
    `local_attention`.
    controlled: [B, T // (block_size + 1)] bool, blocks that share the gate's mass; None = all free.
    triton: True or False to choose the implementation; None for what `use_triton` says. Memory
    grows with T in the Triton kernels, with T * T in torch, where blocks too large for a tile go
    (`triton_grouped_softmax_tile.supports`).
    Returns [B, H, T, D].
    """
    if use_triton(q, k, v) if triton is None else triton:
        from memstore.kernels import triton_grouped_softmax, triton_grouped_softmax_tile

        if triton_grouped_softmax_tile.supports(q, k, block_size):
            attend = triton_grouped_softmax.grouped_softmax_attention
            return attend(q, k, v, block_size, k_cmt=k_cmt, controlled=controlled)
    return local_attention(q, k, v, block_size, k_cmt=k_cmt, controlled=controlled).output


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a CUDA device.

    8 for any other device, so that tests in Triton's interpreter split their work, too.
    """
    if device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count
