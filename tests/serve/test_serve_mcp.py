"""MCP through the official client, over stdio and HTTP: every tool, key scopes, errors."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from mcp import Client, StdioServerParameters

from memstore.model.landmark.landmark_model import LandmarkModel, load_model
from memstore.serve import mcp_server as tools
from memstore.serve.access import Access
from support.commands import start
from support.diary import ANSWER, DIARY, QUESTION, write_diary
from support.paths import ROOT
from support.serving import Served, serving

KEYS = {
    "writes-everything": Access(),
    "reads-everything-": Access(write=False),
    "writes-only-notes": Access(only=("note*",)),
}


@pytest.fixture(scope="module")
def reader() -> LandmarkModel:
    return load_model()


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory, reader: LandmarkModel) -> Any:
    directory = write_diary(tmp_path_factory.mktemp("keyed") / "m", reader)
    with serving(directory, model=reader, keys=KEYS, diary=False) as server:
        yield server


async def use_every_tool(client: Client) -> None:
    """Use a memory with the diary and the letter, and leave it unchanged."""
    tools = {tool.name for tool in (await client.list_tools()).tools}
    assert tools == {"ask", "search", "documents", "ingest", "forget"}
    answer = await client.call_tool("ask", {"question": QUESTION})
    assert answer.structured_content["answer"] == ANSWER and answer.structured_content["answered"]
    best = answer.structured_content["sources"][0]
    assert DIARY[slice(*best["span"])] == best["text"] and best["document"] == "diary"
    assert "The combination of the lime barn is 4467." in best["text"]
    assert json.loads(answer.content[0].text)["answer"] == ANSWER  # for clients that read text
    found = await client.call_tool("search", {"phrase": "the name of the new foal", "top_k": 1})
    (passage,) = found.structured_content["passages"]
    assert passage["document"] == "letter"
    assert "The name of the new foal is Clover." in passage["text"]
    read = await client.call_tool("ingest", {"name": "note/ü 1", "text": "The dog is called Rex."})
    assert not read.is_error and read.structured_content["state"] == "ready"
    listed = await client.call_tool("documents", {})
    rows = listed.structured_content["documents"]
    assert [row["name"] for row in rows] == ["diary", "letter", "note/ü 1"]
    forgotten = await client.call_tool("forget", {"name": "note/ü 1"})
    assert forgotten.structured_content == {"forgotten": "note/ü 1"}


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_every_tool_is_called_over_http(keyed: Served, mode: str) -> None:
    async def work() -> None:
        async with keyed.mcp("writes-everything", mode) as client:
            await use_every_tool(client)

    anyio.run(work)


def test_every_tool_is_called_over_stdio(tmp_path: Path, reader: LandmarkModel) -> None:
    write_diary(tmp_path / "m", reader)
    command = ["-m", "memstore", "mcp", "--store", "~/m"]
    home = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    server = StdioServerParameters(command=sys.executable, args=command, env=home)

    async def work() -> None:
        async with Client(server) as client:
            await use_every_tool(client)
            changed = await client.call_tool("ingest", {"name": "diary", "text": "It is red."})
            assert changed.is_error and "mode=replace" in changed.content[0].text

    anyio.run(work)


def test_mcp_keeps_the_scopes_of_keys(keyed: Served) -> None:
    async def work() -> None:
        async with keyed.mcp("reads-everything-") as client:
            tools = {tool.name for tool in (await client.list_tools()).tools}
            assert tools == {"ask", "search", "documents"}
            for call in (("forget", {"name": "diary"}), ("ingest", {"name": "x", "text": "y"})):
                refused = await client.call_tool(*call)
                assert refused.is_error and "Unknown tool" in refused.content[0].text
        async with keyed.mcp("writes-only-notes") as client:
            note = {"name": "note", "text": "The cat is called Tom."}
            assert not (await client.call_tool("ingest", note)).is_error
            listed = await client.call_tool("documents", {})
            assert [row["name"] for row in listed.structured_content["documents"]] == ["note"]
            answer = await client.call_tool("ask", {"question": QUESTION})
            assert {one["document"] for one in answer.structured_content["sources"]} <= {"note"}
            for call in (
                ("ask", {"question": QUESTION, "documents": ["diary"]}),
                ("search", {"phrase": "barn", "documents": ["diary"]}),
                ("forget", {"name": "diary"}),
                ("ingest", {"name": "diary", "text": "x", "mode": "replace"}),
            ):
                refused = await client.call_tool(*call)
                assert refused.is_error and "letter" not in refused.content[0].text, call
            assert not (await client.call_tool("forget", {"name": "note"})).is_error

    anyio.run(work)
    with httpx2.Client(verify=False) as plain:
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        accept = {"Accept": "application/json, text/event-stream"}
        assert plain.post(f"{keyed.url}/mcp", json=body, headers=accept).status_code == 401


def test_errors_say_what_is_wrong_without_a_path_of_the_server(keyed: Served) -> None:
    async def work() -> None:
        async with keyed.mcp("writes-everything") as client:
            for tool, given, named in (
                ("ask", {"question": " "}, "question"),
                ("ask", {"question": "?", "documents": ["gone"]}, "gone"),
                ("ask", {"question": "\N{PARROT}" * 8000}, "more than 4,096 tokens"),
                ("search", {"phrase": ""}, "phrase"),
                ("search", {"phrase": "a", "top_k": 0}, "top_k"),
                ("ingest", {"name": "x"}, "text"),
                ("ingest", {"name": "x", "text": " \n"}, "empty"),
                ("ingest", {"name": "x", "text": "a\0b"}, "text"),
                ("ingest", {"name": "x\nready", "text": "y"}, "name"),
                ("search", {"phrase": "a " * 10000}, "phrase"),
                ("ingest", {"name": "x", "text": "y", "mode": "append"}, "mode"),
                ("forget", {"name": "gone"}, "gone"),
                ("fly", {}, "Unknown tool"),
            ):
                result = await client.call_tool(tool, given)
                (said,) = result.content
                assert result.is_error and named in said.text, (tool, given, said.text)
                assert "\n" not in said.text and str(keyed.service.store.path) not in said.text

    anyio.run(work)


def test_a_cancelled_ingest_can_be_resumed(keyed: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "_SECONDS_BETWEEN", 0.01)  # it reports long before the end
    text = "".join(f"On day {day} the tide was {day * 7 % 13} feet high.\n" for day in range(2000))
    given = {"name": "tides", "text": text}
    seen: list[float] = []

    async def work() -> None:
        async with keyed.mcp("writes-everything") as client:
            with anyio.CancelScope() as scope:

                async def progress(done: float, total: float | None, message: str | None) -> None:
                    seen.append(done)
                    scope.cancel()

                await client.call_tool("ingest", given, progress_callback=progress)
            assert scope.cancelled_caught and seen[0] < len(text)
            while keyed.service.worker.load["jobs"]:
                await anyio.sleep(0.01)
            begun = keyed.service.store.document("tides")
            assert begun.state == "ingesting"
            other = await client.call_tool("ingest", {"name": "tides", "text": "It is low."})
            assert other.is_error and "exists with other text" in other.content[0].text
            answer = await client.call_tool("ask", {"question": QUESTION, "documents": ["diary"]})
            assert answer.structured_content["answer"] == ANSWER
            await client.call_tool("forget", {"name": "tides"})

    anyio.run(work)


@pytest.mark.services
def test_a_signal_ends_an_idle_mcp_process_cleanly(tmp_path: Path, reader: LandmarkModel) -> None:
    memory = write_diary(tmp_path / "m", reader)
    ask = {"jsonrpc": "2.0", "id": 1, "method": "server/no", "params": {}}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start("mcp", "--store", memory, fresh=True, **pipes) as process:
        process.stdin.write(json.dumps(ask) + "\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["id"] == 1
        process.terminate()
        assert process.wait() == 128 + signal.SIGTERM
        assert process.stderr.read() == "interrupted; what was read is stored\n"
