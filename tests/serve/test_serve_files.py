"""Files and vector stores over HTTP: as the official client uses them, and what is refused."""

import io
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from memstore.disk.format.document import is_of_prompt
from memstore.model.answer import Source
from memstore.serve.api_errors import ApiError
from memstore.serve.api_keys import Access, Keys
from memstore.serve.background.backfill import Backfill
from memstore.serve.http.openai.vector_store_search import scores
from memstore.serve.settings import ServeSettings
from memstore.serve.state import file_batches, vector_tables
from memstore.serve.state import uploads as uploads_module
from memstore.serve.state.uploads import file_name
from memstore.serve.state.vector_tables import Entry
from memstore.store.write.admission import Mode
from support import made_documents as made
from support.diary import DIARY
from support.processes import TELLS_CHILDREN, children_of
from support.serving import Served, serving

TOWNS = {
    "north.txt": "The harbour of Ostrel lies under the cliffs. The ferry there costs 17 crowns. "
    "In winter the ice closes the strait, and the mail is carried over it on sledges.\n",
    "south.txt": "The orchards of Velm bear plums and quinces. The mayor of Velm is called Idra. "
    "On market days the square is full of carts, and the inn sells nothing but cider.\n",
}
HIDDEN = f"prompt-{'a' * 32}"  # as what did not fit a prompt is called


@pytest.fixture
def files(served: Served) -> Iterator[Any]:
    """The official client; what a test uploads or makes is deleted behind it."""
    client = served.openai()
    yield client
    for store in client.vector_stores.list():
        client.vector_stores.delete(store.id)
    for file in client.files.list(purpose="assistants"):
        client.files.delete(file.id)
    assert [document.name for document in served.service.store.documents()] == ["diary"]


def upload(client: Any, name: str, text: str | bytes | None = None) -> Any:
    content = TOWNS[name] if text is None else text
    data = content.encode() if isinstance(content, str) else content
    return client.files.create(file=(name, data), purpose="assistants")


def test_a_file_is_uploaded_read_listed_given_back_and_deleted(files: Any, served: Served) -> None:
    made = upload(files, "north.txt")
    assert (made.object, made.filename, made.purpose) == ("file", "north.txt", "assistants")
    done = files.files.wait_for_processing(made.id, poll_interval=0.02)
    assert (done.status, done.bytes) == ("processed", len(TOWNS["north.txt"]))
    assert done.memstore["document"] == "north.txt" and done.memstore["progress"] == 1.0
    assert served.service.store.document("north.txt").state == "ready"
    assert files.files.content(made.id).read() == TOWNS["north.txt"].encode()
    assert [file.id for file in files.files.list(purpose="assistants")] == [made.id]
    assert made.id not in {file.id for file in files.files.list(purpose="user_data")}
    assert files.files.delete(made.id).deleted
    assert not served.service.store.has("north.txt")
    with pytest.raises(openai.NotFoundError):
        files.files.retrieve(made.id)


def test_lists_are_walked_page_by_page_in_either_order(files: Any) -> None:
    made = [upload(files, f"{n}.txt", f"The number {n} is said.").id for n in range(5)]
    for order, expected in (("asc", made), ("desc", made[::-1])):
        assert [
            file.id for file in files.files.list(limit=2, order=order, purpose="assistants")
        ] == expected
    first = files.files.list(limit=2, order="asc", purpose="assistants")
    assert first.has_more and [file.id for file in first.data] == made[:2]
    stores = [files.vector_stores.create(name=str(n)).id for n in range(4)]
    before = files.vector_stores.list(before=stores[0], limit=2, order="desc")
    assert [store.id for store in before.data] == stores[1:3][::-1]
    with pytest.raises(openai.BadRequestError, match="no object"):
        files.files.list(after="file-none")


def test_a_page_of_hypertext_is_converted_and_its_sources_name_the_heading(
    files: Any, served: Served
) -> None:
    page = "<title>Coast</title><h1>Towns</h1><h2>Ostrel</h2><p>{}</p><h2>Velm</h2><p>{}</p>"
    made = upload(files, "coast.html", page.format(*TOWNS.values()))
    assert files.files.wait_for_processing(made.id, poll_interval=0.02).status == "processed"
    store = files.vector_stores.create(name="coast", file_ids=[made.id])
    found = files.vector_stores.search(
        store.id, query="The mayor of Velm is called", max_num_results=1
    )
    (hit,) = found.data
    assert "Idra" in hit.content[0].text and "<p>" not in hit.content[0].text
    assert "Velm" in hit.memstore["place"]
    bad = upload(files, "scan.pdf", b"%PDF-1.7 and nothing more")
    failed = files.files.wait_for_processing(bad.id, poll_interval=0.02)
    assert failed.status == "error" and failed.status_details.startswith("scan.pdf")
    assert not served.service.store.has("scan.pdf")


