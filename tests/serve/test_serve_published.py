"""A published memory served by any machine: what a directory's server answers, nothing written, and
what is told when the store is away.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

pytest.importorskip("obstore")

from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from memstore import load_model
from memstore.errors import InvalidInput, MemoryNotFound, StoreUnavailable
from memstore.integrations.opened import Opened
from memstore.model.landmark.landmark_model import LandmarkModel
from memstore.serve.api_keys import Access, Keys
from memstore.serve.background import file_ingest
from memstore.serve.settings import ServeSettings
from memstore.serve.state.database import Database
from memstore.share.objects.open_object_store import open_object_store
from memstore.share.publish.publish import publish, unpublish
from memstore.store.memory_store import MemoryStore
from support.commands import refused, run
from support.diary import ANSWER, DIARY, LETTER, QUESTION, write_diary
from support.fork_server import ForkServer
from support.paths import ROOT
from support.published import Wild, WildPlace, impatient, open_at
from support.serving import Served, official, serving, serving_store
from support.serving_process import begin

NEXT, SECOND = "What is the price of the brown mare?", "310"


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
        serving_store(store, model, ServeSettings(window_tokens=64, max_tokens=200)) as server,
    ):
        yield server


def all_files(server: Served) -> list[Any]:
    """The files of both documents, once the server has made them."""
    client = server.openai().files
    for _ in range(3000):
        if len(files := client.list().data) == 2:
            return list(files)
        time.sleep(0.01)
    raise AssertionError("the documents have no files")


def ask(server: Served, *said: str, **more: Any) -> Any:
    """What is answered to the last of these, said in turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
    client = server.openai().chat.completions
    return client.create(model="memstore", messages=messages, temperature=0, **more)


def test_it_answers_as_the_server_of_the_directory_does(path: Path, away: Served) -> None:
    trace = {"memstore": {"trace": True}}
    with serving(path / "mem", diary=False) as near:
        told = [ask(server, QUESTION, extra_body=trace) for server in (near, away)]
        found = []
        for server in (near, away):
            client = server.openai()
            files = all_files(server)
            (letter,) = [file.id for file in files if file.filename == "letter"]
            assert client.files.content(letter).read() == LETTER.encode()
            store = client.vector_stores.create(file_ids=[letter])
            said = client.responses.create(
                model="memstore",
                input="What is the name of the new foal?",
                tools=[{"type": "file_search", "vector_store_ids": [store.id]}],
            )
            (hit,) = client.vector_stores.search(store.id, query="the new foal", max_num_results=1)
            found.append((said.output_text, hit.filename, hit.content[0].text, hit.score))
    assert told[0].choices == told[1].choices and told[0].choices[0].message.content == ANSWER
    ways = [answer.model_extra["memstore"] for answer in told]
    assert ways[0]["sources"][0]["span"] == ways[1]["sources"][0]["span"]
    assert [token["text"] for token in ways[0]["tokens"]] == [
        token["text"] for token in ways[1]["tokens"]
    ]
    assert "remote" in ways[1]["tiers"] and "remote" not in ways[0]["tiers"]
    assert found[0] == found[1] and "Clover" in found[0][0]


def test_nothing_is_written_into_it(away: Served) -> None:
    client = away.openai()
    with away.client() as plain:
        assert plain.get("/v1/memstore").json()["write"] is False
        refused = plain.delete("/v1/memstore/documents/diary")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "read_only")
    (diary,) = [file.id for file in client.files.list() if file.filename == "diary"]
    for write in (
        lambda: client.files.create(file=("a.txt", b"a"), purpose="assistants"),
        lambda: client.files.delete(diary),
    ):
        with pytest.raises(openai.PermissionDeniedError, match="cannot be written"):
            write()
    assert len(client.files.list().data) == 2 and away.service.store.has("diary")


def test_a_conversation_is_as_long_as_it_likes_and_a_text_of_it_is_not(away: Served) -> None:
    said = [QUESTION]
    for question in (NEXT, "Who?", QUESTION, NEXT, QUESTION, NEXT, QUESTION):
        said += [ask(away, *said).choices[0].message.content, question]
    warm = ask(away, *said)
    assert warm.usage.prompt_tokens_details.cached_tokens > 64
    service = away.service
    service.worker.call("test/1", service.sessions.forget).result(60)
    cold = ask(away, *said)
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert cold.choices[0].message.content == warm.choices[0].message.content
    assert len(service.store.documents()) == 2
    long = LETTER * 4
    for said in ((long,), (QUESTION, "Yes.", long), (long, "Yes.", NEXT), (QUESTION, long, NEXT)):
        with pytest.raises(openai.BadRequestError, match="only read") as refused:
            ask(away, *said)
        assert refused.value.code == "context_length_exceeded"


