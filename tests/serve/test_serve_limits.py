"""Too much, too long, gone in the middle, and the end: what a running server does then."""

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from memstore.serve.answering import long_prompts
from memstore.serve.answering.long_prompts import Plan, Window
from memstore.serve.settings import ServeSettings
from memstore.serve.state.turns import Turn
from support.diary import ANSWER, DIARY, LETTER, QUESTION
from support.serving import Served, official, serving
from support.serving_process import process

ENDLESS = {"model": "memstore", "prompt": "The valley", "max_tokens": 4000, "stream": True}
ASKED = {"model": "memstore", "messages": [{"role": "user", "content": QUESTION}]}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that answers one question at a time and lets one wait."""
    settings = ServeSettings(active=1, waiting=1)
    with serving(tmp_path_factory.mktemp("narrow") / "mem", settings) as server:
        yield server


@contextmanager
def endless(server: Served) -> Iterator[Iterator[str]]:
    """The events of an answer that does not end, until the block does."""
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json=ENDLESS) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        yield lines


@contextmanager
def whole_answer(server: Served) -> Iterator[None]:
    """Somebody who has asked for one that does not end, all at once, and is gone with the block."""
    place = httpx2.URL(server.url)
    body = json.dumps({**ENDLESS, "stream": False}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {place.host}\r\nContent-Length: {len(body)}"
    with socket.create_connection((place.host, place.port)) as connection:
        connection.sendall(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + body)
        yield


def test_too_many_questions_are_refused_with_a_time_to_come_again(narrow: Served) -> None:
    with endless(narrow):
        told: list[Any] = []

        def ask() -> None:
            told.append(narrow.openai().chat.completions.create(**ASKED))

        waiting = threading.Thread(target=ask)
        waiting.start()
        narrow.settled(active=1, waiting=1)
        with pytest.raises(openai.RateLimitError) as refused:
            narrow.openai().chat.completions.create(**ASKED)
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert refused.value.code == "overloaded"
    waiting.join()  # who came in time is answered once the endless one is gone
    assert told[0].choices[0].message.content == ANSWER


def test_a_client_that_goes_away_stops_its_answer(narrow: Served) -> None:
    with endless(narrow):
        narrow.settled(active=1)
    narrow.settled(active=0, waiting=0)
    with whole_answer(narrow):
        narrow.settled(active=1)
    narrow.settled(active=0, waiting=0)


def test_a_client_that_goes_away_while_it_waits_leaves_the_line(narrow: Served) -> None:
    with endless(narrow):
        narrow.settled(active=1)
        with whole_answer(narrow):
            narrow.settled(active=1, waiting=1)
        narrow.settled(active=1, waiting=0)


def test_a_prompt_that_is_long_in_being_cut_holds_nobody_up(
    narrow: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go, plan = threading.Event(), threading.Event(), Window.plan

    def slow(window: Window, owner: str, turns: Sequence[Turn], question: str) -> Plan:
        if len(question) > 1000:
            begun.set()
            assert go.wait(60)
        return plan(window, owner, turns, question)

    monkeypatch.setattr(Window, "plan", slow)
    monkeypatch.setattr(long_prompts, "AHEAD", 1000)
    told: list[Any] = []

    def ask() -> None:
        said = [{"role": "user", "content": f"{LETTER * 4}\n\n{QUESTION}"}]
        told.append(narrow.openai().chat.completions.create(model="memstore", messages=said))

    asking = threading.Thread(target=ask)
    asking.start()
    assert begun.wait(60)
    said = narrow.openai().chat.completions.create(**ASKED)
    assert said.choices[0].message.content == ANSWER
    go.set()
    asking.join()
    assert told[0].usage.prompt_tokens > 256


def test_who_asks_every_document_is_answered_from_those_that_are_left(narrow: Served) -> None:
    service, told, go = narrow.service, list[Any](), threading.Event()
    service.reader.ingest(LETTER, service.store, name="letter")

    def ask() -> None:
        told.append(narrow.openai().chat.completions.create(**ASKED))

    holds = threading.Event()
    held = service.worker.call("holder/0", lambda: holds.set() or go.wait())
    assert holds.wait(60)  # what comes now waits behind it
    asking = threading.Thread(target=ask)
    asking.start()
    narrow.settled(waiting=1)  # for its turn: the documents are known that it will be asked from
    service.file_ingest.forget("letter")
    go.set()
    asking.join()
    assert held.result() and told[0].choices[0].message.content == ANSWER


def test_an_answer_ends_when_its_time_is_over(tmp_path: Path) -> None:
    with serving(tmp_path / "mem", ServeSettings(answer_seconds=0.05)) as server:
        said = server.openai().completions.create(**{**ENDLESS, "stream": False})
    assert said.choices[0].finish_reason == "length"
    assert 0 < said.usage.completion_tokens < 4000


def test_a_server_that_is_told_to_end_does_in_order_and_goes_on_where_it_was(
    tmp_path: Path,
) -> None:
    """Its life ends by SIGTERM with an answer, an upload and an agent's document on their way."""
    long = {"name": "ingest", "arguments": {"name": "long", "text": DIARY * 500}}
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": long}
    accept = {"accept": "application/json, text/event-stream"}
    with process(tmp_path / "mem", "--metrics") as (server, url):
        client = official(url)
        small = client.files.create(file=("diary.txt", DIARY.encode()), purpose="assistants")
        client.files.wait_for_processing(small.id, poll_interval=0.05)
        name = client.conversations.create().id
        said = client.responses.create(model="memstore", input=QUESTION, conversation=name)
        assert said.output_text == ANSWER
        large = client.files.create(
            file=("large.txt", (DIARY * 500).encode()), purpose="assistants"
        )
        with (
            httpx2.Client(base_url=url, timeout=60, verify=False) as plain,
            plain.stream("POST", "/v1/completions", json=ENDLESS) as answer,
            plain.stream("POST", "/mcp", json=call, headers=accept) as agent,
        ):
            lines = answer.iter_lines()
            next(lines)
            while "memstore_jobs 2.0" not in plain.get("/metrics").text:
                time.sleep(0.02)  # until the agent's waits, behind the upload's
            server.send_signal(signal.SIGTERM)
            *_, last = filter(None, lines)
            assert "ingest again to go on from there" in agent.read().decode()
        # it had its time, and was then cut off in order
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stopping"
        assert server.wait(120) == 128 + signal.SIGTERM
        assert server.stderr is not None and "Traceback" not in server.stderr.read()
    with serving(tmp_path / "mem") as back:
        client = back.openai()
        again = client.responses.create(
            model="memstore", input=QUESTION, previous_response_id=said.id
        )
        assert again.output_text.endswith(ANSWER)
        assert len(client.conversations.items.list(name).data) == 2
        state = client.files.retrieve(large.id)
        assert state.status in ("uploaded", "processed")  # being read on, never half
