"""The exact landmark index: searches in scopes while documents are added and removed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.errors import DocumentNotFound
from memstore.index import LandmarkIndex
from memstore.kernels.api import NEG

KV_HEADS, DIM = 2, 16


@pytest.fixture
def index() -> LandmarkIndex:
    return LandmarkIndex(KV_HEADS, DIM)


def keys(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, KV_HEADS, DIM, generator=torch.Generator().manual_seed(seed))


def queries(rows: int = 5, heads: int = 4, seed: int = 99) -> torch.Tensor:
    return torch.randn(heads, rows, DIM, generator=torch.Generator().manual_seed(seed))


def direct(
    q: torch.Tensor, candidates: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores, candidates and log-sum-exp by the plain product; candidates [N, Hkv, D]."""
    each = candidates.transpose(0, 1).repeat_interleave(q.shape[0] // KV_HEADS, 0)  # (H, N, D)
    scores = (q.double() @ each.double().transpose(1, 2)).float()
    best = scores.topk(min(top_k, scores.shape[-1]), -1)
    return best.values, best.indices, scores.logsumexp(-1)


@pytest.mark.parametrize("scope", [[], [(1, 0, 0)], [(1, 4, 4), (9, 0, 0)]])
def test_empty_scope_finds_nothing(index: LandmarkIndex, scope: list[tuple[int, int, int]]) -> None:
    index.add(1, 0, 0, keys(5))
    for layer in (0, 1):
        hits = index.search(layer, queries(), scope, 4, return_lse=True)
        assert hits.candidates.shape == (4, 5, 4)
        assert (hits.candidates == -1).all() and (hits.scores == NEG).all()
        assert hits.lse is not None and (hits.lse <= NEG / 2).all()
        assert index.keys(layer, scope).shape == (KV_HEADS, 0, DIM)
        assert index.gather(layer, scope, hits.candidates).shape == (4, 5, 4, DIM)


@settings(max_examples=40)
@given(data=st.data())
def test_search_is_exact_after_any_changes_of_documents(data: st.DataObject) -> None:
    index = LandmarkIndex(KV_HEADS, DIM)
    held: dict[int, tuple[int, torch.Tensor]] = {}  # first block and keys of each document
    for step in range(data.draw(st.integers(1, 14))):
        change = data.draw(st.sampled_from(["add", "add", "remove", "trim"]))
        document = data.draw(st.integers(1, 5))
        first, old = held.get(document, (0, keys(0)))
        end = first + len(old)
        if change == "add":
            new = keys(data.draw(st.sampled_from([1, 7, 70])), 10 * step)
            new = new.bfloat16().float() if data.draw(st.booleans()) else new
            index.add(document, 0, end, new)
            held[document] = first, torch.cat([old, new])
        elif change == "remove":
            index.remove(document)
            held.pop(document, None)
        elif end > first:
            cut = data.draw(st.integers(first, end - 1))
            index.trim(document, cut)
            held[document] = cut, old[cut - first :]
    scope = []
    for document in data.draw(st.permutations(sorted(held))):
        first, some = held[document]
        begin = data.draw(st.integers(first, first + len(some)))
        scope.append((document, begin, data.draw(st.integers(begin, first + len(some)))))
        for outside in ((document, first - 1, first), (document, begin, first + len(some) + 1)):
            with pytest.raises(DocumentNotFound):
                index.keys(0, [outside])
    parts = [held[at][1][begin - held[at][0] : end - held[at][0]] for at, begin, end in scope]
    candidates = torch.cat([keys(0), *parts])
    assert torch.equal(index.keys(0, scope), candidates.transpose(0, 1))
    if len(candidates):
        assert index.search(0, queries(), scope, 4).lse is None
        hits = index.search(0, queries(), scope, 4, return_lse=True)
        scores, expected, lse = direct(queries(), candidates, 4)
        torch.testing.assert_close(hits.lse, lse, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(
            hits.scores[..., : scores.shape[-1]], scores, atol=1e-4, rtol=1e-5
        )
        assert torch.equal(hits.candidates[..., : expected.shape[-1]], expected)
        gathered = index.gather(0, scope, expected)  # (H, T, k, D)
        for head in range(4):
            assert torch.equal(gathered[head], candidates[expected[head], head // 2])