def test_a_vector_store_is_filled_searched_filtered_and_left(files: Any) -> None:
    store = files.vector_stores.create(name="towns", metadata={"of": "the coast"})
    uploads = [(name, text.encode()) for name, text in TOWNS.items()]
    batch = files.vector_stores.file_batches.upload_and_poll(
        store.id, files=uploads, poll_interval_ms=20
    )
    assert (batch.status, batch.file_counts.completed, batch.file_counts.total) == (
        "completed",
        2,
        2,
    )
    third = files.vector_stores.files.upload_and_poll(
        vector_store_id=store.id,
        file=("hills.txt", b"Nobody lives in the hills, and no ferry goes there."),
        attributes={"height": 900},
        poll_interval_ms=20,
    )
    assert third.status == "completed" and third.attributes == {"height": 900.0}
    store = files.vector_stores.retrieve(store.id)
    assert store.status == "completed" and store.file_counts.completed == 3
    assert store.usage_bytes > 0

    found = files.vector_stores.search(store.id, query="the mayor of Velm", max_num_results=3)
    best = found.data[0]
    assert best.filename == "south.txt"
    assert "The mayor of Velm is called Idra." in best.content[0].text
    first, end = best.memstore["span"]
    assert best.content[0].text == TOWNS["south.txt"][first:end]
    everything = files.vector_stores.search(store.id, query=["the ferry", "cider"])
    assert {result.filename for result in everything} == {*TOWNS, "hills.txt"}
    assert [r.score for r in everything] == sorted((r.score for r in everything), reverse=True)
    least = everything.data[1].score
    kept = files.vector_stores.search(
        store.id, query=["the ferry", "cider"], ranking_options={"score_threshold": least}
    )
    assert [r.score for r in kept] == [r.score for r in everything if r.score >= least]

    south = best.file_id
    files.vector_stores.files.update(south, vector_store_id=store.id, attributes={"height": 4})
    low = {"type": "lt", "key": "height", "value": 100}
    high = {"type": "gte", "key": "height", "value": 100}
    none = {"type": "nin", "key": "height", "value": [4, 900]}
    for condition, names in (
        (low, {"south.txt"}),
        ({"type": "or", "filters": [low, high]}, {"south.txt", "hills.txt"}),
        ({"type": "and", "filters": [low, high]}, set()),
        (none, {"north.txt"}),
    ):
        told = files.vector_stores.search(store.id, query="the ferry", filters=condition)
        assert {result.filename for result in told} == names

    listed = files.vector_stores.files.list(store.id, filter="completed", limit=2)
    assert (
        len(list(listed)) == 3
        and not files.vector_stores.files.list(store.id, filter="failed").data
    )
    inside = files.vector_stores.file_batches.list_files(batch.id, vector_store_id=store.id)
    assert len(list(inside)) == 2
    content = files.vector_stores.files.content(south, vector_store_id=store.id)
    assert content.data[0].text == TOWNS["south.txt"]
    assert files.vector_stores.files.delete(south, vector_store_id=store.id).deleted
    assert files.files.retrieve(south).status == "processed"
    assert "south.txt" not in {
        result.filename for result in files.vector_stores.search(store.id, query="the mayor")
    }
    files.files.delete(third.id)
    assert files.vector_stores.retrieve(store.id).file_counts.total == 1
    changed = files.vector_stores.update(store.id, name="coast", metadata={})
    assert (changed.name, changed.metadata) == ("coast", {})
    assert files.vector_stores.delete(store.id).deleted
    with pytest.raises(openai.NotFoundError):
        files.vector_stores.retrieve(store.id)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_cites_the_files_that_file_search_attached(files: Any, stream: bool) -> None:
    store = files.vector_stores.create(name="towns")
    uploads = [(name, text.encode()) for name, text in TOWNS.items()]
    files.vector_stores.file_batches.upload_and_poll(store.id, files=uploads, poll_interval_ms=20)
    north = next(file for file in files.files.list() if file.filename == "north.txt")
    link = {"vector_store_id": store.id, "attributes": {"sea": True}}
    files.vector_stores.files.update(north.id, **link)
    tool = {
        "type": "file_search",
        "vector_store_ids": [store.id],
        "filters": {"type": "eq", "key": "sea", "value": True},
        "max_num_results": 2,
    }
    asked = {
        "model": "memstore",
        "input": "What does the ferry cost?",
        "tools": [tool],
        "include": ["file_search_call.results"],
    }
    if stream:
        with files.responses.stream(**asked) as events:
            response = events.get_final_response()
    else:
        response = files.responses.create(**asked)
    call, message = response.output
    assert (call.type, call.status, call.queries) == (
        "file_search_call",
        "completed",
        [asked["input"]],
    )
    assert 1 <= len(call.results) <= 2 and {result.file_id for result in call.results} == {north.id}
    assert all(0 <= result.score <= 1 for result in call.results)
    text = message.content[0]
    assert [note.quote for note in text.annotations] == [result.text for result in call.results]
    assert any("The ferry there costs 17 crowns." in note.quote for note in text.annotations)
    for note in text.annotations:
        assert (note.type, note.file_id, note.filename) == ("file_citation", north.id, "north.txt")
        assert note.index == len(text.text)
        first, end = note.memstore["span"]
        assert note.quote == TOWNS["north.txt"][first:end]
    best = call.results[0]
    for more in ({"max_sources": 0}, {"max_sources": 40}, {"documents": ["north.txt"]}):
        again = files.responses.create(**asked, extra_body={"memstore": more})
        result = again.output[0].results[0]
        assert (result.text, result.score) == (best.text, best.score)  # whatever else is told
    other = files.responses.create(**asked, extra_body={"memstore": {"documents": ["south.txt"]}})
    assert other.output[0].results == []  # no document is both
    with pytest.raises(openai.NotFoundError, match="nowhere"):
        files.responses.create(**asked, extra_body={"memstore": {"documents": ["nowhere"]}})
    tool["vector_store_ids"] = ["vs_none"]
    with pytest.raises(openai.NotFoundError, match="vs_none"):
        files.responses.create(**asked)


