"""One conformance suite over every landmark index: exact search in scopes, growth, removal, ties in
the packed one.
"""

import faiss
import numpy as np
import pytest
import torch

from memstore.errors import DocumentNotFound, InvalidInput
from memstore.index import PackedIndex, make_index
from memstore.kernels.api import NEG
from support.rounding import assert_same_to_rounding

KV_HEADS, DIM = 2, 16


@pytest.fixture(params=["packed", "auto", "faiss-ivf-sq8"])
def index(request: pytest.FixtureRequest) -> PackedIndex:
    return make_index(request.param, KV_HEADS, DIM)


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


def test_search_equals_the_direct_product_for_every_head_of_a_group(index: PackedIndex) -> None:
    stored, q = keys(200), queries()
    index.add(1, 3, 0, stored)
    hits = index.search(3, q, [(1, 0, 200)], 8, return_lse=True)
    scores, candidates, lse = direct(q, stored, 8)
    torch.testing.assert_close(hits.scores, scores, atol=1e-5, rtol=1e-5)
    assert torch.equal(hits.candidates, candidates)
    assert hits.lse is not None
    torch.testing.assert_close(hits.lse, lse, atol=1e-5, rtol=1e-5)
    assert index.search(3, q, [(1, 0, 200)], 8).lse is None


