"""Products of grouped-query heads in torch, and the dtype in which sums are taken: what references
share.
"""

import torch
from torch import Tensor


def accumulate(x: Tensor) -> Tensor:
    """x in the dtype that sums are taken in: float32, or float64 if it is that already."""
    return x if x.dtype == torch.float64 else x.float()


def per_kv_head(q: Tensor, num_kv_heads: int) -> Tensor:
    """[B, H, T, D] -> [B * Hkv, (H / Hkv) * T, D]: the query heads of a KV head become more rows of
    it.
    """
    batch, heads, rows, dim = q.shape
    return q.reshape(batch * num_kv_heads, heads // num_kv_heads * rows, dim)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """Inner products [B, H, T, S] of q [B, H, T, D] with k [B, Hkv, S, D] of each query head's KV
    head.
    """
    return torch.bmm(per_kv_head(q, k.shape[1]), k.flatten(0, 1).transpose(1, 2)).view(
        *q.shape[:3], k.shape[2]
    )


def weighted(weights: Tensor, v: Tensor) -> Tensor:
    """weights [B, H, T, S] times v [B, Hkv, S, D] -> [B, H, T, D]."""
    return torch.bmm(per_kv_head(weights, v.shape[1]).to(v.dtype), v.flatten(0, 1)).view(
        *weights.shape[:3], v.shape[3]
    )
