"""Inputs of grouped softmax, as what compiles, checks and times it takes them."""

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor


class Gates(TypedDict, total=False):
    """What attention takes besides q, k and v; see `memstore.kernels.api`."""

    k_cmt: Tensor
    controlled: Tensor


@dataclass(frozen=True)
class Windows:
    """Inputs of grouped softmax on whole windows."""

    block_size: int
    length: int
    dim: int
    heads: int
    kv_heads: int
    device: str
    gated: bool = False

    def tensors(
        self, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Gates]:
        """q, k and v [1, H, T, D], and what else attention takes."""

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=self.device, dtype=dtype)

        q, k, v = (
            normal(1, self.length, heads, self.dim).transpose(1, 2)
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )
        q *= self.dim**-0.5
        options: Gates = {}
        if self.gated:
            controlled = (
                torch.rand(1, self.length // (self.block_size + 1), device=self.device) < 0.5
            )
            options = {"k_cmt": normal(self.kv_heads, self.dim), "controlled": controlled}
        return (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), options
