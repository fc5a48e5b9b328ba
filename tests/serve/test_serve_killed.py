"""A server that is killed while it reads uploads, or that another program keeps from writing: each
upload is there, or clearly not, and none is half there.
"""

import os
import signal
import socket
import sqlite3
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from support.fork_server import ForkServer
from support.serving import official, serving

SERVE = """
import threading
from pathlib import Path
from support.serving import serving
with serving(Path(arguments[0]), diary=False) as served:
    print(served.url, flush=True)
    threading.Event().wait()
"""
HOLD = """
import time
from pathlib import Path
from memstore.disk.format.document import IngestSettings
with MemoryStore.open(arguments[0]) as store:
    with store.write_document("other", source_hash="x", settings=IngestSettings(1, 0)):
        print("held", flush=True)
        while not Path(arguments[1]).exists():
            time.sleep(0.02)
"""
SHORT = b"The keeper of the bridge is called Anselm, and the toll is two crowns.\n"
LONG = "".join(f"On day {day} the rain fell on the hills and on the sea.\n" for day in range(600))


def test_a_server_killed_while_it_reads_goes_on_when_it_is_back(
    tmp_path: Path, children: ForkServer
) -> None:
    memory, output = tmp_path / "mem", tmp_path / "said"
    children.imports("support.serving")
    pid = children.start("python_job", output, SERVE, memory)
    client = _client(output)
    short, gone = (client.files.create(file=(name, SHORT), purpose="assistants") for name in "ab")
    for file in (short, gone):
        client.files.wait_for_processing(file.id, poll_interval=0.05)
    long = client.files.create(file=("long.txt", LONG.encode()), purpose="assistants")
    store = client.vector_stores.create(file_ids=[short.id, gone.id, long.id])
    while (read := client.files.retrieve(long.id).memstore)["progress"] < 0.1:
        time.sleep(0.02)
    assert read["state"] == "reading"
    with _half_an_upload(str(client.base_url)):
        os.kill(pid, signal.SIGKILL)
    assert children.end() == -signal.SIGKILL
    with sqlite3.connect(memory / "serve.sqlite") as database:  # as if killed while it deleted
        database.execute("UPDATE files SET state = 'leaving' WHERE id = ?", (gone.id,))
    database.close()

    with serving(memory) as served:
        client = served.openai()
        assert [file.id for file in client.files.list(order="asc")] == [short.id, long.id]
        assert client.files.retrieve(short.id).status == "processed"
        assert client.files.retrieve(long.id).status == "uploaded"  # and not processed, nor failed
        assert client.files.wait_for_processing(long.id, poll_interval=0.05).status == "processed"
        assert client.files.content(long.id).read() == LONG.encode()
        document = served.service.store.document("long.txt")
        ids = served.service.store.tokens("long.txt").ids.tolist()
        assert served.service.reader.tokenizer.decode(ids) == LONG
        assert client.files.retrieve(long.id).memstore["tokens"] == document.tokens == len(ids)
        counts = client.vector_stores.retrieve(store.id).file_counts
        assert (counts.completed, counts.total) == (2, 2)
        names = {document.name for document in served.service.store.documents()}
        assert names == {"a", "long.txt"}


def test_what_another_program_keeps_from_being_written_is_done_behind_it(
    tmp_path: Path, children: ForkServer
) -> None:
    memory, output, release = tmp_path / "mem", tmp_path / "said", tmp_path / "release"
    with serving(memory, diary=False) as served:
        client = served.openai()
        first = client.files.create(file=("first", SHORT), purpose="assistants")
        client.files.wait_for_processing(first.id, poll_interval=0.02)
        children.start("python_job", output, HOLD, memory, release)
        while not (output.exists() and output.read_text()):
            time.sleep(0.02)
        second = client.files.create(file=("second", SHORT), purpose="assistants")
        with pytest.raises(openai.ConflictError, match="written by another"):
            client.files.delete(first.id)
        assert [file.id for file in client.files.list()] == [second.id]
        assert client.files.retrieve(second.id).status == "uploaded"
        assert served.service.store.has("first")
        release.touch()
        assert children.end() == 0
        assert client.files.wait_for_processing(second.id, poll_interval=0.02).status == "processed"
        served.service.file_ingest.begin()
        while served.service.store.has("first"):
            time.sleep(0.02)


def _client(output: Path) -> Any:
    while not (output.exists() and output.read_text().endswith("\n")):
        time.sleep(0.05)
    return official(output.read_text().strip(), max_retries=2, timeout=60)


def _half_an_upload(url: str) -> socket.socket:
    """A connection on which an upload was begun."""
    place = urlsplit(url)
    connection = socket.create_connection((place.hostname, place.port))
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n"
        "Content-Type: multipart/form-data; boundary=x\r\n\r\n"
        '--x\r\nContent-Disposition: form-data; name="file"; filename="half.txt"\r\n\r\nThe half'
    )
    connection.sendall(head.encode())
    return connection
