"""A server of a published memory: it answers, refuses writes, and reports an unreachable store."""

from pathlib import Path

import openai
import pytest

pytest.importorskip("obstore")

from memstore import load_model
from memstore.model.landmark.landmark_model import LandmarkModel
from memstore.share.open_object_store import open_object_store
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer import publish_memory
from support.diary import ANSWER, QUESTION, write_diary
from support.published import Wild, WildPlace, open_at
from support.serving import serving_store


@pytest.fixture(scope="module")
def model() -> LandmarkModel:
    return load_model()


@pytest.fixture(scope="module")
def path(model: LandmarkModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory with the diary and the letter; beside it, it is published."""
    path = tmp_path_factory.mktemp("published")
    with MemoryStore.open(write_diary(path / "mem", model)) as store:
        publish_memory(store, f"file://{path}/there")
    return path


def test_a_published_memory_is_asked_and_not_written(path: Path, model: LandmarkModel) -> None:
    with (
        MemoryStore.open(f"file://{path}/there", model.signature) as store,
        serving_store(store, model) as away,
        away.client() as plain,
    ):
        said = away.chat(QUESTION, extra_body={"memstore": {"trace": True}})
        assert said.choices[0].message.content == ANSWER
        assert "remote" in said.model_extra["memstore"]["tiers"]
        assert plain.get("/v1/memstore").json()["write"] is False
        for refused in (
            plain.delete("/v1/memstore/documents/diary"),
            plain.post("/v1/memstore/documents", files={"file": ("a.txt", b"a")}),
        ):
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "read_only")
        assert len(store.documents()) == 2


def test_a_lost_store_answers_503_and_is_tried_again(path: Path, model: LandmarkModel) -> None:
    place = WildPlace(open_object_store(f"file://{path}/there"), Wild(0, 0.0))
    with open_at(place, host_budget=64 << 20) as store, serving_store(store, model) as server:
        place.unreachable = True
        with pytest.raises(openai.InternalServerError) as refused:
            server.chat(QUESTION)
        assert refused.value.status_code == 503 and refused.value.code == "storage_unavailable"
        assert refused.value.response.headers["retry-after"] == "5"
        assert str(path) not in refused.value.message
        place.unreachable = False
        said = server.chat(QUESTION)
        assert said.choices[0].message.content == ANSWER
