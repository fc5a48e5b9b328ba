"""The encoder by landmarks: its grouped softmax against the paper's equations, written down again,
and what each token may see.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.paper.encoder import both_sides_attention
from memstore.kernels.api import grouped_softmax_attention

SIZE, BLOCKS, HEADS, KV_HEADS, DIM = 3, 4, 4, 2, 6
T = BLOCKS * (SIZE + 1)


def drawn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    q = drawn(2, HEADS, T, DIM, seed=0)
    return q, drawn(2, KV_HEADS, T, DIM, seed=1), drawn(2, KV_HEADS, T, DIM, seed=2)


def softmax(values: list[float]) -> list[float]:
    powers = [math.exp(value) for value in values]
    return [power / sum(powers) for power in powers]


def transcribed(q: np.ndarray, k: np.ndarray, v: np.ndarray, top_k: int | None) -> np.ndarray:
    """One head, equations 1 to 4: tokens of another block are a group, and a token's weight is its
    share of the group times that of the block's landmark; landmarks are in the group of the row's
    own block, whose landmark is left out.
    """
    out = np.zeros_like(q)
    for i, row in enumerate(q):
        score = [float(row @ key) for key in k]
        own = i // (SIZE + 1)
        others = [block for block in range(BLOCKS) if block != own]
        landmark = {block: block * (SIZE + 1) + SIZE for block in others}
        if top_k is not None:
            others = sorted(others, key=lambda block: -score[landmark[block]])[:top_k]
        mine = [own * (SIZE + 1) + at for at in range(SIZE)]
        together = mine + [landmark[block] for block in others]
        share = dict(zip(together, softmax([score[j] for j in together])))
        for j in mine:
            out[i] += share[j] * v[j]
        for block in others:
            tokens = [block * (SIZE + 1) + at for at in range(SIZE)]
            for j, weight in zip(tokens, softmax([score[j] for j in tokens])):
                out[i] += share[landmark[block]] * weight * v[j]
    return out


@pytest.mark.parametrize("top_k", [None, 1, 2, 3])
def test_attention_matches_the_papers_equations_in_both_directions(top_k: int | None) -> None:
    q, k, v = inputs()
    found = both_sides_attention(q, k, v, SIZE, top_k)
    for batch in range(2):
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            expected = transcribed(
                q[batch, head].numpy(), k[batch, kv].numpy(), v[batch, kv].numpy(), top_k
            )
            np.testing.assert_allclose(found[batch, head].numpy(), expected, rtol=0, atol=1e-12)


def test_the_last_token_of_a_text_sees_what_a_decoder_sees() -> None:
    q, k, v = inputs()
    causal = grouped_softmax_attention(q, k, v, SIZE)
    both = both_sides_attention(q, k, v, SIZE)
    torch.testing.assert_close(both[:, :, T - 2], causal[:, :, T - 2], rtol=0, atol=1e-12)
    assert not torch.allclose(both[:, :, 0], causal[:, :, 0])


def test_a_block_is_found_by_its_landmark_from_both_sides() -> None:
    q, k, v = inputs()
    loud = k.clone()
    landmark = 1 * (SIZE + 1) + SIZE  # of the second block
    loud[:, :, landmark] = 50 * torch.sign(q[:, :: HEADS // KV_HEADS].sum(2))
    changed = (
        both_sides_attention(q, loud, v, SIZE) - both_sides_attention(q, k, v, SIZE)
    ).abs().amax((0, 1, 3))  # fmt: skip
    inside = range(SIZE + 1, 2 * (SIZE + 1))
    assert changed[list(inside)].max() < 1e-12  # nobody sees the landmark of their own block
    assert changed[:SIZE].min() > 1e-6 and changed[2 * (SIZE + 1) :].min() > 1e-6
