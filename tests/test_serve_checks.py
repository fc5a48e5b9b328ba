"""What keeps a server from being asked by others than it is for: hosts, origins, keys, sizes, and
who waits while many ask.
"""

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from serving import Served, serving
from starlette.exceptions import HTTPException

from memstore.serve.checks import Checks
from memstore.serve.keys import Keys
from memstore.serve.line import Busy
from memstore.serve.settings import ServeSettings
from memstore.serve.worker import Worker

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
            ("localhost.evil.example:80", 421),
            ("", 421),
            ("LOCALHOST:1", 200),
            ("[::1]:8741", 200),
        ):
            assert client.get("/v1/models", headers={"Host": host}).status_code == status, host


def test_a_body_that_is_too_long_or_does_not_come_is_an_error_of_its_own(
    bounded: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bounded.client() as client:
        for content in (b"a" * 5000, (b"a" * 1000 for _ in range(5))):
            json = {"Content-Type": "application/json"}
            long = client.post("/v1/chat/completions", content=content, headers=json)
            assert (long.status_code, long.json()["error"]["code"]) == (413, "too_large")
    impatient = replace(bounded.service.settings, body_seconds=0.2)
    monkeypatch.setattr(bounded.service, "settings", impatient)
    host, port = bounded.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
        slow.sendall(head.encode())
        assert slow.recv(100).startswith(b"HTTP/1.1 408 ")


def test_long_bodies_are_held_for_eight_at_a_time(bounded: Served) -> None:
    """What waits holds its body: many long ones are refused, and short ones are not."""

    async def run() -> None:
        answered, heard = asyncio.Event(), asyncio.Semaphore(0)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            heard.release()
            await answered.wait()

        checks = Checks(app, bounded.service)

        async def ask(size: int) -> None:
            scope = {"type": "http", "path": "/", "headers": [(b"host", b"localhost")]}

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
