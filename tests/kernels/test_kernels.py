"""The reference kernels against the published implementation's numbers, autograd, and each
other.
"""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from memstore.kernels import api, reference
from memstore.kernels.api import NEG
from memstore.kernels.reference import adjusted_logits
from support.paths import DATA


def load(name: str) -> dict[str, Tensor]:
    with np.load(DATA / name) as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


def all_positions(content: Tensor, length: int) -> Tensor:
    """Weights over content [.., nb, l] -> over positions [.., length], landmarks 0."""
    return pad(content, (0, 1)).flatten(-2)[..., :length]


CASES = ["full_blocks", "partial_tail", "fp32", "bf16", "single_block"]


@pytest.mark.parametrize("case", CASES)
def test_grouped_softmax_equals_the_published_implementation(case: str) -> None:
    data = load("a_softmax.npz")
    q, k, v, is_mem, w, out = (
        data[f"lmb_{case}_{name}"] for name in ("q", "k", "v", "is_mem", "w", "out")
    )
    length = q.shape[2]
    block_size = int(is_mem[0].nonzero()[0]) if is_mem.any() else length
    scaled = q * q.shape[-1] ** -0.5
    logits, *_ = adjusted_logits(scaled, k, block_size, None, None)
    weights = logits.flatten(-2).softmax(-1).unflatten(-1, logits.shape[-2:])
    # the published numbers of these two cases were themselves computed in float32 and bfloat16
    tolerance = {"fp32": 1e-6, "bf16": 2e-2}.get(case, 1e-10)
    assert_same = partial(torch.testing.assert_close, rtol=0, atol=tolerance)
    assert_same(all_positions(weights, length), w)
    assert_same(api.local_attention(scaled, k, v, block_size).output, out)
    assert_same(api.grouped_softmax_attention(scaled, k, v, block_size), out)


@pytest.mark.parametrize("controlled", ["half", "memo", "none", "all"])
@pytest.mark.parametrize("cutoff", ["None", "0.1", "0.5"])
def test_context_miss_token_equals_the_published_implementation(
    controlled: str, cutoff: str
) -> None:
    data = load("c_cmt.npz")
    q, k, w = data["q"], data["k"], data[f"cmt_{controlled}_{cutoff}_w"]
    k_cmt = data["k_cmt"][0, :, 0]
    block_size = int(data["is_mem"][0].nonzero()[0])
    blocks = data[f"cmt_{controlled}_ctrl"][:, block_size :: block_size + 1]
    logits, c, null = adjusted_logits(q * q.shape[-1] ** -0.5, k, block_size, k_cmt, blocks)
    everything = torch.cat([logits.flatten(-2), null[..., None]], -1)
    weights = everything.softmax(-1)[..., :-1].unflatten(-1, logits.shape[-2:])
    if cutoff != "None":
        gate = (c - everything.logsumexp(-1)).exp()
        block = torch.arange(logits.shape[-2])
        earlier = block < torch.arange(q.shape[2])[:, None] // (block_size + 1)
        under = pad(blocks[0], (0, logits.shape[-2] - blocks.shape[1])) & earlier
        weights = weights.masked_fill(((gate < float(cutoff))[..., None] & under)[..., None], 0.0)
    torch.testing.assert_close(all_positions(weights, q.shape[2]), w, rtol=0, atol=1e-10)


