"""Approximate engines of the landmark index, filled with keys that lie as landmark keys do."""

import numpy as np
import torch
from torch import Tensor

from memstore.index import FaissIndex, PackedIndex, Scope, make_index

KV_HEADS, DIM, TOP_K, EACH = 2, 16, 4, 250
DOCUMENTS = 6


def directions(seed: int) -> Tensor:
    """Where queries and keys of every head spread: far in a few directions, little in the
    others.
    """
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(KV_HEADS, DIM, DIM, generator=generator) * torch.linspace(1, 0.05, DIM)[:, None]
    )


def keys(n: int, seed: int = 0) -> Tensor:
    """[n, Hkv, D]: around 20 centres, which lie around a mean far from zero, as landmark keys
    do.
    """
    centres = torch.randn(20, KV_HEADS, DIM, generator=torch.Generator().manual_seed(1234))
    generator = torch.Generator().manual_seed(seed)
    chosen = centres[torch.randint(20, (n,), generator=generator)]
    return 5 + chosen + 0.4 * torch.randn(n, KV_HEADS, DIM, generator=generator)


def queries(rows: int, seed: int = 99) -> Tensor:
    """[H, rows, D] for 2 query heads a KV head, distributed alike whatever the seed."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(KV_HEADS, 2 * rows, DIM, generator=generator) @ directions(5)).reshape(
        2 * KV_HEADS, rows, DIM
    )


def samples() -> dict[tuple[int, int], np.ndarray]:
    """What engines of layer 0 are trained and calibrated with."""
    return {
        (0, head): queries(200, 7).view(KV_HEADS, -1, DIM)[head].numpy() for head in range(KV_HEADS)
    }


def filled(kind: str, documents: int = DOCUMENTS) -> tuple[PackedIndex, Scope]:
    index = make_index(kind, KV_HEADS, DIM)
    for document in range(1, documents + 1):
        index.add(document, 0, 0, keys(EACH, document))
    return index, [(document, 0, EACH) for document in range(1, documents + 1)]


def build(index: PackedIndex) -> None:
    if isinstance(index, FaissIndex):
        index.queries.kept = samples()
        index.build(0, TOP_K)
