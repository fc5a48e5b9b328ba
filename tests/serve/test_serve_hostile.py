"""Whatever is sent to a server, it answers in the shape of OpenAI's errors or as it was asked."""

import asyncio
import io
import json
import os
import time
import traceback
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from memstore import MemoryStore, load_model
from memstore.errors import (
    CorruptMemory,
    DocumentNotFound,
    MemoryLocked,
    MemoryNotFound,
    ReadOnlyMemory,
    StorageFull,
    StoreUnavailable,
)
from memstore.serve.api_errors import as_api_error
from memstore.serve.api_keys import Access
from memstore.serve.http.app import create_app
from memstore.serve.service import Service
from memstore.serve.settings import ServeSettings
from memstore.serve.state.vector_tables import Entry
from support.diary import DIARY
from support.hostile_requests import Hostile, Request

REQUESTS = int(os.environ.get("MEMSTORE_SERVE_HOSTILE", "600"))  # 2,000 in `make soak`
TABLES = {  # of what the parameters name
    "file_id": "files",
    "file_ids": "files",
    "after": "files",
    "store_id": "vector_stores",
    "vector_store_ids": "vector_stores",
    "batch_id": "file_batches",
}
MEANT: dict[str, Any] = {
    "model": "memstore",
    "purpose": "assistants",
    "documents": "diary",
    "document": "diary",
    "key": "key",
    "n": 1,
    "role": "user",
    "background": False,
    "truncation": "auto",
    "include": "file_search_call.results",
}
RIGHT: dict[str, Any] = {
    "/v1/responses": {"model": "memstore", "input": "What is the price of the brown mare?"},
    "/v1/conversations": {},
}
STREAMS = ("/mcp",)  # a GET of it stays open, by its protocol
SECONDS = 60  # in which each request must be answered: a hang, and not a slow machine, takes more