def test_grouped_softmax_gradients_are_right() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 2, 12, 4, dtype=torch.float64, generator=generator, requires_grad=True)
        for _ in range(3)
    )
    k_cmt = torch.randn(2, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    controlled = torch.tensor([[True, False]])

    def attend(q: Tensor, k: Tensor, v: Tensor, k_cmt: Tensor) -> Tensor:
        return api.grouped_softmax_attention(q, k, v, 4, k_cmt=k_cmt, controlled=controlled)

    assert torch.autograd.gradcheck(attend, (q, k, v, k_cmt))
    assert torch.autograd.gradcheck(
        lambda *x: api.local_attention(*x[:3], 4, k_cmt=x[3]).output, (q, k, v, k_cmt)
    )


@settings(max_examples=25)
@given(
    size=st.integers(1, 5),
    positions=st.integers(1, 30),
    rows=st.integers(1, 30),
    group=st.integers(1, 3),
    seed=st.integers(0, 999),
)
def test_weights_are_a_distribution_and_rows_do_not_depend_on_how_many_are_asked(
    size: int, positions: int, rows: int, group: int, seed: int
) -> None:
    rows = min(rows, positions)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 2 * group, positions, 4, dtype=torch.float64, generator=generator)
    k, v = (
        torch.randn(2, 2, positions, 4, dtype=torch.float64, generator=generator) for _ in range(2)
    )
    k_cmt = torch.randn(2, 4, dtype=torch.float64, generator=generator)
    ones = torch.ones_like(v)
    whole = api.local_attention(q, k, ones, size, k_cmt=k_cmt)
    torch.testing.assert_close(whole.output[..., 0], 1 - whole.gate)
    attend = partial(api.local_attention, k=k, v=v, block_size=size, k_cmt=k_cmt)
    full, part = attend(q), attend(q[:, :, -rows:])
    torch.testing.assert_close(part.output, full.output[:, :, -rows:])
    torch.testing.assert_close(part.lse, full.lse[:, :, -rows:])


