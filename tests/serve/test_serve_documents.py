"""Documents over HTTP: upload, list, search, read, delete; uploads that fail, and uploads to a
server that is killed.
"""

import fcntl
import gc
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from memstore.errors import MemoryLocked, StorageFull
from memstore.model.source_text import Ingesting, Text
from memstore.serve import documents
from memstore.serve.settings import ServeSettings
from support.diary import ANSWER, ASKED, DIARY, LETTER, QUESTION
from support.fork_server import ForkServer
from support.serving import Served, serving

PATH = "/v1/memstore/documents"
LONG = "".join(f"On day {day} the rain fell on the hills and on the sea.\n" for day in range(600))


@pytest.fixture
def http(served: Served) -> Iterator[httpx2.Client]:
    with served.client() as client:
        yield client


def row(http: httpx2.Client, name: str) -> dict[str, Any] | None:
    """The row of a document in the list."""
    rows: list[dict[str, Any]] = http.get(PATH).json()["data"]
    return next((one for one in rows if one["name"] == name), None)


def settled(http: httpx2.Client, name: str) -> dict[str, Any]:
    """The row of a document once its upload has ended."""
    for _ in range(6000):
        found = row(http, name)
        if found["state"] not in ("waiting", "ingesting"):
            return found
        time.sleep(0.01)
    raise AssertionError(f"{found} does not end")


def upload(http: httpx2.Client, name: str, text: str, **more: str) -> httpx2.Response:
    data = {"name": name, **more}
    return http.post(PATH, files={"file": ("text", text.encode())}, data=data)


def test_the_reply_to_an_upload_notes_undecodable_bytes(http: httpx2.Client) -> None:
    page = b"<meta charset=utf-8><p>The gate \xff is green. The mill is red."
    sent = http.post(PATH, files={"file": ("page.html", page)})
    notes = ["bytes that are no utf-8 text are marked with \ufffd (1)"]
    assert (sent.status_code, sent.json()["notes"]) == (202, notes)
    assert settled(http, "page.html")["notes"] == notes
    assert http.delete(f"{PATH}/page.html").json()["deleted"] is True


def test_an_uploaded_file_is_ingested_asked_searched_read_and_deleted(http: httpx2.Client) -> None:
    sent = http.post(PATH, files={"file": ("C:\\notes\\letter.txt", LETTER.encode())})
    assert sent.status_code == 202 and sent.json()["name"] == "letter.txt"
    ready = settled(http, "letter.txt")
    assert ready["state"] == "ready" and ready["progress"] == 1.0 and ready["error"] is None
    assert ready["tokens"] > 0 and ready["blocks"] > 0 and ready["bytes"] > 0

    foal = {"role": "user", "content": "What is the name of the new foal?"}
    options = {"documents": ["letter.txt"]}
    body = {"model": "memstore", "messages": [foal], "memstore": options}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert "Clover" in answer["choices"][0]["message"]["content"]

    found = http.post("/v1/memstore/search", json={"query": "the new foal", "top_k": 1}).json()
    (best,) = found["data"]
    assert best["document"] == "letter.txt" and "Clover" in best["text"]
    assert LETTER[slice(*best["span"])] == best["text"]

    text = http.get("/v1/memstore/text", params={"document": "letter.txt"}).json()
    assert "".join(block["text"] for block in text["data"]) == LETTER
    assert text["document"] == ready

    assert http.delete(f"{PATH}/letter.txt").json()["deleted"] is True
    assert http.delete(f"{PATH}/letter.txt").status_code == 404
    assert row(http, "letter.txt") is None
    gone = http.post("/v1/memstore/search", json={"query": "foal", "documents": ["letter.txt"]})
    assert gone.status_code == 404


