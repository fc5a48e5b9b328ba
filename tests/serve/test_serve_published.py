"""A server of a published memory: it answers as the server of the directory does, writes nothing,
names what could not be reached, and follows what is published.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

pytest.importorskip("obstore")

from memstore import load_model
from memstore.errors import StoreUnavailable
from memstore.model.landmark.landmark_model import LandmarkModel
from memstore.share.open_object_store import open_object_store
from memstore.share.publish import unpublish
from memstore.store.memory_store import MemoryStore
from support.diary import ANSWER, DIARY, LETTER, QUESTION, write_diary
from support.published import Wild, WildPlace, open_at
from support.serving import Served, serving, serving_store


@pytest.fixture(scope="module")
def model() -> LandmarkModel:
    return load_model()


@pytest.fixture(scope="module")
def path(model: LandmarkModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory with the diary and the letter; beside it, it is published."""
    path = tmp_path_factory.mktemp("published")
    with MemoryStore.open(write_diary(path / "mem", model)) as store:
        store.publish(f"file://{path}/there")
    return path


@pytest.fixture(scope="module")
def away(path: Path, model: LandmarkModel) -> Iterator[Served]:
    """A server of what is published."""
    with (
        MemoryStore.open(f"file://{path}/there", model.signature) as store,
        serving_store(store, model) as server,
    ):
        yield server


def test_a_published_memory_answers_as_its_directory_does(path: Path, away: Served) -> None:
    trace = {"memstore": {"trace": True}}
    foal = "What is the name of the new foal?"
    with serving(path / "mem", diary=False) as near:
        answers = [server.chat(QUESTION, extra_body=trace) for server in (near, away)]
        found = []
        for server in (near, away):
            only = server.chat(foal, extra_body={"memstore": {"documents": ["letter"]}})
            with server.client() as plain:
                text = plain.get("/v1/memstore/text", params={"document": "letter"}).json()
                assert "".join(block["text"] for block in text["data"]) == LETTER
                searched = {"query": "the new foal", "top_k": 1}
                (best,) = plain.post("/v1/memstore/search", json=searched).json()["data"]
            found.append((only.choices[0].message.content, best["document"], best["text"]))
    assert answers[0].choices == answers[1].choices
    assert answers[0].choices[0].message.content == ANSWER
    near_report, away_report = (answer.model_extra["memstore"] for answer in answers)
    assert near_report["sources"][0]["span"] == away_report["sources"][0]["span"]
    assert [token["text"] for token in near_report["tokens"]] == [
        token["text"] for token in away_report["tokens"]
    ]
    assert "remote" in away_report["tiers"] and "remote" not in near_report["tiers"]
    assert found[0] == found[1] and "Clover" in found[0][0]


def test_nothing_is_written_to_a_published_memory(away: Served) -> None:
    with away.client() as plain:
        assert plain.get("/v1/memstore").json()["write"] is False
        for refused in (
            plain.delete("/v1/memstore/documents/diary"),
            plain.post("/v1/memstore/documents", files={"file": ("a.txt", b"a")}),
        ):
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "read_only")
    assert len(away.service.store.documents()) == 2


class Away(WildPlace):
    """A place that cannot be reached for a time."""

    gone = False

    def get_range(self, name: str, offset: int, length: int) -> memoryview:
        if self.gone:
            raise StoreUnavailable(f"{self.url}: connection refused; try again")
        return super().get_range(name, offset, length)


def test_an_unreachable_store_answers_503_and_is_tried_again(
    path: Path, model: LandmarkModel
) -> None:
    place = Away(open_object_store(f"file://{path}/there"), Wild(0, 0.0))
    with open_at(place, host_budget=64 << 20) as store, serving_store(store, model) as server:
        place.gone = True
        with pytest.raises(openai.InternalServerError) as refused:
            server.chat(QUESTION)
        assert refused.value.status_code == 503 and refused.value.code == "storage_unavailable"
        assert refused.value.response.headers["retry-after"] == "5"
        assert str(path) not in refused.value.message
        place.gone = False
        said = server.chat(QUESTION)
        assert said.choices[0].message.content == ANSWER


def test_a_server_follows_what_is_published(model: LandmarkModel, tmp_path: Path) -> None:
    url, foal = f"file://{tmp_path}/there", "What is the name of the new foal?"

    def within_a_minute(true: Callable[[], bool]) -> bool:
        until = time.monotonic() + 60
        while not true() and time.monotonic() < until:
            time.sleep(0.05)
        return true()

    with MemoryStore.create(tmp_path / "mem", model.signature) as near:
        model.ingest(DIARY, near, name="diary")
        near.publish(url)
        with (
            MemoryStore.open(url, model.signature, refresh=0.1) as store,
            serving_store(store, model) as server,
        ):
            first = server.chat(QUESTION).choices[0].message.content
            assert first == ANSWER
            model.ingest(LETTER, near, name="letter")
            near.publish(url)
            assert within_a_minute(lambda: store.has("letter"))
            # in the conversation that is under way, and in another
            for said in ((QUESTION, first, foal), (foal,)):
                assert "Clover" in server.chat(*said).choices[0].message.content
            unpublish(open_object_store(url), ["diary"])
            assert within_a_minute(lambda: not store.has("diary"))
            answer = server.chat(QUESTION)
            assert answer.choices[0].message.content != ANSWER
            cited = {source["document"] for source in answer.model_extra["memstore"]["sources"]}
            assert cited == {"letter"}
