"""A published memory served by any machine: what a directory's server answers, nothing written, and
what is told when the store is away.
"""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

pytest.importorskip("obstore")

from diary import ANSWER, DIARY, LETTER, QUESTION, write_diary
from mcp import Client, StdioServerParameters
from published import Wild, WildPlace, impatient, open_at
from serving import Served, serving, serving_store
from test_serve_limits import process

from memstore import load_model
from memstore.errors import StoreUnavailable
from memstore.integrations.opened import Opened
from memstore.model.landmark_model import LandmarkModel
from memstore.serve.settings import ServeSettings
from memstore.share.place import open_place
from memstore.share.publish import publish
from memstore.store.memory_store import MemoryStore

NEXT, SECOND = "What is the price of the brown mare?", "310"
ROOT = Path(__file__).parent.parent


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
        serving_store(store, model, ServeSettings(window_tokens=64)) as server,
    ):
        yield server


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
            while len(files := client.files.list().data) < 2:
                time.sleep(0.01)
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
    service.tidying.tidy()  # nothing of it becomes a document
    for long in ((LETTER * 4,), (*said, "Yes.", LETTER * 4)):
        with pytest.raises(openai.BadRequestError, match="only read") as refused:
            ask(away, *long)
        assert refused.value.code == "context_length_exceeded"


class Away(WildPlace):
    """A place of which some documents, or all, cannot be reached."""

    gone: frozenset[str] | None = frozenset()

    def get_ranges(self, name: str, ranges: Any) -> Any:
        if self.gone is None:
            raise StoreUnavailable(f"{self.url}: connection refused; try again")
        if name in self.gone:  # which is not tried again
            raise StoreUnavailable(f"{self.url}: these credentials are refused")
        return super().get_ranges(name, ranges)


def test_what_cannot_be_reached_is_told_and_asked_again(path: Path, model: LandmarkModel) -> None:
    place = Away(open_place(f"file://{path}/there"), Wild(0, 0.0))
    with open_at(place, host_budget=64 << 20) as store, serving_store(store, model) as server:
        database = server.service.database
        while len(database.rows("SELECT 1 FROM files")) < 2:
            time.sleep(0.01)
        assert place.requests == 0  # no document was read for that
        sizes = {file.filename: file.bytes for file in server.openai().files.list()}
        assert sizes == {"diary": len(DIARY.encode()), "letter": len(LETTER.encode())}
        place.gone = None
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


def test_an_answer_without_some_documents_says_which(path: Path, model: LandmarkModel) -> None:
    with MemoryStore.open(path / "mem") as near:
        apart = open_place(f"memory://{path}/apart")
        for row in near.ready():  # no two documents share a segment
            publish(near._on_disk().catalog, [row], apart)
    place = Away(apart, Wild(0, 0.0))
    with open_at(place, host_budget=64 << 20) as store, serving_store(store, model) as server:
        while len(server.openai().files.list().data) < 2:
            time.sleep(0.01)
        catalog = store._on_disk().catalog
        catalog.allow_partial = True
        letter = catalog.database.state.entries[store.document("letter").id]
        place.gone = frozenset(piece.segment for piece in letter.pieces)
        for trace in (False, True):
            told = ask(server, QUESTION, extra_body={"memstore": {"trace": trace}})
            assert told.choices[0].message.content == ANSWER
            assert told.model_extra["memstore"]["absent"] == ["letter"]


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


def test_a_server_that_is_started_again_knows_what_was_said(path: Path, tmp_path: Path) -> None:
    state = tmp_path / "state" / "here"
    options = ("--state", str(state), "--local-cache", str(tmp_path / "cache"))
    with process(f"file://{path}/there", *options) as (server, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        first = client.responses.create(model="memstore", input=QUESTION)
        assert first.output_text == ANSWER
        server.terminate()
        assert server.wait(60) == 128 + signal.SIGTERM
    with process(f"file://{path}/there", *options) as (_, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        second = client.responses.create(
            model="memstore", input=NEXT, previous_response_id=first.id
        )
        assert second.output_text.endswith(SECOND)
        tiers = httpx2.get(f"{url}/v1/memstore/tiers").json()["data"][-1]["tiers"]
        while not tiers["host"]["hits"] + tiers["host"]["misses"]:  # a sample from before
            time.sleep(0.1)
            tiers = httpx2.get(f"{url}/v1/memstore/tiers").json()["data"][-1]["tiers"]
        assert tiers["local"]["hits"] > 0  # what the first has read


def test_a_place_without_a_memory_is_one_line_and_makes_none(tmp_path: Path) -> None:
    for verb in (["serve", "--port", "0"], ["mcp"]):
        done = subprocess.run(
            [sys.executable, "-m", "memstore", *verb, "--store", f"file://{tmp_path}/none"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith("error: ") and done.stdout == ""
    assert list(tmp_path.iterdir()) == []