class Away(WildPlace):
    """A place of which some documents, or all, cannot be reached."""

    gone: frozenset[str] | None = frozenset()

    def refuse(self, *_: Any) -> Any:
        raise StoreUnavailable(f"{self.url}: connection refused; try again")

    def get_ranges(self, name: str, ranges: Any) -> Any:
        if self.gone is None:
            self.refuse()
        if name in self.gone:  # which is not tried again
            raise StoreUnavailable(f"{self.url}: these credentials are refused")
        return super().get_ranges(name, ranges)


def test_what_cannot_be_reached_is_told_and_asked_again(
    path: Path, model: LandmarkModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memstore.share.calls._SKIPPED", 0.5)
    place = Away(open_object_store(f"file://{path}/there"), Wild(0, 0.0))
    with open_at(place, host_budget=64 << 20) as store, serving_store(store, model) as server:
        files = {file.filename: file for file in all_files(server)}
        assert {name: file.bytes for name, file in files.items()} == {
            "diary": len(DIARY.encode()), "letter": len(LETTER.encode())
        }  # fmt: skip
        place.gone = None
        assert len(server.openai().files.list().data) == 2
        with monkeypatch.context() as patch, server.client() as plain:
            patch.setattr(
                server.service.uploads, "text_of_document", place.refuse
            )  # it is held already
            content = plain.get(f"/v1/files/{files['letter'].id}/content")
            assert content.status_code == 503
            assert content.json()["error"]["code"] == "storage_unavailable"
        with impatient(store), pytest.raises(openai.InternalServerError) as refused:
            ask(server, QUESTION)
        assert refused.value.status_code == 503 and refused.value.code == "storage_unavailable"
        assert refused.value.response.headers["retry-after"] == "5"
        assert str(path) not in refused.value.message
        place.gone = frozenset()
        for _ in range(600):  # it is asked again by itself, after a pause
            try:
                said = ask(server, QUESTION)
                break
            except openai.InternalServerError as error:
                assert error.code == "storage_unavailable"
                time.sleep(0.1)
        assert said.choices[0].message.content == ANSWER


@contextmanager
def partly(path: Path, model: LandmarkModel, keys: Keys | None = None) -> Iterator[Served]:
    """A server of what is published, with allow_partial; the letter is away."""
    apart = open_object_store(f"memory://{path}/apart")
    with MemoryStore.open(path / "mem", read_only=True) as near:
        for row in near.ready():  # no two documents share a segment
            publish(near._on_disk().catalog, [row], apart)
    place = Away(apart, Wild(0, 0.0))
    with open_at(place, host_budget=64 << 20) as store:
        catalog = store._on_disk().catalog
        catalog.allow_partial = True
        letter = catalog.database.state.entries[store.document("letter").id]
        place.gone = frozenset(piece.segment for piece in letter.pieces)
        with serving_store(store, model, keys=keys) as server:
            yield server


def test_an_answer_without_some_documents_says_which_until_they_are_back(
    path: Path, model: LandmarkModel
) -> None:
    with partly(path, model) as server:
        for trace in (False, True):
            told = ask(server, QUESTION, extra_body={"memstore": {"trace": trace}})
            assert told.choices[0].message.content == ANSWER
            assert told.model_extra["memstore"]["absent"] == ["letter"]
        assert [file.filename for file in server.openai().files.list()] in ([], ["diary"])

        async def agent() -> None:
            async with Client(streamable_http_client(f"{server.url}/mcp")) as client:
                answer = await client.call_tool("ask", {"question": QUESTION})
                assert answer.structured_content["absent"] == ["letter"]
                assert "left out: letter" in answer.content[0].text
                found = await client.call_tool("search", {"phrase": "the lime barn"})
                assert found.structured_content["absent"] == ["letter"]
                assert "left out: letter" in found.content[0].text

        asyncio.run(agent())
        place: Any = server.service.store._on_disk().catalog.source.remote.objects
        place.gone = frozenset()
        foal = ask(server, QUESTION, ANSWER, "What is the name of the new foal?")
        assert foal.model_extra["memstore"]["absent"] == []
        assert "Clover" in foal.choices[0].message.content


def test_a_key_is_told_of_no_absent_document_that_it_may_not_read(
    path: Path, model: LandmarkModel
) -> None:
    keys = Keys((("only-of-the-diary-1", Access("diary", False, ("diary",))),))
    with partly(path, model, keys) as server:
        client = server.openai("only-of-the-diary-1").chat.completions
        said = [{"role": "user", "content": QUESTION}]
        for more in ({}, {"trace": True}):
            told = client.create(
                model="memstore", messages=said, extra_body={"memstore": more}
            ).model_extra["memstore"]
            assert told["absent"] == [] and told["sources"]


def test_a_bucket_that_is_gone_is_a_store_that_is_away(
    path: Path, model: LandmarkModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any) -> Any:
        raise MemoryNotFound("s3://bucket: no such bucket")

    with (
        MemoryStore.open(f"file://{path}/there", model.signature) as store,
        serving_store(store, model) as server,
    ):
        all_files(server)
        place = store._on_disk().catalog.source.remote.objects
        for name in ("get", "get_ranges", "first", "names"):
            monkeypatch.setattr(place, name, gone)
        with pytest.raises(openai.InternalServerError) as refused:
            ask(server, QUESTION)
        assert (refused.value.status_code, refused.value.code) == (503, "storage_unavailable")
        store._on_disk().catalog.database._look()  # in the background: nothing is raised


def test_a_published_memory_is_searched_by_other_programs(path: Path) -> None:
    opened = Opened(f"file://{path}/there", None)
    assert "Clover" in opened.search("the name of the new foal", None, 1)[0].text


def test_agents_are_offered_what_reads(path: Path) -> None:
    command = ["-m", "memstore", "mcp", "--store", f"file://{path}/there"]
    server = StdioServerParameters(command=sys.executable, args=command, cwd=ROOT)

    async def work() -> None:
        async with Client(server) as client:
            tools = {tool.name for tool in (await client.list_tools()).tools}
            assert tools == {"ask", "search", "documents"}
            answer = await client.call_tool("ask", {"question": QUESTION})
            assert answer.structured_content["answer"] == ANSWER
            refused = await client.call_tool("forget", {"name": "diary"})
            assert refused.is_error and "only read" in refused.content[0].text

    asyncio.run(work())


def test_a_server_that_is_started_again_knows_what_was_said(
    path: Path, tmp_path: Path, children: ForkServer
) -> None:
    state = tmp_path / "state" / "here"
    options = ("--state", str(state), "--local-cache", str(tmp_path / "cache"))
    pid, url = begin(children, tmp_path / "first", f"file://{path}/there", *options)
    try:
        first = official(url).responses.create(model="memstore", input=QUESTION)
        assert first.output_text == ANSWER
    finally:
        os.kill(pid, signal.SIGTERM)
        code = children.end()
    assert code == 128 + signal.SIGTERM
    pid, url = begin(children, tmp_path / "second", f"file://{path}/there", *options)
    try:
        second = official(url).responses.create(
            model="memstore", input=NEXT, previous_response_id=first.id
        )
        assert second.output_text.endswith(SECOND)
        with httpx2.Client(base_url=url, verify=False) as plain:
            for _ in range(600):
                tiers = plain.get("/v1/memstore/tiers").json()["data"][-1]["tiers"]
                if tiers["host"]["hits"] + tiers["host"]["misses"]:
                    break
                time.sleep(0.1)  # a sample from before
        assert tiers["local"]["hits"] > 0  # what the first has read
    finally:
        os.kill(pid, signal.SIGKILL)
        children.end()


def test_a_place_without_a_memory_is_one_line_and_makes_none(tmp_path: Path) -> None:
    nothing, state = f"file://{tmp_path}/none", tmp_path / "state"
    refused(run("serve", "--port", "0", "--store", nothing, "--state", state), "no such directory")
    refused(run("mcp", "--store", nothing), "no such directory")
    assert list(tmp_path.iterdir()) == []


def test_a_place_where_nothing_can_be_kept_is_named(tmp_path: Path) -> None:
    (tmp_path / "serve.sqlite-wal").mkdir()
    with pytest.raises(InvalidInput, match=r"cannot be used .*; give another --state"):
        Database(tmp_path)


def test_what_a_server_keeps_is_of_one_memory(tmp_path: Path) -> None:
    Database(tmp_path, of="s3://bucket/one").close()
    Database(tmp_path, of="s3://bucket/one").close()
    for _ in range(2):
        with pytest.raises(InvalidInput, match="the memory s3://bucket/one; give another --state"):
            Database(tmp_path, of="s3://bucket/two")


def test_a_server_follows_what_is_published(
    model: LandmarkModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, foal = f"file://{tmp_path}/there", "What is the name of the new foal?"
    monkeypatch.setattr(file_ingest, "_SECONDS", 600)  # the files follow the store, not a clock

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
            files = server.openai().files
            first = ask(server, QUESTION).choices[0].message.content
            assert first == ANSWER
            model.ingest(LETTER, near, name="letter")
            near.publish(url)
            assert within_a_minute(lambda: store.has("letter"))
            # in the conversation that is under way, and in another
            for said in ((QUESTION, first, foal), (foal,)):
                assert "Clover" in ask(server, *said).choices[0].message.content
            assert within_a_minute(lambda: "letter" in {file.filename for file in files.list()})
            unpublish(open_object_store(url), ["diary"])
            assert within_a_minute(lambda: not store.has("diary"))
            told = ask(server, QUESTION)
            assert told.choices[0].message.content != ANSWER
            cited = {source["document"] for source in told.model_extra["memstore"]["sources"]}
            assert cited == {"letter"}
            assert within_a_minute(lambda: {file.filename for file in files.list()} == {"letter"})
