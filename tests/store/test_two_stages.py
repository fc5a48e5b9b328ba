"""Search in two stages: proposed passages get their exact scores, and documents that the lists do
not know are not left out.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.runs import run_of
from memstore.errors import CorruptMemory, DocumentNotFound
from memstore.index.block_rows import Scope
from memstore.index.word_index import WordsBeside
from memstore.store.memory_store import MemoryStore
from memstore.store.retrieve import first_stage
from memstore.store.retrieve.first_stage import Shortlist
from support.many_passages import PROPOSED, add, create, everything, question, search_by_lists

DOCUMENTS, EACH = 4, 300

pytest.importorskip("faiss")


@pytest.fixture(autouse=True)
def _small_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    search_by_lists(monkeypatch)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory with lists."""
    path = tmp_path_factory.mktemp("lists") / "m"
    with pytest.MonkeyPatch.context() as patch, create(path) as store:
        patch.setattr(first_stage, "PAYING", 1)
        for text in range(1, DOCUMENTS + 1):
            add(store, str(text), text, EACH)
        built = store.build_index()
        assert (built["passages"], built["landmarks"]) == (DOCUMENTS * EACH, 12 * DOCUMENTS * EACH)
    return path


@pytest.fixture
def memory(tmp_path: Path, made: Path) -> Iterator[MemoryStore]:
    """A copy of it, open."""
    with MemoryStore.open(shutil.copytree(made, tmp_path / "m"), host_budget=1 << 22) as store:
        yield store


def exact(store: MemoryStore, seed: int, scope: Scope) -> torch.Tensor:
    """The score of every block of a scope."""
    rows, weights = asked(seed)
    return weights @ store.retrieval.selected.token_maxima(rows, scope)


