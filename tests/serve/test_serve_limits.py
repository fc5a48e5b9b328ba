"""A full queue, clients that disconnect, answers that take too long, and stopping a server."""

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from memstore import load_model
from memstore.serve.settings import ServeSettings
from support.diary import ANSWER, ASKED, DIARY, LETTER
from support.serving import Served, process, serving

CHAT = "/v1/chat/completions"
ENDLESS = {**ASKED, "max_tokens": 4000, "stream": True}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that answers one question at a time, without an end, and lets one wait."""
    settings, model = ServeSettings(active=1, waiting=1), load_model()
    model.answering = replace(model.answering, until_sentence=False)
    with serving(tmp_path_factory.mktemp("narrow") / "mem", settings, model=model) as server:
        yield server


@contextmanager
def endless(server: Served) -> Iterator[Iterator[str]]:
    """The events of an answer that goes on until the block ends."""
    with server.client() as client, client.stream("POST", CHAT, json=ENDLESS) as answer:
        lines = answer.iter_lines()
        next(lines)
        yield lines


@contextmanager
def leaving(server: Served, path: str, request: dict[str, Any]) -> Iterator[None]:
    """A client that waits for its reply, and leaves at the end of the block."""
    place = httpx2.URL(server.url)
    body = json.dumps(request).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {place.host}\r\nContent-Length: {len(body)}"
    with socket.create_connection((place.host, place.port)) as connection:
        connection.sendall(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + body)
        yield


def test_a_full_queue_answers_429_with_retry_after(narrow: Served) -> None:
    short = {**ASKED, "max_tokens": 8}
    with endless(narrow):
        create, answers = narrow.openai().chat.completions.create, list[Any]()
        waiting = threading.Thread(target=lambda: answers.append(create(**short)))
        waiting.start()
        narrow.settled(active=1, waiting=1)
        with pytest.raises(openai.RateLimitError) as refused:
            create(**short)
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert refused.value.code == "overloaded"
        with narrow.client() as client:
            search = client.post("/v1/memstore/search", json={"query": "barn"})
            assert search.status_code == 429
            assert "memstore_busy_total 2" in client.get("/metrics").text
    waiting.join()  # who came in time is answered once the endless one is gone
    assert answers[0].choices[0].message.content.startswith(ANSWER)


def test_a_client_that_leaves_stops_its_answer(narrow: Served) -> None:
    with endless(narrow):
        narrow.settled(active=1)
    narrow.settled(active=0, waiting=0)
    with leaving(narrow, CHAT, {**ENDLESS, "stream": False}):
        narrow.settled(active=1)
    narrow.settled(active=0, waiting=0)
    with narrow.busy():
        with leaving(narrow, "/v1/memstore/search", {"query": "barn"}):
            narrow.settled(active=1, waiting=1)
        narrow.settled(active=1, waiting=0)


def test_an_answer_ends_at_its_time_limit(tmp_path: Path) -> None:
    model = load_model()
    model.answering = replace(model.answering, until_sentence=False)
    settings = ServeSettings(answer_seconds=0.05)
    with serving(tmp_path / "mem", settings, model=model) as server:
        answer = server.openai().chat.completions.create(**{**ENDLESS, "stream": False})
        assert answer.choices[0].finish_reason == "length"
        assert 0 < answer.usage.completion_tokens < 4000
        turn = [{"role": "user", "content": DIARY}, {"role": "assistant", "content": LETTER}]
        long = {**ASKED, "messages": [*turn * 100, *ASKED["messages"]]}
        with pytest.raises(openai.BadRequestError, match="takes too long") as refused:
            server.openai().chat.completions.create(**long)
        assert refused.value.code == "context_length_exceeded"


def test_a_search_of_too_many_tokens_is_refused(narrow: Served) -> None:
    with narrow.client() as client:  # each parrot is some tokens; they would take minutes
        refused = client.post("/v1/memstore/search", json={"query": "\N{PARROT}" * 8000})
    assert refused.status_code == 400 and "query: a text of more than 4,096 tokens" in refused.text


def test_a_server_looks_up_as_its_options_say(tmp_path: Path) -> None:
    with serving(tmp_path / "mem"):
        pass
    options = ["--allow-host", "Barn.LAN", "--allow-origin", "https://Friend.example/"]
    headers = {"Host": "barn.lan:80", "Origin": "https://friend.example"}  # as a browser sends them
    with process(tmp_path / "mem", "--cmt-cutoff", "1", *options) as (_, url):
        body = {**ASKED, "memstore": {"trace": True}}
        answer = httpx2.post(url + CHAT, json=body, headers=headers, timeout=60)
    assert answer.headers["access-control-allow-origin"] == headers["Origin"]
    assert answer.json()["memstore"]["lookups"]["done"] == 0


def test_a_server_stops_cleanly_on_sigterm(tmp_path: Path) -> None:
    """By SIGTERM, with an answer, an upload and the document of an agent on their way."""
    long = {"name": "ingest", "arguments": {"name": "long", "text": DIARY * 500}}
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": long}
    accept = {"accept": "application/json, text/event-stream"}
    turns = [{"role": "user", "content": DIARY}, {"role": "assistant", "content": LETTER}] * 2000
    slow = {**ASKED, "messages": [*turns, *ASKED["messages"]], "memstore": {"from_memory": False}}
    with process(tmp_path / "mem") as (server, url):
        with httpx2.Client(base_url=url, timeout=60, verify=False) as http:
            large = {"files": {"file": ("large", (DIARY * 500).encode())}}
            assert http.post("/v1/memstore/documents", **large).status_code == 202
            told: list[httpx2.Response] = []
            ask = threading.Thread(target=lambda: told.append(http.post(CHAT, json=slow)))
            ask.start()
            with http.stream("POST", "/mcp", json=call, headers=accept) as agent:
                load = ("memstore_jobs 2.0", "memstore_active 1.0")
                while not all(line in http.get("/metrics").text for line in load):
                    time.sleep(0.02)
                server.send_signal(signal.SIGTERM)
                assert "ingest again to resume it" in agent.read().decode()
            ask.join()  # it had its time, and was then cut off
        assert (told[0].status_code, told[0].json()["error"]["code"]) == (503, "stopping")
        assert server.wait(120) == 128 + signal.SIGTERM
        assert {"Traceback", "leaked"}.isdisjoint(server.stderr.read().split())
    with serving(tmp_path / "mem", diary=False) as back, back.client() as http:
        (row,) = http.get("/v1/memstore/documents").json()["data"]
        assert row["name"] == "large" and "upload it again" in row["error"]  # and never half ready