@settings(max_examples=30)
@given(
    n=st.integers(0, 40),
    k=st.integers(1, 8),
    group=st.integers(1, 2),
    rows=st.integers(0, 4),
    cut=st.integers(0, 40),
    seed=st.integers(0, 999),
    coarse=st.booleans(),
    biased=st.booleans(),
    wanted=st.sampled_from([None, [], [1], [0, 1]]),
)
def test_landmark_topk_equals_a_full_sort_with_ties_to_the_newer(
    n: int,
    k: int,
    group: int,
    rows: int,
    cut: int,
    seed: int,
    coarse: bool,
    biased: bool,
    wanted: list[int] | None,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    draw = (
        (lambda *s: torch.randint(-1, 2, s, generator=generator).float())
        if coarse
        else (lambda *s: torch.randn(*s, generator=generator))
    )
    q, keys = draw(2 * group, rows, 3), draw(2, n, 3)
    cut = min(cut, n)
    ranges = [(cut, n), (0, cut)]  # the first rows are the newer ones here
    bias = draw(n)
    found = api.landmark_topk(
        q, keys, ranges, k, return_lse=True, kv_heads=wanted, bias=bias if biased else None
    )
    order = list(range(cut, n)) + list(range(cut))
    for h in range(2 * group):
        for t in range(rows):
            scores = keys[h // group, order] @ q[h, t] + (bias if biased else 0)
            searched = n if wanted is None or h // group in wanted else 0
            expected = sorted(range(searched), key=lambda i: (-scores[i].item(), -i))[:k]
            assert found.candidates[h, t].tolist() == expected + [-1] * (k - len(expected))
            assert (found.scores[h, t, len(expected) :] == NEG).all()
            if searched:
                torch.testing.assert_close(found.lse[h, t], scores.logsumexp(0))


@pytest.mark.parametrize("levels", [3, 1 << 20])
@pytest.mark.parametrize("n", [9_024])
@pytest.mark.parametrize("long", [64, reference._LONG])  # 64: maxima of maxima
def test_landmark_topk_of_many_keys_equals_a_full_sort(
    n: int, levels: int, long: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_LONG", long)
    generator = torch.Generator().manual_seed(levels + n)
    keys = torch.randint(0, levels, (2, n, 1), generator=generator).float()
    # the last finds all keys equal
    q = torch.tensor([1.0, -1.0, 2.0, 0.0])[None].repeat(2, 1)[..., None]
    found = api.landmark_topk(q, keys, [(0, n)], 4)
    for h in range(2):
        for t in range(4):
            order = (keys[h] @ q[h, t]).flip(0).sort(descending=True, stable=True).indices[:4]
            assert found.candidates[h, t].tolist() == (n - 1 - order).tolist()
            assert torch.equal(found.scores[h, t], keys[h, n - 1 - order] @ q[h, t])


def test_memory_attention_equals_one_softmax_by_rows_and_shared() -> None:
    generator = torch.Generator().manual_seed(2)
    heads, kv_heads, rows, dim, size, slots = 4, 2, 5, 8, 3, 9
    q = torch.randn(3, 1, heads, rows, dim, dtype=torch.float64, generator=generator)
    keys, values = (
        torch.randn(slots, size, dim, dtype=torch.float64, generator=generator) for _ in range(2)
    )
    lengths = torch.tensor([3, 3, 2, 3, 1, 3, 3, 3, 3])
    chosen = torch.randint(-1, slots, (1, heads, 1, 4), generator=generator)
    chosen[0, 0] = -1  # a head that reads nothing
    rotations = torch.randint(0, 3, (1, heads, 1, 4), generator=generator)
    marks = torch.randn(1, heads, rows, 4, dtype=torch.float64, generator=generator)
    local_k, local_v = (
        torch.randn(1, kv_heads, 7, dim, dtype=torch.float64, generator=generator) for _ in range(2)
    )
    k_cmt = torch.randn(kv_heads, dim, dtype=torch.float64, generator=generator)
    units = q, keys, values, lengths
    of_head = chosen, rotations
    of_rows = [x.expand(-1, -1, rows, -1).contiguous() for x in of_head]
    for cmt in (k_cmt, None):
        local = api.local_attention(q[0], local_k, local_v, size, k_cmt=cmt)
        (shared, mass), (by_rows, _) = (
            api.memory_attention(
                *units, *read, marks, local, gated=cmt is not None, return_mass=True
            )
            for read in (of_head, of_rows)
        )
        torch.testing.assert_close(shared, by_rows, rtol=1e-10, atol=1e-12)
        for h in range(heads):
            for t in range(rows):
                there, expected = chosen[0, h, 0] >= 0, local.output[0, h, t]
                reads = torch.zeros(int(there.sum()), dim, dtype=torch.float64)
                for at, (s, r) in enumerate(zip(chosen[0, h, 0][there], rotations[0, h, 0][there])):
                    inner = (keys[s, : lengths[s]] @ q[r, 0, h, t]).softmax(0)
                    reads[at] = inner @ values[s, : lengths[s]]
                logits = marks[0, h, t][there]
                if not len(reads):
                    assert mass[0, h, t].sum() == 0
                elif cmt is not None:
                    expected = expected + logits.softmax(0) * local.gate[0, h, t] @ reads
                else:
                    total = torch.cat([logits, local.lse[0, h, t][None]]).softmax(0)
                    expected = expected * total[-1] + total[:-1] @ reads
                torch.testing.assert_close(shared[0, h, t], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("rotations", "shared"), [(1, True), (2, True), (2, False)])
def test_memory_attention_reads_no_slot_that_was_not_named(rotations: int, shared: bool) -> None:
    """A slot outside of the lease may hold anything: another reader's unit half read, a damaged
    record.
    """
    generator = torch.Generator().manual_seed(6)
    q = torch.randn(rotations, 1, 4, 2, 8, generator=generator)
    keys, values = (torch.randn(5, 3, 8, generator=generator) for _ in range(2))
    lengths = torch.full((5,), 3)
    slots = torch.tensor([[2, -1, 4]]).expand(1, 4, 1 if shared else 2, 3)
    local = api.local_attention(
        *(torch.randn(1, 4, 2, 8, generator=generator) for _ in range(3)), 3
    )
    marks = torch.randn(1, 4, 2, 3, generator=generator)

    def attend() -> Tensor:
        return api.memory_attention(
            q, keys, values, lengths, slots, slots * 0, marks, local, gated=False
        )[0]

    expected = attend()
    for slot in (0, 1, 3):
        keys[slot] = values[slot] = float("nan")
    assert torch.equal(attend(), expected)