def asked(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return question(1 + seed % DOCUMENTS, seed * 37 % EACH, seed)


def shortlist(store: MemoryStore, seed: int, scope: Scope) -> Shortlist:
    return store.retrieval.shortlist(*asked(seed), scope)


def assert_best(store: MemoryStore, seed: int, whole: Scope) -> Shortlist:
    """What is proposed is scored as without lists, and holds the best block."""
    short, scores = shortlist(store, seed, whole), exact(store, seed, whole)
    rows, weights = asked(seed)
    listed = numbers(short.scope, whole)
    torch.testing.assert_close(weights @ short.token_maxima(rows, short.scope), scores[listed])
    assert scores.argmax() in listed
    return short


def numbers(scope: Scope, whole: Scope) -> list[int]:
    """The positions of the blocks of a scope within the whole scope."""
    first, at = 0, {}
    for document, begin, end in whole:
        at[document] = first - begin
        first += end - begin
    return [at[document] + block for document, begin, end in scope for block in range(begin, end)]


def test_lists_propose_the_best_passages_with_their_exact_scores(memory: MemoryStore) -> None:
    whole, found = everything(memory), []
    for seed in range(40):
        short, scores = shortlist(memory, seed, whole), exact(memory, seed, whole)
        listed = numbers(short.scope, whole)
        assert listed == sorted(set(listed)) and len(listed) <= PROPOSED
        assert short.blocks == DOCUMENTS * EACH
        rows, weights = asked(seed)
        torch.testing.assert_close(weights @ short.token_maxima(rows, short.scope), scores[listed])
        best = scores.topk(8).indices.tolist()
        found.append(len({*best} & {*listed}) / 8)
        assert short.deviation == pytest.approx(float(scores.std(correction=0)), rel=0.1)
        some = short.scope[5:9]
        torch.testing.assert_close(
            weights @ short.token_maxima(rows, some), scores[numbers(some, whole)]
        )
    assert np.mean(found) > 0.95


def test_a_rare_word_adds_passages_that_the_lists_miss(memory: MemoryStore) -> None:
    memory.forget("2")
    new = add(memory, "new", 5, 20)
    texts = {memory.document(name).id: int(name) for name in "134"} | {new.id: 5}
    for whole in (everything(memory), everything(memory)[::-1]):
        for seed, (document, text) in enumerate(texts.items()):
            block = 19 if text == 5 else 250 - seed
            beside = WordsBeside({1 << 31 | text << 20 | block: 1.0}, 3.0)
            rows, weights = asked(seed)
            without = memory.retrieval.shortlist(rows, weights, whole)
            short = memory.retrieval.shortlist(rows, weights, whole, beside)
            ((place, _, _),) = [run for run in short.scope if run not in without.scope] or [
                (0,) * 3
            ]
            if document == new.id:  # which no list holds, and is scored whole
                assert (place, (document, 0, 20) in short.scope) == (0, True)
            else:
                assert place == document and (document, block, block + 1) in short.scope


def test_blocks_around_the_best_of_the_question_before_are_proposed(memory: MemoryStore) -> None:
    whole, (rows, weights) = everything(memory), asked(0)
    document = whole[3][0]
    short = memory.retrieval.shortlist(rows, weights, whole, around=(document, 290))
    assert {(document, block, block + 1) for block in range(34, EACH)} <= {*short.scope}
    expected = exact(memory, 0, whole)[numbers(short.scope, whole)]
    torch.testing.assert_close(weights @ short.token_maxima(rows, short.scope), expected)


def test_nothing_outside_a_scope_is_proposed(memory: MemoryStore) -> None:
    whole = everything(memory)
    scope = [whole[2], whole[0]]  # in another order than they are stored in
    for seed in range(8):
        short = assert_best(memory, seed, scope)
        assert {document for document, _, _ in short.scope} <= {scope[0][0], scope[1][0]}
        listed = numbers(short.scope, scope)
        assert listed == sorted(listed) and short.blocks == 2 * EACH
    # too few passages to tell from a sample what is usual
    assert memory.retrieval.shortlist(*asked(0), [(whole[0][0], 0, 200)]) is None


def test_new_and_changed_documents_are_scored_exactly(memory: MemoryStore) -> None:
    memory.forget("2")
    add(memory, "3", 33, EACH - 7, mode="replace")
    new = add(memory, "new", 5, 20)
    whole = everything(memory)
    replaced = memory.document("3").id
    for seed in (0, 3):  # of texts that are still there
        short = assert_best(memory, seed, whole)
        assert {(new.id, 0, 20), (replaced, 0, EACH - 7)} <= {*short.scope}
    memory.build_index()
    assert len(shortlist(memory, 0, whole).scope) <= PROPOSED
    memory.describe("1", {"shelf": "upper"})  # its text is the same
    assert len(shortlist(memory, 0, everything(memory)).scope) <= PROPOSED


def test_erased_documents_are_in_no_list(memory: MemoryStore) -> None:
    memory.forget("2", erase=True)
    assert not list((memory.path / "index").iterdir())
    assert memory.retrieval.shortlist(*asked(0), everything(memory)) is None
    memory.build_index()
    assert_best(memory, 0, everything(memory))


def test_damaged_lists_are_ignored_with_a_warning_and_answers_stay_the_same(
    memory: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    whole, path = everything(memory), memory.path / "index" / "passages.idx"
    kept, words = path.read_bytes(), {7: 1.0}
    expected = memory.retrieval.selected.word_scores(words, whole)
    for content in (
        b"",
        kept[:-1],
        kept[:60] + b"\0" + kept[61:],  # in the header
        kept[:900] + bytes([kept[900] ^ 1]) + kept[901:],
        kept[:-1] + bytes([kept[-1] ^ 1]),
        b"\0" * len(kept),
    ):
        path.unlink()
        path.write_bytes(content)
        with MemoryStore.open(memory.path, read_only=True, host_budget=1 << 22) as other:
            assert other.retrieval.shortlist(*asked(0), whole) is None
            assert torch.equal(other.retrieval.selected.word_scores(words, whole), expected)
        assert "run `memstore index`" in caplog.text or "until `memstore index`" in caplog.text
        caplog.clear()


def test_words_of_the_lists_score_as_those_of_the_memory(memory: MemoryStore) -> None:
    whole, words = everything(memory), {7: 1.0, 1004: 0.5, 1 << 31 | 2 << 20 | 17: 1.0}
    expected = memory.retrieval.selected.word_scores(words, whole)
    with MemoryStore.open(memory.path, read_only=True, host_budget=1 << 22) as other:
        short = shortlist(other, 0, whole)  # takes them
        torch.testing.assert_close(other.retrieval.selected.word_scores(words, whole), expected)
        found = short.word_scores(words, short.scope)
        torch.testing.assert_close(found, expected[numbers(short.scope, whole)])


def test_a_killed_rebuild_leaves_the_old_lists(memory: MemoryStore) -> None:
    path = memory.path / "index" / "passages.idx"
    before = path.read_bytes()

    def killed(done: int, tokens: int) -> None:
        if done == tokens:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        memory.build_index(progress=killed)
    assert path.read_bytes() == before
    assert [*path.parent.iterdir()] == [path]


def test_missing_landmarks_are_reported(memory: MemoryStore) -> None:
    whole = everything(memory)
    run = shortlist(memory, 0, whole).scope[0]
    catalog = Catalog.open(memory.path)
    first = run_of("token", run[1])
    catalog.database.write(lambda txn: catalog.runs.delete_run(txn, run[0], 0, first))
    catalog.close()
    rows, _ = asked(0)
    with MemoryStore.open(memory.path, read_only=True, host_budget=1 << 22) as other:
        short = shortlist(other, 0, whole)
        with pytest.raises(CorruptMemory, match="run verify"):
            short.token_maxima(rows, [run])


def test_a_question_does_not_read_a_document_that_changed_after_the_search(
    memory: MemoryStore,
) -> None:
    whole = everything(memory)
    rows, _ = asked(0)
    with MemoryStore.open(memory.path, read_only=True, host_budget=1 << 22) as other:
        short = shortlist(other, 0, whole)
        gone, changed = memory.document("1").id, memory.document("2").id
        memory.forget("1")
        add(memory, "2", 2, EACH + 7, mode="replace")
        for number in (gone, changed):
            with pytest.raises(DocumentNotFound, match="list the memory's documents again"):
                short.token_maxima(rows, [run for run in short.scope if run[0] == number])
        # asked anew, what was added is there
        now = everything(other)
        again, changed = assert_best(other, 1, now), memory.document("2").id
        assert any(run[0] == changed and run[2] > EACH for run in again.scope)


def test_a_document_that_changes_while_lists_are_made_is_scored_whole(memory: MemoryStore) -> None:
    # one document in each piece, so that the first is reported before all are read
    def change(done: int, tokens: int) -> None:
        if done == 0:
            memory.forget("2")
            add(memory, "3", 33, EACH - 7, mode="replace")

    built = memory.build_index(progress=change)
    assert built["passages"] >= 2 * EACH
    short = assert_best(memory, 0, everything(memory))
    assert (memory.document("3").id, 0, EACH - 7) in short.scope


def test_compacting_removes_lists_that_hold_forgotten_documents(memory: MemoryStore) -> None:
    memory.compact()
    assert memory.retrieval.shortlist(*asked(0), everything(memory)) is not None
    memory.forget("2")
    memory.compact()
    assert not list((memory.path / "index").iterdir())
