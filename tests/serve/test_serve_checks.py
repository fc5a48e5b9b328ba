"""What keeps a server from being asked by others than it is for: hosts, origins, keys, sizes, and
who waits while many ask.
"""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from memstore.serve.answering.worker import Worker
from memstore.serve.api_errors import Busy
from memstore.serve.api_keys import Keys
from memstore.serve.http import connections
from memstore.serve.http.app import create_app
from memstore.serve.http.checks import Checks
from memstore.serve.http.openai.chat import ChatRequest
from memstore.serve.http.openai.responses import ResponseRequest
from memstore.serve.mcp.tools import TOOLS, Ask
from memstore.serve.settings import ServeSettings
from support.serving import Served, serving

PAGE = "https://friend.example"


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A keyless server that takes short bodies only, and that one page of another host may call."""
    settings = ServeSettings(body_bytes=4096, origins=(PAGE,))
    with serving(tmp_path_factory.mktemp("bounded") / "mem", settings) as server:
        yield server


def test_a_page_of_another_host_is_refused_even_where_a_browser_asks_nobody(
    bounded: Served,
) -> None:
    upload = {"files": {"file": ("evil.txt", b"poison")}, "data": {"purpose": "assistants"}}
    with bounded.client() as client:
        for origin in ("https://evil.example", "null", f"{bounded.url}.evil.example", "http://"):
            refused = client.post("/v1/files", headers={"Origin": origin}, **upload)
            assert refused.status_code == 403, origin
            assert refused.json()["error"]["code"] == "wrong_origin"
        for origin in (bounded.url, PAGE):
            taken = client.post("/v1/files", headers={"Origin": origin}, **upload)
            assert taken.status_code == 200, origin
            assert client.delete(f"/v1/files/{taken.json()['id']}").status_code == 200
        asked = {"Access-Control-Request-Method": "POST"}
        for origin, allowed in ((PAGE, PAGE), ("https://evil.example", None)):
            told = client.options("/v1/files", headers={"Origin": origin, **asked})
            assert told.headers.get("access-control-allow-origin") == allowed


def test_a_name_that_is_not_the_servers_is_refused(bounded: Served) -> None:
    with bounded.client() as client:
        for host, status in (
            ("evil.example", 421),
            ("evil.example:80", 421),
            ("localhost.evil.example:80", 421),
            ("127.0.0.1.evil.example", 421),
            ("", 421),
            ("LOCALHOST:1", 200),
            ("[::1]:8741", 200),
        ):
            assert client.get("/v1/models", headers={"Host": host}).status_code == status, host


def test_a_body_that_is_too_long_or_does_not_come_is_an_error_of_its_own(
    bounded: Served, tmp_path: Path
) -> None:
    with bounded.client() as client:
        for content in (b"a" * 5000, (b"a" * 1000 for _ in range(5))):
            json = {"Content-Type": "application/json"}
            long = client.post("/v1/chat/completions", content=content, headers=json)
            assert (long.status_code, long.json()["error"]["code"]) == (413, "too_large")
    impatient = ServeSettings(body_seconds=0.2)
    with serving(tmp_path / "mem", impatient) as server, _connected(server) as slow:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
        slow.sendall(head.encode())
        assert slow.recv(100).startswith(b"HTTP/1.1 408 ")


def _connected(server: Served) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def _closed(connection: socket.socket) -> bool:
    """Is it closed at the other end, where nothing is sent?"""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_headers_that_come_ever_so_slowly_have_their_time(
    bounded: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.3)
    ask = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for begun in (b"", ask):  # before the first request, and before the next
        with _connected(bounded) as slow:
            slow.sendall(begun)
            if begun:
                assert slow.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            with suppress(ConnectionError):
                for _ in range(600):
                    slow.sendall(b"a")
                    time.sleep(0.05)
                raise AssertionError("it is still open")


def test_who_opens_many_connections_keeps_nobody_out(
    bounded: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "most_connections", lambda: 8)
    with ExitStack() as held:
        opened = []
        for _ in range(24):
            opened.append(held.enter_context(_connected(bounded)))
            opened[-1].sendall(b"GET /v1/models HTTP/1.1\r\nHost: loc")
        assert all(map(_closed, opened[:10]))
        with bounded.client() as client:
            assert client.get("/v1/models").status_code == 200
        opened[-1].sendall(b"alhost\r\n\r\n")  # the latest may still finish
        assert opened[-1].recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_a_body_of_two_lengths_is_refused_and_nothing_behind_it_is_heard(bounded: Served) -> None:
    inner = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for headers in (b"Content-Length: 4\r\nTransfer-Encoding: chunked", b"Transfer-Encoding: x"):
        with _connected(bounded) as sent, suppress(ConnectionError):
            head = b"POST /v1/conversations HTTP/1.1\r\nHost: localhost\r\n" + headers
            sent.sendall(head + b"\r\n\r\n0\r\n\r\n" + inner)
            said = b""
            while more := sent.recv(1 << 16):
                said += more
            assert said.count(b"HTTP/1.1 ") == 1
            assert said.split(b" ")[1] in (b"400", b"501")


def test_bodies_of_many_values_and_of_other_kinds_are_refused_unread(tmp_path: Path) -> None:
    asked = b'{"model": "memstore", "messages": [%s1]}'
    text = b'{"role": "user", "content": "%s, who?"}' % (b",[{:" * 100_000)
    settings = ServeSettings(json_bytes=1 << 20)
    with serving(tmp_path / "mem", settings) as server, server.client() as client:

        def post(content: bytes, kind: str = "application/json") -> tuple[int, str]:
            headers = {"Content-Type": kind}
            path = "/v1/chat/completions"
            answer = client.post(path, content=content, headers=headers)
            return answer.status_code, answer.json()["error"]["message"]

        assert "too many values" in post(asked % (b"1," * 160_000))[1]
        assert "too many values" in post(asked % (b"[]," * 80_000))[1]
        assert post(asked % (b"1," * 40_000))[1].startswith("messages.0: ")  # the first of them
        long = asked.replace(b"%s1", text)
        assert post(long.replace(b'"memstore"', b'"other"'))[0] == 404  # values are no text
        assert "UTF-8" in post((asked % b"").decode().encode("utf-16"))[1]
        assert post(b"a" * (1 << 21))[0] == 413
        assert post(b"a=b&" * 1000, "application/x-www-form-urlencoded")[0] == 415


def test_every_list_of_a_request_has_an_end_and_its_first_error_ends_it(bounded: Served) -> None:
    def lists(schema: Any, at: str) -> Iterator[tuple[str, Any]]:
        if isinstance(schema, dict):
            if schema.get("type") == "array":
                yield at, schema
            for name, part in schema.items():
                yield from lists(part, f"{at}.{name}")
        elif isinstance(schema, list):
            for part in schema:
                yield from lists(part, at)

    schemas = {name: tool.takes.model_json_schema() for name, tool in TOOLS.items()}
    for name, schema in create_app(bounded.service).openapi()["components"]["schemas"].items():
        if name not in ("HTTPValidationError", "ValidationError"):
            schemas[name] = schema
    found = [place for name, schema in schemas.items() for place in lists(schema, name)]
    assert len(found) > 15
    assert [at for at, schema in found if "maxItems" not in schema] == []

    many = {f"key-{number}": 1 for number in range(1000)}
    for kind, given in (
        (ChatRequest, {"model": "m", "messages": [1] * 1000}),
        (ChatRequest, {"model": "m", "messages": [{"role": "user", "content": "a"}], **many}),
        (ResponseRequest, {"model": "m", "input": "a", "metadata": many}),
        (Ask, {"question": "a", "documents": [1] * 1000}),
        (Ask, {"question": "a", **many}),
    ):
        with pytest.raises(ValidationError) as refused:
            kind.model_validate(given)
        assert refused.value.error_count() <= 17  # of metadata, as many as there may be and one


def test_long_bodies_are_held_for_eight_at_a_time(bounded: Served) -> None:
    """What waits holds its body: many long ones are refused, and short ones are not."""

    async def run() -> None:
        answered, heard = asyncio.Event(), asyncio.Semaphore(0)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            heard.release()
            await answered.wait()

        checks = Checks(app, bounded.service.settings, bounded.service.keys)

        async def ask(size: int) -> None:
            path = "/v1/files"
            headers = [(b"host", b"localhost")]
            scope = {"type": "http", "method": "POST", "path": path, "headers": headers}

            async def receive() -> dict[str, Any]:
                return {"type": "http.request", "body": b"a" * size}

            await checks(scope, receive, receive)

        async with asyncio.TaskGroup() as asking:
            for _ in range(8):
                asking.create_task(ask(4096))
                await heard.acquire()
            with pytest.raises(HTTPException) as refused:
                await ask(4096)
            assert refused.value.status_code == 429
            asking.create_task(ask(4))
            await heard.acquire()
            answered.set()
        await ask(4096)

    asyncio.run(run())


def test_a_key_keeps_what_is_its_own_where_lines_are_added_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    old, new = "an-old-key-of-somebody", "a-new-key-of-another-one"
    file.write_text(f"{old} write\n")
    before = Keys.of_file(file).access(old)
    file.write_text(f"{new} read\n{old} write\n")
    after, other = Keys.of_file(file).access(old), Keys.of_file(file).access(new)
    assert before is not None and after is not None and other is not None
    assert before.name == after.name != other.name
    assert old not in after.name


def test_nobody_keeps_others_out_by_asking_much() -> None:
    worker = Worker(active=1, waiting=4)
    began, go = threading.Event(), threading.Event()

    def first() -> None:
        began.set()
        go.wait()

    def ask(owner: str) -> Future[None]:
        return worker.call(owner, lambda: None)

    try:
        running = worker.call("crowd/0", first)
        began.wait()
        crowd = [ask(f"crowd/{number}") for number in range(1, 5)]
        with pytest.raises(Busy):
            ask("crowd/5")
        few = [ask("few/1"), ask("few/2")]
        with pytest.raises(Busy):  # half of the places is as much as the crowd has
            ask("few/3")
        for displaced in crowd[2:]:
            assert isinstance(displaced.exception(timeout=60), Busy)
        go.set()
        for served in (running, *crowd[:2], *few):
            served.result(timeout=60)
    finally:
        go.set()
        worker.stop()
