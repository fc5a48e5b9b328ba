"""The landmark index of a real memory: built from the model's queries and stored in files."""

import logging
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from memstore.cli.main import app
from memstore.errors import InvalidInput, ReadOnlyMemory
from memstore.index import landmark_index
from memstore.model.landmark.landmark_model import LandmarkModel
from memstore.store.memory_store import MemoryStore
from support.tiny_model import save_tiny_model, text

LAYER = 1
WORDS = 1500  # more than the 256 blocks that are worth an engine


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are asked, however few keys there are."""
    monkeypatch.setattr(landmark_index, "_LEAST_ASKED", 1)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, model: LandmarkModel) -> Path:
    """A memory of two documents with an index."""
    path = tmp_path_factory.mktemp("built") / "memory"
    with MemoryStore.create(path, model.signature) as store:
        for seed, name in enumerate(("one", "two")):
            model.ingest(text(WORDS, seed), store, name=name)
        model.build_index(store)
    return path


@pytest.fixture(scope="module")
def unbuilt(tmp_path_factory: pytest.TempPathFactory, model: LandmarkModel) -> Path:
    """A memory of one document, without an index."""
    path = tmp_path_factory.mktemp("unbuilt") / "memory"
    with MemoryStore.create(path, model.signature) as store:
        model.ingest(text(WORDS), store, name="one")
    return path


@pytest.fixture
def memory(tmp_path: Path, built: Path) -> Path:
    """A copy of `built`, for a test to change."""
    return Path(shutil.copytree(built, tmp_path / "memory"))


def hits(
    store: MemoryStore, names: tuple[str, ...] = ("one", "two")
) -> tuple[torch.Tensor, torch.Tensor]:
    """What 20 random queries find in documents."""
    signature = store.signature
    q = torch.randn(4, 20, signature.head_dim, generator=torch.Generator().manual_seed(3))
    scope = tuple((store.document(name).id, 0, store.document(name).blocks) for name in names)
    found = store.retrieval.landmarks(scope).search(LAYER, q, scope, 3)
    return found.scores, found.candidates


def recall(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found[..., :, None] == exact[..., None, :]).any(-2).float().mean())


def test_a_later_process_searches_with_the_engines_that_were_saved(
    memory: Path, model: LandmarkModel
) -> None:
    with MemoryStore.open(memory, model.signature, index="packed") as store:
        scores, exact = hits(store)
    with MemoryStore.open(memory, model.signature, read_only=True) as store:
        found_scores, found = hits(store)
        described = store.stats()["index"]
    assert described["asked"] == 1
    assert min(described["engines"][LAYER]["recall"]) >= 0.95
    assert recall(found, exact) > 0.7  # random queries are not what the engine was calibrated with
    same = found == exact
    torch.testing.assert_close(found_scores[same], scores[same], atol=1e-5, rtol=1e-5)


def test_an_engine_of_full_recall_gives_the_same_answers(
    memory: Path, model: LandmarkModel
) -> None:
    for file in (memory / "index").iterdir():
        file.unlink()
    answers = []
    for kind in ("packed", "auto"):
        with MemoryStore.open(memory, model.signature, index=kind) as store:
            if kind == "auto":
                store.build_index()  # without a sample of queries an engine looks at everything
            answers.append(
                model.ask(
                    "the quiet river of winter", store, max_new_tokens=6, until_sentence=False
                ).tokens
            )
    assert answers[0] == answers[1]


def test_documents_that_come_later_are_found_and_forgotten_ones_are_not(
    memory: Path, model: LandmarkModel
) -> None:
    with MemoryStore.open(memory, model.signature) as store:
        hits(store)
        model.ingest(text(700, 9), store, name="three")
        store.forget("one")
        _, found = hits(store, ("two", "three"))
        number, blocks = store.document("two").id, store.document("two").blocks
        assert (found >= blocks).any() and (found < blocks).any()
    with MemoryStore.open(memory, model.signature, index="packed") as store:
        assert store.document("two").id == number
        assert recall(found, hits(store, ("two", "three"))[1]) > 0.7


def test_a_damaged_file_is_not_used_and_is_built_again(
    memory: Path, model: LandmarkModel, caplog: pytest.LogCaptureFixture
) -> None:
    file = memory / "index" / f"layer-{LAYER}.idx"
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    with MemoryStore.open(memory, model.signature, index="packed") as store:
        exact = hits(store)[1]
    with caplog.at_level(logging.WARNING), MemoryStore.open(memory, model.signature) as store:
        assert torch.equal(hits(store)[1], exact)
        assert caplog.text.count("is damaged; searching exactly") == 1
        store.build_index()
    with MemoryStore.open(memory, model.signature) as store:
        hits(store)
        assert store.stats()["index"]["asked"] == 1


def test_failing_to_write_an_index_is_an_error_and_searches_go_on(
    memory: Path, model: LandmarkModel
) -> None:
    file = memory / "index" / f"layer-{LAYER}.idx"
    file.unlink()
    file.mkdir()
    (file / "in the way").touch()
    with MemoryStore.open(memory, model.signature) as store:
        hits(store)
        with pytest.raises(ReadOnlyMemory, match="cannot be written"):
            store.build_index()
        hits(store)


def test_building_an_index_without_documents_or_write_access_is_refused(
    tmp_path: Path, model: LandmarkModel, memory: Path
) -> None:
    with MemoryStore.create(tmp_path / "empty", model.signature) as store:
        with pytest.raises(InvalidInput, match="no finished document"):
            model.build_index(store)
        assert not store.update_index()
    with (
        MemoryStore.open(memory, model.signature, index="packed") as store,
        pytest.raises(InvalidInput, match="packed index builds nothing"),
    ):
        model.build_index(store)
    with (
        MemoryStore.open(memory, model.signature, read_only=True) as store,
        pytest.raises(ReadOnlyMemory),
    ):
        model.build_index(store)


def test_update_asks_for_an_engine_where_one_would_pay(
    tmp_path: Path, unbuilt: Path, model: LandmarkModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memstore.model.landmark.landmark_model._STRETCHES", 1)  # of eight
    path = shutil.copytree(unbuilt, tmp_path / "memory")
    with MemoryStore.open(path, model.signature) as store:
        assert not store.update_index()
        monkeypatch.setattr(landmark_index, "PAYING", store.document("one").blocks)
        assert store.update_index()
        model.build_index(store)
        assert not store.update_index()


def test_the_index_command_reports_the_landmarks_and_engines(
    tmp_path: Path, unbuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memstore.model.landmark.landmark_model._STRETCHES", 1)  # of eight
    weights = save_tiny_model(tmp_path / "model")
    shutil.copytree(unbuilt, tmp_path / "memory")
    memory = tmp_path / "memory"
    told = CliRunner().invoke(app, ["index", "--store", str(memory), "--model", str(weights)])
    assert told.exit_code == 0, told.output
    assert " landmarks; effort of its heads" in told.stdout
    assert (memory / "index" / "layer-1.idx").exists()