def test_a_bias_counts_like_the_scores_themselves(index: PackedIndex) -> None:
    stored, q = keys(200), queries()
    index.add(1, 3, 0, stored)
    index.add(9, 3, 0, keys(30, 1))
    bias = torch.linspace(-6, 6, 190)
    hits = index.search(3, q, [(9, 10, 20), (1, 20, 200)], 8, bias=bias)
    candidates = torch.cat([keys(30, 1)[10:20], stored[20:]])
    each = candidates.transpose(0, 1).repeat_interleave(q.shape[0] // KV_HEADS, 0)
    best = (q @ each.transpose(1, 2) + bias).topk(8, -1)
    assert torch.equal(hits.candidates, best.indices)
    torch.testing.assert_close(hits.scores, best.values, atol=1e-5, rtol=1e-5)


def test_packed_equals_faiss_on_random_memories() -> None:
    packed = PackedIndex(KV_HEADS, DIM)
    whole: dict[int, list[torch.Tensor]] = {3: [], 1: [], 7: []}  # every key a document ever had
    for seed in range(8):
        for document, chunks in whole.items():
            chunks.append(keys(9 + seed, seed * 10 + document))
            packed.add(document, 0, packed.span(document, 0)[1], chunks[-1])
        if seed == 4:
            packed.remove(1)
            whole[1].clear()
        if seed == 5:
            packed.truncate(7, 20)
            whole[7][:] = [torch.cat(whole[7])[:20]]
        if seed == 6:
            packed.trim(3, 11)
        scope = [(document, *packed.span(document, 0)) for document in (7, 3, 1) if whole[document]]
        held = torch.cat([torch.cat(whole[document])[first:end] for document, first, end in scope])
        q = queries(seed=seed)
        hits = packed.search(0, q, scope, 5)
        for head, of_head in enumerate(q):
            judge = faiss.IndexFlatIP(DIM)
            judge.add(np.ascontiguousarray(held[:, head // 2]))
            scores, candidates = judge.search(of_head.numpy(), 5)
            torch.testing.assert_close(
                hits.scores[head], torch.from_numpy(scores), atol=1e-5, rtol=1e-5
            )
            assert torch.equal(hits.candidates[head], torch.from_numpy(candidates))


def test_documents_that_grow_in_turns_stay_whole(index: PackedIndex) -> None:
    whole: dict[int, list[torch.Tensor]] = {1: [], 2: [], -1: []}
    for step in range(30):
        for document in whole:
            n = 1 + (step * 7 + document) % 5
            chunk = keys(n, seed=1000 * document + step)
            index.add(document, 0, sum(map(len, whole[document])), chunk)
            whole[document].append(chunk)
    for document, chunks in whole.items():
        stored = torch.cat(chunks)
        assert index.span(document, 0) == (0, len(stored))
        assert torch.equal(index.keys(0, [(document, 0, len(stored))]), stored.transpose(0, 1))


def test_scope_chooses_documents_and_runs_and_numbers_candidates_by_age(index: PackedIndex) -> None:
    one, two, q = keys(40, 1), keys(30, 2), queries()
    index.add(1, 0, 0, one)
    index.add(2, 0, 0, two)
    scope = [(2, 10, 25), (1, 5, 40), (2, 28, 30)]
    candidates = torch.cat([two[10:25], one[5:40], two[28:30]])
    scores, expected, lse = direct(q, candidates, 6)
    hits = index.search(0, q, scope, 6, return_lse=True)
    torch.testing.assert_close(hits.scores, scores, atol=1e-5, rtol=1e-5)
    assert torch.equal(hits.candidates, expected)
    assert hits.lse is not None
    torch.testing.assert_close(hits.lse, lse, atol=1e-5, rtol=1e-5)
    gathered = index.gather(0, scope, hits.candidates)  # (H, T, k, D)
    for head in range(4):
        assert torch.equal(gathered[head], candidates[hits.candidates[head], head // 2])
    assert torch.equal(index.keys(0, scope), candidates.transpose(0, 1))


def test_layers_do_not_mix(index: PackedIndex) -> None:
    index.add(1, 0, 0, keys(10, 1))
    index.add(1, 2, 0, keys(10, 2))
    q = queries()
    for layer in (0, 2):
        _, expected, _ = direct(q, keys(10, layer // 2 + 1), 3)
        assert torch.equal(index.search(layer, q, [(1, 0, 10)], 3).candidates, expected)


def test_fewer_candidates_than_top_k_are_padded(index: PackedIndex) -> None:
    index.add(1, 0, 0, keys(3))
    hits = index.search(0, queries(), [(1, 0, 3)], 5)
    assert (hits.candidates[..., :3] >= 0).all() and (hits.candidates[..., 3:] == -1).all()
    assert (hits.scores[..., 3:] == NEG).all()


@pytest.mark.parametrize("scope", [[], [(1, 0, 0)], [(1, 4, 4), (9, 0, 0)]])
def test_empty_scope_finds_nothing(index: PackedIndex, scope: list[tuple[int, int, int]]) -> None:
    index.add(1, 0, 0, keys(5))
    for layer in (0, 1):
        hits = index.search(layer, queries(), scope, 4, return_lse=True)
        assert (
            hits.candidates.shape == (4, 5, 4)
            and (hits.candidates == -1).all()
            and (hits.scores == NEG).all()
        )
        assert hits.lse is not None and (hits.lse <= NEG / 2).all()
        assert index.keys(layer, scope).shape == (KV_HEADS, 0, DIM)
        assert index.gather(layer, scope, hits.candidates).shape == (4, 5, 4, DIM)


def test_removed_document_is_not_found_and_others_keep_their_keys(index: PackedIndex) -> None:
    for document in (1, 2, 3):
        index.add(document, 0, 0, keys(20, document))
    index.remove(2)
    index.remove(77)
    with pytest.raises(DocumentNotFound, match="document 2"):
        index.search(0, queries(), [(1, 0, 20), (2, 0, 20)], 2)
    with pytest.raises(DocumentNotFound):
        index.keys(0, [(2, 3, 4)])
    for document in (1, 3):
        assert torch.equal(index.keys(0, [(document, 0, 20)]), keys(20, document).transpose(0, 1))
    index.add(2, 0, 0, keys(4, 5))
    assert torch.equal(index.keys(0, [(2, 0, 4)]), keys(4, 5).transpose(0, 1))


def test_truncate_and_trim_cut_both_ends(index: PackedIndex) -> None:
    index.add(1, 0, 0, keys(20, 1))
    index.add(2, 0, 0, keys(20, 2))
    index.truncate(1, 15)
    index.trim(1, 4)
    assert index.span(1, 0) == (4, 15)
    assert torch.equal(index.keys(0, [(1, 4, 15)]), keys(20, 1)[4:15].transpose(0, 1))
    assert torch.equal(index.keys(0, [(2, 0, 20)]), keys(20, 2).transpose(0, 1))
    for first, end in ((3, 10), (10, 16)):
        with pytest.raises(DocumentNotFound):
            index.keys(0, [(1, first, end)])
    index.add(1, 0, 15, keys(3, 6))
    assert torch.equal(
        index.keys(0, [(1, 14, 18)]), torch.cat([keys(20, 1)[14:15], keys(3, 6)]).transpose(0, 1)
    )
    index.trim(1, 99)
    assert index.span(1, 0) == (0, 0) and index.documents() == {2}


def test_keys_must_be_added_in_order(index: PackedIndex) -> None:
    index.add(1, 0, 0, keys(5))
    with pytest.raises(InvalidInput, match="after 5 blocks"):
        index.add(1, 0, 6, keys(5))


def test_searches_and_rows_are_counted(index: PackedIndex) -> None:
    index.add(1, 0, 0, keys(5))
    index.search(0, queries(rows=3), [(1, 0, 5)], 2)
    index.search(0, queries(rows=1), [(1, 0, 5)], 2)
    assert (index.searches, index.rows) == (2, 4 * 3 + 4)
    assert index.bytes > 0


def test_packed_prefers_the_newer_of_equal_blocks() -> None:
    index = PackedIndex(KV_HEADS, DIM)
    same = (
        keys(1).round().expand(6, -1, -1)
    )  # whole numbers: equal products are equal bit for bit, wherever they are computed
    index.add(5, 0, 0, same)
    index.add(4, 0, 0, same)
    hits = index.search(0, queries().round(), [(4, 0, 6), (5, 0, 6)], 3)
    assert (hits.candidates == torch.tensor([11, 10, 9])).all()


def test_packed_keeps_memory_within_a_small_factor_when_documents_come_and_go() -> None:
    index = PackedIndex(KV_HEADS, DIM)
    for document in range(200):
        index.add(document, 0, 0, keys(50, document))
        if document >= 4:
            index.remove(document - 4)
    assert index.bytes < 6 * 4 * 50 * KV_HEADS * DIM * 4
    assert torch.equal(index.keys(0, [(198, 0, 50)]), keys(50, 198).transpose(0, 1))


def test_half_precision_keys_are_searched_exactly(index: PackedIndex) -> None:
    stored = keys(64).to(torch.bfloat16)
    index.add(1, 0, 0, stored)
    scores, candidates, _ = direct(queries(), stored.float(), 4)
    hits = index.search(0, queries(), [(1, 0, 64)], 4)
    torch.testing.assert_close(hits.scores, scores, atol=1e-5, rtol=1e-5)
    assert torch.equal(hits.candidates, candidates)


def test_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="faiss-ivf-sq8"):
        make_index("hnsw", KV_HEADS, DIM)


def test_heads_without_an_open_row_find_nothing_and_are_not_counted(index: PackedIndex) -> None:
    index.add(1, 0, 0, keys(40))
    q = queries()
    every = index.search(0, q, [(1, 0, 40)], 4)
    before = index.rows
    opened = torch.zeros(q.shape[:2], dtype=torch.bool)
    opened[2:, 1:] = True
    some = index.search(0, q, [(1, 0, 40)], 4, open_rows=opened)
    assert index.rows - before == int(opened.sum())
    assert torch.equal(some.candidates[2:, 1:], every.candidates[2:, 1:])
    assert (some.candidates[:2] == -1).all() and (some.scores[:2] == NEG).all()


def test_documents_that_came_together_are_as_those_that_came_alone(index: PackedIndex) -> None:
    alone, q = PackedIndex(KV_HEADS, DIM), queries()
    index.add(9, 0, 0, keys(3, 9))
    alone.add(9, 0, 0, keys(3, 9))
    blocks = {4: 5, 2: 1, 7: 30, 5: 2, 1: 4}
    index.add_new(0, [*blocks.items()], torch.cat([keys(n, d) for d, n in blocks.items()]))
    for document, n in blocks.items():
        alone.add(document, 0, 0, keys(n, document))

    def check() -> None:
        assert index.documents() == alone.documents()
        scope = [(document, *alone.span(document, 0)) for document in sorted(alone.documents())]
        assert scope == [(document, *index.span(document, 0)) for document, _, _ in scope]
        for some in (scope, scope[::-1], [(7, 3, 20), (4, 4, 5)]):
            found, expected = index.search(0, q, some, 6), alone.search(0, q, some, 6)
            assert torch.equal(found.candidates, expected.candidates)
            assert_same_to_rounding(found.scores, expected.scores)
            assert torch.equal(index.keys(0, some), alone.keys(0, some))

    check()
    for of in (index, alone):
        of.remove(2)
        of.truncate(5, 1)
        of.trim(7, 2)
        of.add(1, 0, 4, keys(70, 11))  # moves them all
        of.remove(12)  # is not there
    check()
    for taken in ([(3, 2), (4, 1)], [(3, 1), (3, 1)]):
        with pytest.raises(InvalidInput, match="remove it first"):
            index.add_new(0, taken, keys(sum(n for _, n in taken)))
    check()
    for of in (index, alone):
        of.add(9, 0, 3, keys(1, 12))
        for document in (7, 1, 5):
            of.remove(document)
        of.add(8, 0, 0, keys(200, 8))  # leaves out the holes
        of.add(4, 0, 5, keys(2, 13))
    scope = [(4, 0, 7), (8, 0, 200), (9, 0, 4)]
    assert index.documents() == {4, 8, 9}
    assert torch.equal(index.keys(0, scope), alone.keys(0, scope))


def test_what_was_looked_up_for_a_scope_stays_while_nothing_of_it_goes() -> None:
    index, scope = PackedIndex(KV_HEADS, DIM), [(document, 0, 3) for document in range(1, 50)]
    index.add_new(0, [(document, 3) for document in range(1, 50)], keys(147))
    index.search(0, queries(), scope, 4)
    index.remove(-1)  # a session ends that kept no block
    assert len(index._layers[0].scopes) == 1
    index.truncate(49, 2)
    assert not len(index._layers[0].scopes)
    with pytest.raises(DocumentNotFound):
        index.search(0, queries(), scope, 4)
