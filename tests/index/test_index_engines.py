"""One conformance suite over every approximate engine of the landmark index, and over the files
that keep them.
"""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from xxhash import xxh3_64_digest

from memstore.errors import DocumentNotFound, InvalidInput
from memstore.index import INDEX_KINDS, FaissIndex, Hits, PackedIndex, Scope, make_index
from memstore.index.faiss import faiss_candidates, faiss_files, faiss_index
from memstore.index.faiss.faiss_files import FaissFiles
from memstore.index.index_file import Unusable
from memstore.kernels.api import NEG
from support.crafted import WRONG, changed, fuzzed, places
from support.rounding import assert_same_to_rounding

FAISS = "faiss-ivf-sq8"
KINDS = [kind for kind in INDEX_KINDS if kind != "packed"]
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


@pytest.fixture(params=KINDS)
def memory(request: pytest.FixtureRequest) -> tuple[PackedIndex, Scope]:
    """A built index over six documents, and the scope of all of them."""
    index, scope = filled(request.param)
    build(index)
    return index, scope


@pytest.fixture
def any_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are asked however small the scope and however cheap the exact search."""
    monkeypatch.setattr(faiss_candidates, "_COVERED", 0)
    monkeypatch.setattr(faiss_index, "pays", lambda *_: True)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level("WARNING", "memstore"):
        yield caplog


def exact(index: PackedIndex, q: Tensor, scope: Scope, top_k: int = TOP_K) -> Hits:
    """The hits of a packed index over the same keys."""
    packed = PackedIndex(KV_HEADS, DIM)
    for document in {document for document, _, _ in scope}:
        first, end = index.span(document, 0)
        packed.add(document, 0, first, index.keys(0, [(document, first, end)]).transpose(0, 1))
    return packed.search(0, q, scope, top_k, return_lse=True)


def assert_sound(index: PackedIndex, q: Tensor, scope: Scope, hits: Hits) -> None:
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


def test_scores_are_exact_and_recall_is_as_calibrated(memory: tuple[PackedIndex, Scope]) -> None:
    index, scope = memory
    q = queries(100)
    hits = index.search(0, q, scope, TOP_K)
    assert_sound(index, q, scope, hits)
    assert recall(hits, exact(index, q, scope)) >= 0.93  # 0.95 of the sample; 1,600 blocks here
    if isinstance(index, FaissIndex):
        assert index.asked == 1


def test_no_hit_leaves_its_scope(memory: tuple[PackedIndex, Scope], any_scope: None) -> None:
    index, everything = memory
    index.add(-1, 0, 0, keys(30, 50))  # a session's own
    index.remove(5)
    index.trim(3, 60)
    q = queries(20)
    several: Scope = [(6, 10, 200), (2, 0, 100), (-1, 5, 25), (3, 60, 70), (4, 0, 1)]
    for scope in (
        [(1, 0, EACH)],
        [(2, 50, 100)],
        [(-1, 0, 30)],
        several,
        [(6, 0, EACH), (1, 3, 9)],
    ):
        hits = index.search(0, q, scope, TOP_K)
        assert_sound(index, q, scope, hits)
        assert recall(hits, exact(index, q, scope)) > 0.85
    for scope in ([(5, 0, 1)], [(2, EACH - 1, EACH + 1)], [(3, 59, 61)], everything):
        with pytest.raises(DocumentNotFound):
            index.search(0, q, scope, TOP_K)


def test_a_sessions_own_blocks_are_found_though_no_engine_holds_them(
    memory: tuple[PackedIndex, Scope],
) -> None:
    index, scope = memory
    q = queries(5)
    best = exact(index, q, scope).scores.max()
    strong = (q[0, 0] * 2 * best.clamp_min(1) / q[0, 0].norm() ** 2).expand(1, KV_HEADS, DIM)
    index.add(-1, 0, 0, strong)
    build(index)
    hits = index.search(0, q, [*scope, (-1, 0, 1)], TOP_K)
    assert int(hits.candidates[0, 0, 0]) == DOCUMENTS * EACH


def test_a_bias_is_kept_whether_an_engine_holds_what_it_is_for_or_not(
    memory: tuple[PackedIndex, Scope], any_scope: None
) -> None:
    index, documents = memory
    index.add(-1, 0, 0, keys(30, 50))
    q, scope = queries(5), [*documents, (-1, 0, 30)]
    packed = PackedIndex(KV_HEADS, DIM)
    for document, _, end in scope:
        packed.add(document, 0, 0, index.keys(0, [(document, 0, end)]).transpose(0, 1))
    own, every = torch.zeros(DOCUMENTS * EACH + 30), torch.linspace(0, 50, DOCUMENTS * EACH + 30)
    own[-30:] = 50
    for bias, asked in ((own, 1), (every, 0)):
        before = getattr(index, "asked", 0)
        hits, best = (some.search(0, q, scope, TOP_K, bias=bias) for some in (index, packed))
        assert torch.equal(hits.candidates, best.candidates)
        torch.testing.assert_close(hits.scores, best.scores, atol=1e-4, rtol=1e-5)
        if isinstance(index, FaissIndex):
            assert index.asked - before == asked


def test_keys_added_later_are_found_exactly_and_join_the_engine(
    memory: tuple[PackedIndex, Scope], monkeypatch: pytest.MonkeyPatch
) -> None:
    index, scope = memory
    index.add(7, 0, 0, keys(100, 7))
    index.add(6, 0, EACH, keys(50, 8))
    grown: Scope = [*scope[:-1], (6, 0, EACH + 50), (7, 0, 100)]
    q = queries(50)
    best = exact(index, q, grown)
    new = best.candidates >= DOCUMENTS * EACH
    assert new.any()
    for _ in range(2):
        hits = index.search(0, q, grown, TOP_K)
        assert_sound(index, q, grown, hits)
        assert recall(hits, best) >= 0.93
        if not isinstance(index, FaissIndex):
            return
        # beside the engine: none of the new ones is missed
        if index.built[0].rows.end == DOCUMENTS * EACH:
            found = (hits.candidates[..., :, None] == best.candidates[..., None, :]).any(-2)
            assert found[new].all()
            monkeypatch.setattr(faiss_index, "_LEAST_JOIN", 0)
            monkeypatch.setattr(faiss_index, "_JOIN", 0)
            assert index.join(0)
        assert {head.size for head in index.built[0].heads} == {DOCUMENTS * EACH + 150}
        assert index.built[0].rows.span(6) == (0, EACH + 50)


def test_a_denominator_is_exact(memory: tuple[PackedIndex, Scope]) -> None:
    index, scope = memory
    q = queries(10)
    hits, best = index.search(0, q, scope, TOP_K, return_lse=True), exact(index, q, scope)
    assert torch.equal(hits.candidates, best.candidates)
    assert hits.lse is not None and best.lse is not None
    torch.testing.assert_close(hits.lse, best.lse, atol=1e-4, rtol=1e-5)
    assert index.search(0, q, scope, TOP_K).lse is None


@pytest.mark.parametrize("kind", KINDS)
def test_of_equal_blocks_the_newer_comes_first(kind: str, any_scope: None) -> None:
    index = make_index(kind, KV_HEADS, DIM)
    q = queries(3).round()
    q[...] = q[:1, :1]
    same = (q[0, 0] * 9).expand(3, KV_HEADS, DIM)
    for document in (2, 1):
        index.add(document, 0, 0, torch.cat([keys(200, document).round(), same]))
    build(index)
    hits = index.search(0, q, [(1, 0, 203), (2, 0, 203)], 5)
    assert hits.candidates.tolist() == [[[405, 404, 403, 202, 201]] * 3] * 4


def test_closed_rows_change_nothing_for_the_open_ones(memory: tuple[PackedIndex, Scope]) -> None:
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


def test_auto_uses_its_engine_only_where_it_is_cheaper() -> None:
    index, scope = filled("auto")
    q = queries(64)
    assert isinstance(index, FaissIndex)
    index.search(0, q, scope, TOP_K)
    build(index)
    one = index.search(0, q[:, :1], scope, TOP_K)
    assert index.asked == 0 and torch.equal(
        one.candidates, exact(index, q[:, :1], scope).candidates
    )
    index.search(0, q, scope, TOP_K)
    assert index.asked == 1
    index.search(0, q, scope[:1], TOP_K)  # a small part of the keys
    assert index.asked == 1


def test_index_is_searched_while_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faiss_index, "_LEAST_JOIN", 200)
    index, scope = filled(FAISS)
    build(index)
    assert isinstance(index, FaissIndex)
    q, done, problems = queries(8), threading.Event(), []
    searches = [0, 0]

    def search(number: int) -> None:
        while not done.is_set() or not searches[number]:
            try:
                last = index.span(7, 0)[1]
                some = [*scope, (7, 0, last)]
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
    done.set()
    for thread in threads:
        thread.join()
    assert not problems and min(searches) > 0
    assert index.built[0].rows.end > DOCUMENTS * EACH  # some joined meanwhile


# Files


def test_stored_engine_finds_the_same(tmp_path: Path) -> None:
    index, scope = filled(FAISS)
    build(index)
    assert isinstance(index, FaissIndex)
    faiss_files.write_engines(tmp_path, index, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["layer-0.idx"]
    q = queries(30)
    before = index.search(0, q, scope, TOP_K)
    for reader in (FAISS, "auto"):
        opened, _ = filled(reader)
        assert isinstance(opened, FaissIndex)
        opened.install(0, faiss_files.read_engines(tmp_path, opened, 0))
        opened.auto = False  # so that the engine is asked
        after = opened.search(0, q, scope, TOP_K)
        assert opened.asked == 1
        assert torch.equal(after.candidates, before.candidates)
        assert_same_to_rounding(after.scores, before.scores)
        assert opened.describe()["engines"] == index.describe()["engines"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a faiss-ivf-sq8 index over the six documents."""
    index, _ = filled(FAISS)
    build(index)
    assert isinstance(index, FaissIndex)
    directory = tmp_path_factory.mktemp("index")
    faiss_files.write_engines(directory, index, 0)
    return faiss_files.file_of(directory, 0).read_bytes()