def test_a_document_is_named_by_its_form_and_replaced(http: httpx2.Client) -> None:
    name = "of/two parts?"
    quoted = f"{PATH}/of/two%20parts%3F"
    assert upload(http, name, "The lid is blue.\n").status_code == 202
    first = settled(http, name)
    assert upload(http, name, "The lid is blue.\n").status_code == 202  # the same: nothing to do
    assert settled(http, name)["tokens"] == first["tokens"]
    other = upload(http, name, "The lid is red.\n")
    assert (other.status_code, other.json()["error"]["code"]) == (409, "document_exists")
    assert upload(http, name, "The pot is red.\n", mode="append").status_code == 400
    assert upload(http, name, "Nothing else.\n", mode="replace").status_code == 202
    settled(http, name)
    text = http.get("/v1/memstore/text", params={"document": name}).json()
    assert "".join(block["text"] for block in text["data"]) == "Nothing else.\n"
    assert http.delete(quoted).status_code == 200


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("../../etc/passwd", "passwd"), ("C:\\Users\\me\\a.txt", "a.txt"), ("  b.txt ", "b.txt"),
        ("ü 東京 🙂.txt", "ü 東京 🙂.txt"), ("a\u202etxt.exe", None), ("line\u2028break", None),
        ("..", None), ("a" * 401, None),
    ],
)  # fmt: skip
def test_a_file_keeps_its_last_part(http: httpx2.Client, name: str, taken: str | None) -> None:
    sent = http.post(PATH, files={"file": (name, b"A short text.\n")})
    if taken is None:
        assert sent.status_code == 400 and sent.json()["error"]["param"] == "name"
    else:
        assert sent.json()["name"] == taken
        settled(http, taken)
        assert http.delete(f"{PATH}/{taken}").status_code == 200


@pytest.mark.parametrize(
    ("sent", "named"),
    [
        ({"files": {"file": ("x", b" \n")}}, "empty"),
        ({"files": {"file": ("x", b"a\0b")}}, "binary"),
        ({"files": {"file": ("x", b"a")}, "data": {"name": "x\ny"}}, "name"),
        ({"files": {"file": ("x", b"a")}, "data": {"mode": "newer"}}, "mode"),
        ({"json": {"name": "x", "text": "a"}}, "file"),
        ({"content": b"[" * 100_000}, "file"),
        ({"files": {"file": ("x.pdf", b"%PDF-1.4 broken")}}, "x.pdf"),
        ({"files": {"file": ("x.txt", b"")}}, "x.txt"),
        ({"files": {"other": ("x.txt", b"a")}}, "file"),
        ({"files": [("file", (name, b"a")) for name in ("x.txt", "y.txt")]}, "file"),
        ({"files": {"file": ("x", b"a")}, "data": {"mdoe": "replace"}}, "mdoe"),
    ],
)
def test_invalid_uploads_are_refused(http: httpx2.Client, sent: dict[str, Any], named: str) -> None:
    refused = http.post(PATH, **sent)
    message = refused.json()["error"]["message"]
    assert refused.status_code == 400 and named in message and "\n" not in message
    assert [one["name"] for one in http.get(PATH).json()["data"]] == ["diary"]