def test_what_cannot_be_read_fails_by_name_and_leaves_nothing(files: Any, served: Served) -> None:
    store = files.vector_stores.create(name="odd")
    batch = files.vector_stores.file_batches.upload_and_poll(
        store.id,
        files=[
            ("good.txt", b"A sentence to be read."),
            ("bad.bin", b"\x00\x01\x02"),
            ("x", b" \n"),
        ],
        poll_interval_ms=20,
    )
    counts = batch.file_counts
    assert (batch.status, counts.completed, counts.failed) == ("completed", 1, 2)
    failed = files.vector_stores.files.list(store.id, filter="failed").data
    assert {file.last_error.code for file in failed} == {"unsupported_file"}
    assert any("bad.bin is binary" in file.last_error.message for file in failed)
    assert {document.name for document in served.service.store.documents()} == {"diary", "good.txt"}
    assert {file.status for file in files.files.list(purpose="assistants")} == {
        "processed",
        "error",
    }


def test_upload_names_are_names(files: Any, served: Served) -> None:
    given = [
        "../../etc/passwd",
        "C:\\Users\\me\\letter.txt",
        "a/b/letter.txt",
        HIDDEN,
        "ein Brief ü.txt",
    ]
    told = [upload(files, name, "What is said here is short.") for name in given]
    assert [file.filename for file in told] == [
        "passwd",
        "letter.txt",
        "letter.txt",
        HIDDEN,
        "ein Brief ü.txt",
    ]
    documents = [file.memstore["document"] for file in told]
    assert len(set(documents)) == 5 and not any(is_of_prompt(name) for name in documents)
    assert documents[2].startswith("letter-") and documents[2].endswith(".txt")
    with pytest.raises(openai.BadRequestError, match="needs a name"):
        upload(files, "a/..", "What is said here is short.")
    for name in ("", " ", ".", "..", "x\ty", "x\0y", "n" * 300, "\u202etxt.exe", "\ud800"):
        with pytest.raises(ApiError, match="needs a name"):
            file_name(name)


