"""What many short documents are found by is read at once: as if each had been read alone, and what
is damaged is told as if it had been.
"""

from contextlib import closing
from pathlib import Path

import pytest
import torch

from memstore.disk.format.runs import Kind
from memstore.disk.tables.catalog import Catalog
from memstore.errors import CorruptMemory
from memstore.store.memory_store import MemoryStore
from support import selected_documents, synthetic_documents
from support.rounding import assert_same_to_rounding
from support.selected_documents import FORM, QUESTION
from support.synthetic_documents import BLOCK, SIGNATURE

# some in one run of 256 blocks of landmark keys, or of 32 of token landmarks, and some beyond
TOKENS = [BLOCK * blocks - 1 for blocks in (1, 3, 2, 40, 1, 300, 7, 1, 32, 33, 5)]


def open_(path: Path) -> MemoryStore:
    return MemoryStore.open(path, SIGNATURE, read_only=True, host_budget=1 << 22)


@pytest.fixture(scope="module")
def landmarks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("landmarks") / "memory"
    with MemoryStore.create(path, SIGNATURE, host_budget=1 << 22) as store:
        for text, tokens in enumerate(TOKENS):
            synthetic_documents.ingest(store, f"{text}", tokens, text=text, commit_bytes=1 << 20)
    return path


@pytest.fixture(scope="module")
def selected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("selected") / "memory"
    with selected_documents.create(path) as store:
        for text, tokens in enumerate(TOKENS, 1):
            selected_documents.ingest(store, f"{text}", tokens, text=text, commit_bytes=1 << 20)
    return path


def copied(sound: Path, path: Path) -> Path:
    path.mkdir()
    (path / "data.mdb").write_bytes((sound / "data.mdb").read_bytes())
    return path


def scope_of(store: MemoryStore) -> list[tuple[int, int, int]]:
    return [(row.id, 0, row.blocks) for row in store.ready()]


def damage(path: Path, part: int, number: int, *, gone: bool = False) -> None:
    """Alter, or remove, the first run of a part of a document."""
    with closing(Catalog.open(path)) as catalog:
        key = catalog.runs._key(number, part, 0)

        def work(txn: object) -> None:
            value = bytearray(txn.get("landmarks", key))  # type: ignore[attr-defined]
            value[-1] ^= 1
            txn.delete("landmarks", key)  # type: ignore[attr-defined]
            if not gone:
                txn.put("landmarks", key, bytes(value))  # type: ignore[attr-defined]

        catalog.database.write(work)


def test_landmark_keys_are_those_of_documents_that_are_read_alone(landmarks: Path) -> None:
    with open_(landmarks) as store, open_(landmarks) as alone:
        scope = scope_of(store)
        retrieval = alone.retrieval
        catalog = alone._committed.catalog
        with catalog.database.read() as txn:
            for row in alone.ready():
                retrieval.load(txn, row)
        for layer in SIGNATURE.memory_layers:
            found = store.retrieval.landmark_keys(layer, scope)
            assert torch.equal(found, alone.retrieval.landmark_keys(layer, scope))
            expected = [
                synthetic_documents.blocks(text, layer, 0, tokens)[2]
                for text, tokens in enumerate(TOKENS)
            ]
            assert torch.equal(found.half(), torch.cat(expected).transpose(0, 1))


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("document", [1, 5, 11])
def test_damaged_landmark_keys_are_told_as_of_a_document_alone(
    landmarks: Path, tmp_path: Path, document: int, gone: bool
) -> None:
    path = copied(landmarks, tmp_path / "memory")
    damage(path, SIGNATURE.memory_layers[-1], document, gone=gone)
    with open_(landmarks) as sound:
        retrieval = sound.retrieval
        row = sound.document(str(document - 1))
        with closing(Catalog.open(path, read_only=True)) as catalog, catalog.database.read() as txn:
            retrieval._catalog = catalog
            with pytest.raises(CorruptMemory) as alone:
                retrieval.load(txn, row)
    with open_(path) as store:
        scope = scope_of(store)
        for _ in range(2):
            with pytest.raises(CorruptMemory) as together:
                store.retrieval.landmark_keys(1, scope)
            assert str(together.value) == str(alone.value)


def test_batched_loading_scores_as_loading_each_document_alone(selected: Path) -> None:
    with open_(selected) as store, open_(selected) as alone:
        scope = scope_of(store)
        each = [[run] for run in scope]
        for head in range(FORM.heads):
            expected = [alone.retrieval.token_maxima(QUESTION, head, some) for some in each]
            found = store.retrieval.token_maxima(QUESTION, head, scope)
            assert_same_to_rounding(found, torch.cat(expected, 1))
        for some in each:  # loaded alone, and then searched with the others
            alone.retrieval.word_scores({7: 1.0}, some)
        words = {7: 1.0, 1003: 0.5, 1 << 31: 2.0}
        assert_same_to_rounding(
            store.retrieval.word_scores(words, scope), alone.retrieval.word_scores(words, scope)
        )
        for text, row in enumerate(store.ready(), 1):
            selected_documents.check_content(store, row, text)


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("kind", ["token", "words"])
def test_what_a_selector_finds_by_is_missed_in_the_document_that_lost_it(
    selected: Path, tmp_path: Path, kind: Kind, gone: bool
) -> None:
    path = copied(selected, tmp_path / "memory")
    with closing(Catalog.open(path)) as catalog:
        part = catalog.runs.part(kind)
    damage(path, part, 7, gone=gone)

    def search(store: MemoryStore, scope: list[tuple[int, int, int]]) -> torch.Tensor:
        if kind == "token":
            return store.retrieval.token_maxima(QUESTION, 0, scope)
        return store.retrieval.word_scores({7: 1.0}, scope)

    with open_(path) as store, open_(path) as alone:
        scope = scope_of(store)
        bad = [run for run in scope if run[0] == 7]
        with pytest.raises(CorruptMemory) as expected:
            search(alone, bad)
        for _ in range(2):
            with pytest.raises(CorruptMemory) as found:
                search(store, scope)
            assert str(found.value) == str(expected.value)
        rest = [run for run in scope if run[0] != 7]
        assert len(search(store, rest).flatten())


def test_a_document_that_changed_meanwhile_is_read_as_it_is_now(
    selected: Path, tmp_path: Path
) -> None:
    path = copied(selected, tmp_path / "memory")
    with MemoryStore.open(path, SIGNATURE, host_budget=1 << 22) as store:
        assert store.retrieval is not None  # it has read what there is
        with MemoryStore.open(path, SIGNATURE, host_budget=1 << 22) as other:
            selected_documents.ingest(other, "1", 2 * BLOCK, text=30, mode="replace")
        scope = scope_of(store)
        assert len(store.retrieval.word_scores({7: 1.0}, scope)) == sum(run[2] for run in scope)
        selected_documents.check_content(store, store.document("1"), 30)