async def _sent(app: Any, request: Request) -> tuple[int, dict[str, str], bytes]:
    """What an app answers: status, headers, body."""
    begun: dict[str, Any] = {"status": 0, "headers": []}
    body, given, gone = bytearray(), False, asyncio.Event()

    async def receive() -> dict[str, Any]:
        nonlocal given
        if given:
            await gone.wait()
            return {"type": "http.disconnect"}
        given = True
        return {"type": "http.request", "body": request.body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            begun.update(message)
        else:
            body.extend(message.get("body", b""))

    headers = {"host": "127.0.0.1", "content-length": str(len(request.body)), **request.headers}
    await app(
        {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": unquote(request.path),
            "raw_path": request.path.encode(),
            "query_string": request.query.encode(),
            "root_path": "",
            "headers": [(k.encode(), v.encode("latin-1", "replace")) for k, v in headers.items()],
            "client": ("127.0.0.1", 5000),
            "server": ("127.0.0.1", 80),
        },
        receive,
        send,
    )
    gone.set()
    told = {k.decode().lower(): v.decode("latin-1") for k, v in begun["headers"]}
    return begun["status"], told, bytes(body)


def _wrong(request: Request, status: int, headers: dict[str, str], body: bytes, place: str) -> str:
    """What is wrong with an answer; nothing if it is as it should be."""
    if not 200 <= status < 500:
        return f"status {status}"
    if place.encode() in body:
        return "the place of the memory is told"
    if b"internal_error" in body:
        return "an error that nobody foresaw"
    if status < 400 or request.method == "HEAD":
        return ""
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return "no error in OpenAI's shape"
    shape = {"message", "type", "param", "code"}
    if set(error) != shape or not error["message"] or "\n" in error["message"]:
        return f"the error is {sorted(error)}"
    return ""


def _provide(service: Service) -> None:
    """Have something that requests can mean."""
    access, stores, uploads = Access(), service.vector_stores, service.uploads
    if len(service.database.rows("SELECT 1 FROM files WHERE state != 'leaving'")) < 3:
        uploads.add(access, "a.txt", io.BytesIO(b"A sentence to be read."), "assistants", None)
        service.file_ingest.begin()
    files = service.database.rows("SELECT id FROM files WHERE state != 'leaving'")
    if len(service.database.rows("SELECT 1 FROM vector_stores WHERE NOT expired")) < 2:
        store = stores.create("towns", None, {}, None, [], access)
        service.file_batches.create(
            store["id"], [Entry(file["id"], {"key": 1}) for file in files], access
        )


@pytest.mark.parametrize("seed", [15])
def test_generated_requests_are_answered_or_refused_in_openais_shape(
    tmp_path: Path, seed: int
) -> None:
    model = load_model()
    settings = ServeSettings(max_tokens=2, files=30)
    statuses: Counter[int] = Counter()
    answered: defaultdict[str, Counter[int]] = defaultdict(Counter)
    made: defaultdict[str, list[str]] = defaultdict(list)  # ids, by operation
    wrong: list[str] = []

    async def attack(service: Service) -> None:
        app = create_app(service)
        schema = app.openapi()

        def known(name: str, path: str) -> list[Any]:
            _provide(service)
            if name in ("name", "conversation", "previous_response_id"):
                by = {"conversation": "/v1/conversations", "previous_response_id": "/v1/responses"}
                ids = made[f"POST {by.get(name) or path.split('/{')[0]}"]
                return ids[-3:] or ["a.txt", "memstore"]
            if name in TABLES:
                rows = service.database.rows(f"SELECT id FROM {TABLES[name]}")
                return [row["id"] for row in rows]
            return [MEANT[name]] if name in MEANT else []

        hostile = Hostile(schema, seed, known)
        async with app.router.lifespan_context(app):
            for number, request in enumerate(hostile.requests(REQUESTS)):
                if number % 50 == 0:  # what was made may be deleted by now
                    for path, body in RIGHT.items():
                        right = Request("POST", path, body=json.dumps(body).encode())
                        right.headers["content-type"] = "application/json"
                        status, _, told = await asyncio.wait_for(_sent(app, right), SECONDS)
                        assert status == 200, told
                        made[f"POST {path}"].append(json.loads(told)["id"])
                if request.path.startswith(STREAMS) and request.method == "GET":
                    continue
                try:
                    answer = await asyncio.wait_for(_sent(app, request), SECONDS)
                except Exception:
                    what, answer = traceback.format_exc(), (0, {}, b"")
                else:
                    what = _wrong(request, *answer, str(tmp_path))
                statuses[answer[0]] += 1
                answered[request.operation][answer[0]] += 1
                if answer[0] == 200 and request.method == "POST" and b'"id"' in answer[2][:100]:
                    with suppress(ValueError):  # a stream
                        made[request.operation].append(json.loads(answer[2])["id"])
                if what:
                    wrong.append(f"{request!r:.600}\n-> {answer[2][:300]!r}\n{what}")

    with MemoryStore.create(tmp_path / "mem", model.signature, host_budget=64 << 20) as store:
        model.ingest(DIARY, store, name="diary")
        service = Service(model, store, settings)
        began = time.process_time()
        try:
            asyncio.run(attack(service))
        finally:
            service.close()
        print(sorted(statuses.items()), f"{time.process_time() - began:.1f} s of CPU")
    assert not wrong, f"{len(wrong)} of {REQUESTS}:\n" + "\n\n".join(wrong[:5])
    reached = [op for op, told in answered.items() if any(200 <= status < 300 for status in told)]
    assert len(reached) > 0.8 * len(answered)  # most operations were also asked rightly
    assert sum(statuses.values()) > REQUESTS * 0.95


@pytest.mark.parametrize(
    "kind",
    [
        DocumentNotFound, MemoryLocked, StorageFull, ReadOnlyMemory, StoreUnavailable,
        MemoryNotFound, CorruptMemory,
    ],
)  # fmt: skip
def test_errors_tell_neither_the_place_of_the_memory_nor_other_documents(kind: type) -> None:
    error = as_api_error(kind("/srv/mem: no document 'a'; there are 'secret'"))
    assert "/srv" not in error.message and "secret" not in error.message
    assert error.code not in (None, "internal_error") and "\n" not in error.message