def test_an_upload_without_room_for_its_temporary_file_is_answered_507(http: httpx2.Client) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, hard))
    try:
        sent = upload(http, "large", "a " * (1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (sent.status_code, sent.json()["error"]["code"]) == (507, "storage_full")


def test_uploads_are_queued_in_order_and_too_many_are_refused(tmp_path: Path) -> None:
    settings = ServeSettings(body_bytes=2048)
    with serving(tmp_path / "mem", settings) as server, server.client() as http:
        with server.busy():
            assert upload(http, "first", "a " * 800).json()["state"] == "waiting"
            again = upload(http, "first", "a " * 800)
            assert (again.status_code, "is being ingested" in again.text) == (409, True)
            statuses = [upload(http, f"next-{n}", "a " * 800).status_code for n in range(9)]
            assert statuses[0] == 202 and statuses[-1] == 429
            waiting = [one for one in http.get(PATH).json()["data"] if one["state"] == "waiting"]
            assert len(waiting) == 1 + statuses.count(202)
            assert http.delete(f"{PATH}/nobody").status_code == 404
        for one in waiting:
            assert settled(http, one["name"])["state"] == "ready"
        times = [document.created for document in server.service.store.ready()]
        assert times == sorted(times)
        assert upload(http, "later", "a " * 800).status_code == 202


def test_a_document_is_deleted_while_it_waits_or_is_ingested(http: httpx2.Client) -> None:
    upload(http, "long", LONG)
    while (found := row(http, "long")) and found["progress"] < 0.1:
        time.sleep(0.01)
    assert found is not None and found["state"] == "ingesting"
    upload(http, "behind", LONG)
    for name in ("behind", "long"):
        assert http.delete(f"{PATH}/{name}").status_code == 200
        assert row(http, name) is None


@contextmanager
def writing(memory: Path) -> Iterator[None]:
    """Hold the lock of another process that writes."""
    with open(memory / "writer.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_an_upload_waits_while_another_process_writes(
    served: Served, http: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, memory, tried = served.service.model, served.service.store.path, []
    ingesting = model.ingesting
    monkeypatch.setattr(model, "ingesting", lambda *a, **b: tried.append(a) or ingesting(*a, **b))
    with writing(memory):
        assert {upload(http, name, LETTER).status_code for name in ("first", "next")} == {202}
        while len(tried) < 2:
            time.sleep(0.01)
        assert [one["state"] for one in http.get(PATH).json()["data"][1:]] == ["waiting"] * 2
        assert served.chat(QUESTION).choices[0].message.content == ANSWER
        assert http.delete(f"{PATH}/next").status_code == 200 and row(http, "next") is None
    assert settled(http, "first")["state"] == "ready"
    monkeypatch.setattr(documents, "_PATIENCE", 0.0)
    with writing(memory):
        upload(http, "late", LETTER)
        assert "the memory is being written" in settled(http, "late")["error"]
    assert {http.delete(f"{PATH}/{name}").status_code for name in ("first", "late")} == {200}


@pytest.mark.parametrize("locked", [False, True])
def test_a_failed_upload_is_listed_with_its_error_and_stores_no_partial_document(
    served: Served, http: httpx2.Client, monkeypatch: pytest.MonkeyPatch, locked: bool
) -> None:
    """locked: another process writes, so that the partial document cannot be dropped at once."""
    model, store = served.service.model, served.service.store
    ingesting = model.ingesting

    def failing(*given: Any, **more: Any) -> Ingesting:
        steps = ingesting(*given, **more)
        yield next(steps)
        steps.close()  # its finished chunks are committed
        raise StorageFull(f"{store.path} is full")

    def busy(name: str) -> None:
        raise MemoryLocked("another process writes")

    with monkeypatch.context() as patch:
        patch.setattr(model, "ingesting", failing)
        if locked:
            patch.setattr(store, "forget", busy)
        upload(http, "long", LONG)
        failed = settled(http, "long")
    assert failed["state"] == "failed" and "disk is full" in failed["error"]
    assert not [one for one in gc.get_objects() if isinstance(one, Text) and one.name == "long"]
    assert str(store.path) not in failed["error"]
    assert store.has("long") is locked
    model.ingest(LONG, store, name="long")  # as another process
    assert (found := row(http, "long")) and (found["state"], found["error"]) == ("ready", None)
    store.forget("long")
    with served.busy():
        upload(http, "long", LONG)
        model.ingest(DIARY, store, name="long")
    assert "other content" in settled(http, "long")["error"]  # that text is not the upload's
    assert http.delete(f"{PATH}/long").status_code == 200  # takes it off the list
    assert row(http, "long") is None


SERVE = """
import threading
from pathlib import Path
from support.serving import serving
with serving(Path(arguments[0]), diary=False) as served:
    print(served.url, flush=True)
    threading.Event().wait()
"""


def test_an_upload_to_a_killed_server_is_resumed(tmp_path: Path, children: ForkServer) -> None:
    memory, output = tmp_path / "mem", tmp_path / "said"
    pid = children.start("python_job", output, SERVE, memory)
    while not (output.exists() and output.read_text().endswith("\n")):
        time.sleep(0.05)
    with httpx2.Client(base_url=output.read_text().strip(), timeout=60, verify=False) as http:
        upload(http, "short", DIARY)
        settled(http, "short")
        upload(http, "long", LONG)
        while (found := row(http, "long")) and found["progress"] < 0.1:
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
    assert children.end() == -signal.SIGKILL

    with serving(memory) as served, served.client() as http:
        with writing(memory):  # and may be reading it
            assert row(http, "long")["state"] == "ingesting"
        begun = row(http, "long")
        assert begun["state"] == "failed" and "upload it again" in begun["error"]
        assert [one["name"] for one in http.get(PATH).json()["data"]] == ["short", "long"]
        upload(http, "long", LONG)
        ready = settled(http, "long")
        ids = served.service.store.tokens("long").ids.tolist()
        assert served.service.model.tokenizer.decode(ids) == LONG
        assert ready["state"] == "ready" and ready["tokens"] == len(ids)
        answer = http.post("/v1/chat/completions", json=ASKED).json()
        assert answer["choices"][0]["message"]["content"] == ANSWER
