"""Engines over landmark keys: recall, updates, and their files."""

import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from memstore.errors import DocumentNotFound, InvalidInput
from memstore.index import Hits, LandmarkIndex, Scope, landmark_index
from memstore.index.index_file import content_of, decode_file, encode_file
from memstore.index.landmark_engine import Header
from memstore.kernels.api import NEG
from support.crafted import WRONG, changed, fuzzed, places

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


def filled(
    directory: Path | None = None, documents: int = DOCUMENTS
) -> tuple[LandmarkIndex, Scope]:
    index = LandmarkIndex(KV_HEADS, DIM, kind="auto", directory=directory)
    for document in range(1, documents + 1):
        index.add(document, 0, 0, keys(EACH, document))
    return index, [(document, 0, EACH) for document in range(1, documents + 1)]


def build(index: LandmarkIndex) -> None:
    """For queries as `queries` has them."""
    sample = queries(200, 7).view(KV_HEADS, -1, DIM)
    index.samples = {(0, head): [sample[head]] for head in range(KV_HEADS)}
    index.build([0], TOP_K)


@pytest.fixture
def memory() -> tuple[LandmarkIndex, Scope]:
    """A built index over six documents, and the scope of all of them."""
    index, scope = filled()
    build(index)
    return index, scope


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few keys as these are worth an engine."""
    monkeypatch.setattr(landmark_index, "_LEAST_ASKED", 500)


@pytest.fixture
def any_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine is asked however little of a scope it holds."""
    monkeypatch.setattr(landmark_index, "_LEAST_ASKED", 0)
    monkeypatch.setattr(landmark_index, "_COVERED", 0)


def packed(index: LandmarkIndex, scope: Scope) -> LandmarkIndex:
    """The same keys, to be searched exactly."""
    exact = LandmarkIndex(KV_HEADS, DIM)
    for document in {document for document, _, _ in scope}:
        first, end = index._layers[0].rows.spans()[document]
        exact.add(document, 0, first, index.keys(0, [(document, first, end)]).transpose(0, 1))
    return exact


def exact(index: LandmarkIndex, q: Tensor, scope: Scope) -> Hits:
    return packed(index, scope).search(0, q, scope, TOP_K, return_lse=True)