def test_what_is_not_supported_is_named(files: Any) -> None:
    store = files.vector_stores.create(name="s")
    static = {"type": "static", "static": {"max_chunk_size_tokens": 800, "chunk_overlap_tokens": 0}}
    calls = {
        "purpose": lambda: files.files.create(file=("a.txt", b"a"), purpose="fine-tune"),
        "chunking_strategy": lambda: files.vector_stores.create(chunking_strategy=static),
        "rewrite_query": lambda: files.vector_stores.search(
            store.id, query="a", rewrite_query=True
        ),
        "ranking_options.hybrid_search": lambda: files.vector_stores.search(
            store.id, query="a", ranking_options={"hybrid_search": {}}
        ),
        "colour": lambda: files.vector_stores.create(extra_body={"colour": "red"}),
    }
    for param, call in calls.items():
        with pytest.raises(openai.BadRequestError) as refused:
            call()
        assert refused.value.param is not None and refused.value.param.startswith(param)


def test_a_batch_is_made_whole_or_not_and_can_be_taken_back(files: Any, served: Served) -> None:
    store = files.vector_stores.create(name="s")
    known = upload(files, "north.txt")
    with pytest.raises(openai.NotFoundError):
        files.vector_stores.file_batches.create(store.id, file_ids=[known.id, "file-none"])
    assert files.vector_stores.retrieve(store.id).file_counts.total == 0
    long = upload(files, "long.txt", "The rain fell on the hills and on the sea. " * 4000)
    batch = files.vector_stores.file_batches.create(store.id, file_ids=[long.id])
    assert batch.status == "in_progress"
    batch = files.vector_stores.file_batches.cancel(batch.id, vector_store_id=store.id)
    assert (batch.status, batch.file_counts.cancelled) == ("cancelled", 1)
    while not (read := files.files.retrieve(long.id).memstore)["progress"]:
        time.sleep(0.01)
    assert read["state"] == "reading" and 0 < read["progress"] < 1 and read["tokens"] > 0
    assert files.files.delete(long.id).deleted  # while it is read
    assert not served.service.store.has("long.txt")


