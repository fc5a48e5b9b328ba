"""The choice of blocks against docs/appendix/method.md section 5 transcribed, with scores full of
ties."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.kernels.api import NEG
from memstore.model.landmark.block_lookup import merge, select
from memstore.model.lookup_settings import GRANULARITIES, Granularity
from support.oracle import choose_by


def chosen(
    scores: np.ndarray,
    recent: int,
    granularity: Granularity,
    top_k: int,
    open_rows: np.ndarray,
    lse: np.ndarray,
    group: int,
) -> list[list[list[int]]]:
    """What every [head][row] chooses, oldest first. The last `recent` candidates are recent."""
    heads, rows, n = scores.shape
    old = n - recent
    order = np.array(
        [
            [sorted(range(old), key=lambda c, row=row: (-row[c], -c))[:top_k] for row in of_head]
            for of_head in scores
        ]
    ).reshape(heads, rows, -1)
    width = top_k - order.shape[-1]
    order, missing = order.astype(int), ((0, 0), (0, 0), (0, width))
    hits = np.pad(np.take_along_axis(scores, order, -1), missing, constant_values=NEG)
    candidates = np.pad(order, missing, constant_values=-1)
    near = torch.from_numpy(scores[..., old:])
    found = merge(torch.from_numpy(hits), torch.from_numpy(candidates), near, old, top_k)
    choice = select(
        granularity, *found, torch.from_numpy(lse), torch.from_numpy(open_rows), heads // group
    ).candidates.expand(heads, rows, -1)
    present = [[[c for c in row if c >= 0] for row in of_head] for of_head in choice.tolist()]
    for of_head, full in zip(present, choice.tolist()):
        for row, wide in zip(of_head, full):
            assert wide[: len(row)] == sorted(set(row)), (
                "oldest first, none twice, what is missing at the end"
            )
    return present


@settings(max_examples=120)
@given(
    granularity=st.sampled_from(GRANULARITIES),
    n=st.integers(0, 7),
    recent=st.integers(0, 4),
    top_k=st.integers(1, 5),
    group=st.integers(1, 2),
    rows=st.integers(1, 3),
    dtype=st.sampled_from(["float32", "float64"]),
    seed=st.integers(0, 9999),
)
def test_every_choice_equals_the_transcription(
    granularity: Granularity,
    n: int,
    recent: int,
    top_k: int,
    group: int,
    rows: int,
    dtype: str,
    seed: int,
) -> None:
    """Whole numbers as scores, so that ties are met, and met exactly."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(-2, 3, (2 * group, rows, n)).astype(dtype)
    open_rows = rng.random((2 * group, rows)) < 0.7
    lse = rng.integers(3, 6, (2 * group, rows)).astype(dtype)
    weights = scores if granularity == "per_token_per_head" else scores - lse[..., None]
    got = chosen(scores, min(recent, n, top_k), granularity, top_k, open_rows, lse, group)
    if n:
        assert got == choose_by(weights, granularity, top_k, open_rows, group)
    else:
        assert got == [[[]] * rows] * 2 * group