def assert_sound(index: LandmarkIndex, q: Tensor, scope: Scope, hits: Hits) -> None:
    """Every hit is a block of the scope, once, with its exact score, best first."""
    held = index.keys(0, scope).repeat_interleave(len(q) // KV_HEADS, 0)  # (H, N, D)
    scores = (q.double() @ held.double().transpose(1, 2)).float()
    there = hits.candidates >= 0
    assert (hits.candidates < held.shape[1]).all()
    of_hits = scores.gather(-1, hits.candidates.clamp_min(0)).masked_fill(~there, NEG)
    torch.testing.assert_close(hits.scores, of_hits, atol=1e-4, rtol=1e-5)
    assert (hits.scores[..., 1:] <= hits.scores[..., :-1]).all()
    for row in hits.candidates.flatten(0, 1).tolist():
        found = [candidate for candidate in row if candidate >= 0]
        assert len(set(found)) == len(found)


def recall(found: Hits, best: Hits) -> float:
    return float(
        (found.candidates[..., :, None] == best.candidates[..., None, :]).any(-2).float().mean()
    )


def test_scores_are_exact_and_recall_is_as_calibrated(memory: tuple[LandmarkIndex, Scope]) -> None:
    index, scope = memory
    q = queries(100)
    hits = index.search(0, q, scope, TOP_K)
    assert_sound(index, q, scope, hits)
    assert recall(hits, exact(index, q, scope)) >= 0.93  # 0.95 of the sample; 1,600 blocks here
    index.search(0, q, scope[:1], TOP_K)  # too few keys
    assert index.asked == 1
    hits, best = index.search(0, q, scope, TOP_K, return_lse=True), exact(index, q, scope)
    assert torch.equal(hits.candidates, best.candidates)
    assert hits.lse is not None
    torch.testing.assert_close(hits.lse, best.lse, atol=1e-4, rtol=1e-5)


def test_no_hit_leaves_its_scope(memory: tuple[LandmarkIndex, Scope], any_scope: None) -> None:
    index, everything = memory
    index.add(-1, 0, 0, keys(30, 50))  # a session's own
    index.remove(5)
    q = queries(20)
    several: Scope = [(6, 10, 200), (2, 0, 100), (-1, 5, 25), (3, 60, 70), (6, 0, 9), (4, 0, 1)]
    for scope in ([(1, 0, EACH)], [(2, 50, 100)], [(-1, 0, 30)], several):
        hits = index.search(0, q, scope, TOP_K)
        assert_sound(index, q, scope, hits)
        assert recall(hits, exact(index, q, scope)) > 0.85
    for scope in ([(5, 0, 1)], [(2, EACH - 1, EACH + 1)], everything):
        with pytest.raises(DocumentNotFound):
            index.search(0, q, scope, TOP_K)


def test_a_bias_holds_for_keys_inside_and_outside_an_engine(
    memory: tuple[LandmarkIndex, Scope], any_scope: None
) -> None:
    index, documents = memory
    index.add(-1, 0, 0, keys(30, 50))
    q, scope = queries(5), [*documents, (-1, 0, 30)]
    own, every = torch.zeros(DOCUMENTS * EACH + 30), torch.linspace(0, 50, DOCUMENTS * EACH + 30)
    own[-30:] = 50
    for bias, asked in ((own, 1), (every, 0)):
        before = index.asked
        hits, best = (
            some.search(0, q, scope, TOP_K, bias=bias) for some in (index, packed(index, scope))
        )
        assert torch.equal(hits.candidates, best.candidates)
        torch.testing.assert_close(hits.scores, best.scores, atol=1e-4, rtol=1e-5)
        assert index.asked - before == asked


def test_later_keys_are_found_exactly_before_and_after_a_rebuild(
    memory: tuple[LandmarkIndex, Scope],
) -> None:
    index, scope = memory
    index.add(7, 0, 0, keys(100, 7))
    index.add(6, 0, EACH, keys(50, 8))
    index.add(-1, 0, 0, keys(40, 9))  # a session's own, which no engine holds
    index.remove(2)
    index.add(2, 0, 0, keys(EACH, 222))
    grown: Scope = [*scope[:-1], (6, 0, EACH + 50), (7, 0, 100), (-1, 0, 40)]
    q = queries(50)
    best = exact(index, q, grown)
    new = (best.candidates >= DOCUMENTS * EACH) | (best.candidates // EACH == 1)
    assert new.any()
    hits = index.search(0, q, grown, TOP_K)
    assert_sound(index, q, grown, hits)
    assert (hits.candidates[..., :, None] == best.candidates[..., None, :]).any(-2)[new].all()
    build(index)
    hits = index.search(0, q, grown, TOP_K)
    assert_sound(index, q, grown, hits)
    assert recall(hits, best) >= 0.93 and index.asked == 2
    assert index.describe()["engines"][0]["landmarks"] == DOCUMENTS * EACH + 150


def test_of_equal_blocks_the_newer_comes_first(any_scope: None) -> None:
    index = LandmarkIndex(KV_HEADS, DIM, kind="auto")
    q = queries(3).round()
    q[...] = q[:1, :1]
    same = (q[0, 0] * 9).expand(3, KV_HEADS, DIM)
    for document in (2, 1):
        index.add(document, 0, 0, torch.cat([keys(200, document).round(), same]))
    build(index)
    hits = index.search(0, q, [(1, 0, 203), (2, 0, 203)], 5)
    assert hits.candidates.tolist() == [[[405, 404, 403, 202, 201]] * 3] * 4


def test_closed_rows_change_nothing_for_the_open_ones(memory: tuple[LandmarkIndex, Scope]) -> None:
    index, scope = memory
    q = queries(60)
    every = index.search(0, q, scope, TOP_K)
    opened = torch.zeros(q.shape[:2], dtype=torch.bool)
    opened[0, ::2] = opened[1, 5:] = True
    before = index.rows
    some = index.search(0, q, scope, TOP_K, open_rows=opened)
    assert index.rows - before == int(opened.sum())
    assert torch.equal(some.candidates[opened], every.candidates[opened])
    assert (some.candidates[2:] == -1).all() and (some.scores[2:] == NEG).all()


def test_index_is_searched_while_it_grows_and_is_rebuilt() -> None:
    index, scope = filled()
    q, done, problems = queries(8), threading.Event(), []
    searches, grown = [0, 0], [0]

    def search(number: int) -> None:
        while not done.is_set() or not searches[number]:
            try:
                some = [*scope, (7, 0, grown[0])]
                assert_sound(index, q, some, index.search(0, q, some, TOP_K))
                searches[number] += 1
            except Exception as problem:
                problems.append(problem)
                return

    threads = [threading.Thread(target=search, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for step in range(40):
        index.add(7, 0, 30 * step, keys(30, 100 + step))
        grown[0] += 30
        if step % 10 == 5:
            build(index)
    done.set()
    for thread in threads:
        thread.join()
    assert not problems and min(searches) > 0 and index.asked


# Files


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of an engine over the six documents."""
    directory = tmp_path_factory.mktemp("memory") / "index"
    index, _ = filled(directory)
    build(index)
    (path,) = directory.iterdir()
    return path


def test_removing_keys_removes_the_file_of_their_engine(tmp_path: Path) -> None:
    index, scope = filled(tmp_path / "index")
    build(index)
    assert [*(tmp_path / "index").iterdir()]
    for document, _, _ in scope:
        index.remove(document)
    build(index)  # over too few keys for an engine
    assert not [*(tmp_path / "index").iterdir()]


def test_stored_engine_finds_the_same(file: Path, memory: tuple[LandmarkIndex, Scope]) -> None:
    opened, scope = filled(file.parent)
    q = queries(30)
    before, after = (index.search(0, q, scope, TOP_K) for index in (memory[0], opened))
    assert opened.asked == 1
    assert torch.equal(after.candidates, before.candidates)
    torch.testing.assert_close(after.scores, before.scores)
    assert opened.describe() == memory[0].describe()


def test_a_changed_document_is_not_searched_by_an_old_index_file(file: Path) -> None:
    index, scope = filled(file.parent)
    index.remove(2)
    index.add(2, 0, 0, keys(EACH, 222))
    q = queries(50)
    hits, best = index.search(0, q, scope, TOP_K), exact(index, q, scope)
    assert index.asked == 1 and index.describe()["engines"][0]["landmarks"] == 5 * EACH
    assert_sound(index, q, scope, hits)
    changed = best.candidates // EACH == 1
    found = (hits.candidates[..., :, None] == best.candidates[..., None, :]).any(-2)
    assert changed.any() and found[changed].all()


@pytest.mark.parametrize("documents", [5, 2])
def test_an_engine_is_due_when_enough_keys_lack_one(
    file: Path, monkeypatch: pytest.MonkeyPatch, documents: int
) -> None:
    index, _ = filled(file.parent, documents)
    assert not index.due([0])
    monkeypatch.setattr(landmark_index, "PAYING", 1)
    assert index.due([0]) == (documents == 2)
    index.add(9, 0, 0, keys(2 * EACH, 9))
    assert index.due([0])


@fuzzed
@given(data=st.data())
def test_crafted_or_damaged_file_is_unusable_or_harmless(
    file: Path, tmp_path: Path, data: st.DataObject
) -> None:
    whole = file.read_bytes()
    how = data.draw(st.sampled_from(["flip", "cut", "append", "header", "array"]))
    at = data.draw(st.integers(0, len(whole) - 1))
    if how in ("flip", "cut", "append"):
        flipped = whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :]
        crafted = {"flip": flipped, "cut": whole[:at], "append": whole + b"x"}[how]
    else:
        header, arrays = decode_file(file.name, content_of(file), Header)
        fields = {name: getattr(header, name) for name in header.__struct_fields__}
        part = arrays[data.draw(st.integers(0, len(arrays) - 1))]
        if how == "header":
            way = data.draw(st.sampled_from([way for way in places(fields) if way]))
            fields = changed(fields, way, data.draw(st.sampled_from(WRONG)))
        elif len(part) >= 4:
            part[-4:] = data.draw(st.sampled_from([0, 0x7F, 0xFF]))
        crafted = b"".join(encode_file(fields, arrays))
    (tmp_path / file.name).write_bytes(crafted)
    (index, scope), q = filled(tmp_path), queries(3)
    assert_sound(index, q, scope, index.search(0, q, scope, TOP_K))
    assert how in ("header", "array") or index.asked == 0


def test_without_faiss_search_is_exact(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.setattr(landmark_index, "has_faiss", lambda: False)
    index, scope = filled(file.parent)
    q = queries(5)
    assert recall(index.search(0, q, scope, TOP_K), exact(index, q, scope)) == 1
    with pytest.raises(InvalidInput, match=r"pip install '\.\[cpu\]'"):
        index.build([0])
    assert not index.due([0])