def test_a_vector_store_that_nobody_uses_expires_and_a_file_at_its_time(
    tmp_path: Path, files: Any, served: Served
) -> None:
    file = files.files.create(
        file=("brief.txt", b"It is soon gone."),
        purpose="assistants",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert file.expires_at == file.created_at + 3600
    store = files.vector_stores.create(
        file_ids=[file.id], expires_after={"anchor": "last_active_at", "days": 2}
    )
    assert store.expires_at == store.last_active_at + 2 * 86_400
    files.files.wait_for_processing(file.id, poll_interval=0.02)
    database = served.service.database
    database.execute("UPDATE vector_stores SET last_active_at = last_active_at - 86400 * 2")
    expired = files.vector_stores.retrieve(store.id)
    assert (expired.status, expired.file_counts.total) == ("expired", 0)
    with pytest.raises(openai.BadRequestError, match="expired"):
        files.vector_stores.search(store.id, query="gone")
    database.execute("UPDATE files SET expires_at = 1 WHERE id = ?", (file.id,))
    served.service.file_ingest.begin()
    while served.service.store.has("brief.txt") or files.files.list(purpose="assistants").data:
        time.sleep(0.01)


def test_keys_see_and_write_only_their_documents_and_quotas_hold(tmp_path: Path) -> None:
    keys = Keys(
        (
            ("all-of-the-documents", Access("all", True)),
            ("only-those-of-the-north", Access("north", True, ("north*",))),
            ("only-reading-is-allowed", Access("reader", False)),
        )
    )
    settings = ServeSettings(files=2, files_bytes=1000)
    with serving(tmp_path / "m", settings, keys=keys, diary=False) as served:
        every, north, reader = (served.openai(key) for key, _ in keys.known)
        south = upload(every, "south.txt")
        own = upload(north, "north.txt")
        for refused in (lambda: upload(reader, "a.txt", "a"), lambda: upload(north, "south.txt")):
            with pytest.raises(openai.PermissionDeniedError):
                refused()
        said = []
        for name in ("south.txt", "nowhere.txt"):  # is there, and is not
            with pytest.raises(openai.PermissionDeniedError) as denied:
                upload(north, name, "a")
            said.append(denied.value.body["message"].replace(name, "it"))
        assert said[0] == said[1]
        with pytest.raises(openai.BadRequestError, match="no object"):
            north.files.list(after=south.id)
        assert [file.id for file in north.files.list()] == [own.id]
        assert len(list(reader.files.list())) == 2
        with pytest.raises(openai.NotFoundError):
            north.files.content(south.id)
        store = every.vector_stores.create(file_ids=[own.id, south.id])
        mine = north.vector_stores.create(file_ids=[own.id])
        for file in (own, south):
            every.files.wait_for_processing(file.id, poll_interval=0.02)
        assert [one.id for one in north.vector_stores.list()] == [mine.id]
        assert len(list(every.vector_stores.list())) == 2
        for refused in (north.vector_stores.delete, north.vector_stores.retrieve):
            with pytest.raises(openai.NotFoundError):
                refused(store.id)
        every.vector_stores.files.create(vector_store_id=mine.id, file_id=south.id)
        assert every.vector_stores.retrieve(mine.id).file_counts.total == 2
        seen = north.vector_stores.retrieve(mine.id)
        assert seen.file_counts.total == 1
        assert 0 < seen.usage_bytes < every.vector_stores.retrieve(mine.id).usage_bytes
        found = north.vector_stores.search(mine.id, query="the mayor of Velm")
        assert {result.filename for result in found} == {"north.txt"}
        with pytest.raises(openai.NotFoundError):
            north.vector_stores.create(file_ids=[south.id])
        with pytest.raises(openai.APIStatusError) as full:
            upload(every, "large.txt", "a" * 900)
        assert full.value.status_code == 413 and full.value.code == "quota_exceeded"
        upload(every, "third.txt", "a short one")
        with pytest.raises(openai.APIStatusError, match="a key may have 2 files"):
            upload(every, "fourth.txt", "a short one")
        upload(north, "north-2.txt", "a" * 700)  # a quota is a key's own


def test_stores_batches_and_what_agents_bring_have_quotas_of_each_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_STORES", "_LINKS"):
        monkeypatch.setattr(vector_tables, name, 1)
    monkeypatch.setattr(file_batches, "_MOST", 1)
    first, second = Access("first"), Access("second")
    with serving(tmp_path / "m", ServeSettings(files=2, files_bytes=100), diary=False) as served:
        stores, uploads = served.service.vector_stores, served.service.uploads
        batches = served.service.file_batches
        files = [uploads.add(first, name, io.BytesIO(b"text"), "assistants", None) for name in "ab"]
        entries = [Entry(file["id"], {}) for file in files]
        store = stores.create("", None, {}, None, [], first)
        for one_too_many in (
            lambda: stores.create("", None, {}, None, [], first),
            lambda: batches.create(store["id"], entries, first),
            lambda: uploads.count(first, "third", 1, more=False),
        ):
            with pytest.raises(ApiError, match="a key may have"):
                one_too_many()
        made = [batches.create(store["id"], [], first) for _ in range(2)]
        with pytest.raises(ApiError, match="no file batch"):
            batches.row(store, made[0]["id"])
        stores.create("", None, {}, None, [], second)
        assert batches.create(store["id"], entries[:1], second) is not None
        assert batches.row(store, made[1]["id"]) is not None

        uploads.count(second, "agent's", 60, more=False)
        with pytest.raises(ApiError, match="100 bytes"):
            uploads.count(second, "agent's", 60, more=True)
        uploads.count(second, "agent's", 10, more=False)  # counts for less once it is read
        with pytest.raises(ApiError, match="100 bytes"):
            uploads.count(second, "other", 60, more=False)
        uploads.counted("agent's", 10)
        uploads.count(second, "other", 60, more=False)
        monkeypatch.setattr(uploads_module, "_BEGUN", -1.0)
        uploads.collect_garbage()  # neither is in the memory
        uploads.count(second, "large", 100, more=False)


def test_a_slow_document_of_one_key_holds_up_none_of_another(tmp_path: Path) -> None:
    if not TELLS_CHILDREN:
        pytest.skip("the system does not tell the children of a process")
    keys = Keys(
        (("the-key-of-the-slow", Access("slow")), ("the-key-of-the-others", Access("other")))
    )
    before = set(children_of(os.getpid()))
    with serving(tmp_path / "m", keys=keys, diary=False) as served:
        slow, other = (served.openai(key) for key, _ in keys.known)
        drawing = b"BT /F1 12 Tf " + b"(word) Tj T* " * 100_000
        first = upload(slow, "slow.pdf", made.pdf_of_one_page(20, drawing))
        while not (begun := set(children_of(os.getpid())) - before):
            time.sleep(0.01)
        (child,) = begun
        os.kill(child, signal.SIGSTOP)  # it takes as long as one likes
        second = upload(slow, "second.txt", "It waits behind the first.")
        quick = upload(other, "quick.html", "<html><p>It waits for nobody.")
        done = other.files.wait_for_processing(quick.id, poll_interval=0.02, max_wait_seconds=60)
        assert done.status == "processed"
        assert [slow.files.retrieve(one.id).status for one in (first, second)] == ["uploaded"] * 2
        os.kill(child, signal.SIGKILL)
        slow.files.wait_for_processing(second.id, poll_interval=0.02)
        failed = slow.files.retrieve(first.id)
        assert failed.status == "error" and "too much memory or time" in failed.status_details


def test_every_document_of_the_memory_has_a_file(tmp_path: Path) -> None:
    with serving(tmp_path / "m") as served:
        service, client = served.service, served.openai()
        while not (listed := client.files.list().data):
            time.sleep(0.01)
        (diary,) = listed
        assert (diary.filename, diary.status, diary.bytes) == (
            "diary",
            "processed",
            len(DIARY.encode()),
        )
        assert client.files.content(diary.id).read() == DIARY.encode()
        store = client.vector_stores.create(file_ids=[diary.id])
        found = client.vector_stores.search(store.id, query="the price of the brown mare").data
        assert {result.file_id for result in found} == {diary.id}
        upload(client, "north.txt")
        while client.files.list(purpose="assistants").data[0].status != "processed":
            time.sleep(0.01)
        for name in ("diary", "north.txt"):
            service.store.forget(name)  # as another program does
        service.file_ingest.begin()
        while [file.status for file in client.files.list()] != ["error"]:
            time.sleep(0.01)
        assert client.vector_stores.retrieve(store.id).file_counts.total == 0


def test_a_file_is_the_document_of_its_name_whoever_reads_it(tmp_path: Path) -> None:
    with serving(tmp_path / "m", diary=False) as served:
        service, client = served.service, served.openai()

        def read(text: str, mode: Mode = "new") -> None:
            """As another program does."""
            service.worker.call(
                "other/1",
                lambda: service.reader.ingest(text, service.store, name="north.txt", mode=mode),
            ).result(60)
            service.file_ingest.begin()

        def until(status: str, tokens: int | None = None) -> Any:
            while True:
                (file,) = client.files.list().data
                if file.status == status and tokens in (None, file.memstore["tokens"]):
                    return file
                time.sleep(0.01)

        made = upload(client, "north.txt")
        until("processed")
        service.database.execute("UPDATE files SET expires_at = 2000000000")
        service.store.forget("north.txt")  # before anybody looked
        service.file_ingest.begin()
        assert until("error").id == made.id
        text = TOWNS["south.txt"]
        read(text)
        tokens = service.store.document("north.txt").tokens
        assert until("processed", tokens).id == made.id
        assert client.files.content(made.id).read() == text.encode()
        assert until("processed").expires_at is None  # the upload's; the text is another's
        read(text * 2, "replace")
        until("processed", service.store.document("north.txt").tokens)
        assert client.files.content(made.id).read() == (text * 2).encode()
        assert client.files.delete(made.id).deleted and not service.store.has("north.txt")


def test_a_file_that_failed_takes_no_document_of_another_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path / "m", diary=False) as served:
        service, client = served.service, served.openai()
        made = upload(client, "north.txt")
        client.files.wait_for_processing(made.id, poll_interval=0.02)
        service.store.forget("north.txt")
        service.file_ingest.begin()
        client.files.wait_for_processing(made.id, poll_interval=0.02)
        while client.files.retrieve(made.id).status != "error":
            time.sleep(0.01)
        monkeypatch.setattr(Backfill, "run", lambda self: None)  # before anybody looks
        service.reader.ingest(TOWNS["south.txt"], service.store, name="north.txt")
        client.files.delete(made.id)
        assert service.store.has("north.txt")


def test_scores_lie_between_0_and_1_for_every_reader() -> None:
    sources = [Source("a", block, (0, 1), "x", weight, []) for block, weight in enumerate((9.5, 7))]
    assert scores(sources, shares=False) == [1.0, 0.0821]
    halves = [replace(source, weight=0.5) for source in sources]
    assert scores(halves, shares=True) == [0.5, 0.5] and scores([], shares=False) == []


def test_what_nobody_foresaw_is_looked_at_again_later_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs, broken = [], threading.Event()

    def run(backfill: Backfill) -> None:
        runs.append(None)
        broken.set()
        raise ValueError("odd")

    monkeypatch.setattr(Backfill, "run", run)
    with serving(tmp_path / "m") as served:
        assert broken.wait(60)
        upload(served.openai(), "north.txt")  # which waits
        time.sleep(0.5)
        assert len(runs) <= 3  # once, and once more for the upload
        assert "odd" in caplog.text and "looked at again" in caplog.text