def test_stale_index_file_is_not_used(file: bytes, tmp_path: Path) -> None:
    faiss_files.file_of(tmp_path, 0).write_bytes(file)
    index, _ = filled(FAISS, 2)
    assert isinstance(index, FaissIndex)
    with pytest.raises(Unusable, match="stale"):
        faiss_files.read_engines(tmp_path, index, 0)


def test_changed_document_is_not_served_from_a_file(file: bytes, tmp_path: Path) -> None:
    faiss_files.file_of(tmp_path, 0).write_bytes(file)
    index, scope = filled(FAISS)
    assert isinstance(index, FaissIndex)
    index.remove(2)
    index.add(2, 0, 0, keys(EACH, 222))
    built = faiss_files.read_engines(tmp_path, index, 0)
    assert built.rows.documents() == {1, 3, 4, 5, 6}
    index.install(0, built)
    q = queries(50)
    hits, best = index.search(0, q, scope, TOP_K), exact(index, q, scope)
    assert index.asked == 1
    assert_sound(index, q, scope, hits)
    changed = (best.candidates >= EACH) & (best.candidates < 2 * EACH)
    assert (
        changed.any()
        and (hits.candidates[..., :, None] == best.candidates[..., None, :]).any(-2)[changed].all()
    )


@fuzzed
@given(data=st.data())
def test_crafted_or_damaged_file_is_unusable_or_harmless(
    file: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    path = faiss_files.file_of(tmp_path, 0)
    index, scope = filled(FAISS)
    assert isinstance(index, FaissIndex)
    how = data.draw(st.sampled_from(["flip", "cut", "append", "header", "payload"]))
    at = data.draw(st.integers(0, len(file) - 1))
    if how in ("flip", "cut", "append"):
        flipped = file[:at] + bytes([file[at] ^ 0x10]) + file[at + 1 :]
        path.write_bytes({"flip": flipped, "cut": file[:at], "append": file + b"x"}[how])
        with pytest.raises(Unusable):
            faiss_files.read_engines(tmp_path, index, 0)
        return
    magic, rest = file[: file.index(b"\n") + 1], file[file.index(b"\n") + 1 :]
    end = 16 + int.from_bytes(rest[:8], "little")
    header, payload = msgpack.unpackb(rest[16:end]), rest[end:]
    if how == "header":
        way = data.draw(st.sampled_from(list(places(header))))
        header = changed(header, way, data.draw(st.sampled_from(WRONG)))
    else:  # the number of the last row, or the whole payload
        last = payload[:-8] + b"\xff\xff\xff\x7f" + b"\0" * 4
        payload = data.draw(st.sampled_from([last, b"", payload[:4], b"ilod" + payload[4:]]))
    if isinstance(header, dict) and "payload" in header:
        header = {**header, "payload": xxh3_64_digest(payload)}
    packed = msgpack.packb(header)
    size = len(packed).to_bytes(8, "little")
    path.write_bytes(magic + size + xxh3_64_digest(packed) + packed + payload)
    try:
        index.install(0, faiss_files.read_engines(tmp_path, index, 0))
    except Unusable:
        return
    assert how == "header"
    found = index.search(0, queries(3), scope, 4)
    assert ((found.candidates >= -1) & (found.candidates < DOCUMENTS * EACH)).all()


@pytest.mark.parametrize("read_only", [False, True])
def test_damaged_file_is_rebuilt_unless_read_only(
    read_only: bool, file: bytes, tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    path = faiss_files.file_of(tmp_path, 0)
    path.write_bytes(file[:-100])
    index, scope = filled(FAISS)
    assert isinstance(index, FaissIndex)
    faiss_files.write_samples(tmp_path, samples())
    engines = FaissFiles(index, [0], tmp_path, read_only=read_only)
    engines.open(0)
    assert "damaged; building it again" in warnings.text
    q = queries(50)
    assert recall(index.search(0, q, scope, TOP_K), exact(index, q, scope)) >= 0.93
    assert index.asked == 1
    if read_only:
        assert path.read_bytes() == file[:-100]
    else:
        assert faiss_files.read_engines(tmp_path, index, 0).rows.end == DOCUMENTS * EACH
    warnings.clear()
    engines.open(0)
    assert not warnings.text


# Without FAISS


def test_without_faiss_search_is_exact(
    file: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(InvalidInput, match=r"pip install '\.\[cpu\]'"):
        make_index(FAISS, KV_HEADS, DIM)
    q = queries(5)
    for kind in ("packed", "auto"):
        index, scope = filled(kind)
        assert recall(index.search(0, q, scope, TOP_K), exact(index, q, scope)) == 1
    assert isinstance(index, FaissIndex)
    with pytest.raises(InvalidInput, match=r"pip install '\.\[cpu\]'"):
        index.build(0)
    faiss_files.file_of(tmp_path, 0).write_bytes(file)  # somebody else's
    FaissFiles(index, [0], tmp_path, read_only=False).open(0)
    assert "searching exactly" in warnings.text
    assert torch.equal(
        index.search(0, q, scope, TOP_K).candidates, exact(index, q, scope).candidates
    )
    assert faiss_files.file_of(tmp_path, 0).read_bytes() == file
