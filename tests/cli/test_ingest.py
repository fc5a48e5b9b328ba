"""The ingest command: results, codecs, replacing, refusals, interrupts."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

import memstore
from memstore.cli import console
from memstore.disk.format.codec import CODECS
from memstore.disk.format.signature import Signature
from memstore.store.memory_store import MemoryStore
from support.commands import OTHER, intact, refused, run, start
from support.synthetic_documents import is_whole

pytestmark = pytest.mark.usefixtures("the_model")


def test_ingest_reports_and_is_idempotent(
    tmp_path: Path, story: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_SECONDS_BETWEEN_LINES", 0.0)
    story.write_text(f"{story.read_text()}\n\n")
    done = run("ingest", story, "--store", tmp_path / "mem", "--json")
    first = done.json["documents"]
    shares = [int(share) for share in re.findall(r"(\d+)% read", done.err)]
    assert shares and max(shares) < 99  # a result follows, which is no progress
    again = run("ingest", story, "--store", tmp_path / "mem", "--json").json["documents"]
    assert [first[0]["status"], again[0]["status"]] == ["read", "unchanged"]
    assert first[0]["name"] == "story" and first[0]["tokens"] > 500 and first[0]["blocks"] > 16
    assert {key: first[0][key] for key in ("tokens", "blocks", "bytes")} == {
        key: again[0][key] for key in ("tokens", "blocks", "bytes")
    }
    assert "unchanged" in run("ingest", story, "--store", tmp_path / "mem").out
    intact(tmp_path / "mem", "story")


def test_a_memory_that_another_process_makes_meanwhile_is_opened(
    tmp_path: Path, story: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported, create = tmp_path / "exported", MemoryStore.create
    assert run("export", "story", exported, "--store", store).status == 0

    def created(path: Path, signature: Signature, **options: object) -> MemoryStore:
        create(path, signature, codec="raw", selector=options["selector"]).close()
        return create(path, signature, **options)

    monkeypatch.setattr(MemoryStore, "create", created)
    assert run("ingest", story, "--store", tmp_path / "read").status == 0
    assert run("import", exported, "--store", tmp_path / "imported").status == 0
    for made in ("read", "imported"):
        intact(tmp_path / made, "story")
    memstore.open(tmp_path / "opened", device="cpu").close()


def test_a_new_memory_keeps_its_codec(tmp_path: Path, story: Path) -> None:
    help_text = run("ingest", "--help").out
    sizes = {}
    for codec in CODECS:
        memory = tmp_path / codec
        result = run("ingest", story, "--store", memory, "--codec", codec, "--json").json
        sizes[codec] = result["documents"][0]["bytes"]
        assert run("stats", "--store", memory, "--json").json["codec"] == codec
        assert f"; stored with {codec}\n" in run("stats", "--store", memory).out
        assert run("ls", "--store", memory, "--json").json["codec"] == codec
        assert run("ls", "--store", memory).out.endswith(f"stored with {codec}\n")
        assert codec in help_text
        intact(memory, "story")
    assert sizes["int8"] < sizes["zstd"] < sizes["raw"]
    again = run("ingest", story, "--store", tmp_path / "int8", "--codec", "raw")
    assert "keeps its codec, int8" in again.err and "unchanged" in again.out


def test_notes_and_labels_of_documents_are_reported(tmp_path: Path, store: Path) -> None:
    page = tmp_path / "page.html"
    page.write_bytes(b"<meta charset=utf-8><p>The gate \xff is green. The mill is red.")
    labels = ("--label", "year=1893", "--label", "old=true", "--label", "kind=novel")
    (told,) = run("ingest", page, "--store", store, *labels, "--json").json["documents"]
    note = "bytes that are no utf-8 text are marked with \ufffd (1)"
    assert (told["name"], told["notes"]) == ("page.html", [note])
    titles, *_, row, _ = run("ls", "--store", store).out.splitlines()
    assert titles.endswith("since             labels")
    assert row.endswith("year=1893, old=true, kind=novel")
    page.write_text("<p>The gate is blue.")
    assert "note:" not in run("ingest", page, "--store", store, "--replace").out
    with MemoryStore.open(store, read_only=True) as memory:
        document = memory.document("page.html")
        assert document.labels == {"year": 1893, "old": True, "kind": "novel"}
        assert document.notes == []
    page.write_bytes(b"<meta charset=utf-8><p>The gate \xff is old.")
    assert f"  note: {note}" in run("ingest", page, "--store", store, "--replace").out
    refused(run("ingest", page, "--store", store, "--label", "year"), "KEY=VALUE", status=2)


def test_files_without_text_are_refused(tmp_path: Path, store: Path, story: Path) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(b"abc\0def")
    os.mkfifo(tmp_path / "pipe")
    words = {"none": "does not exist", "empty": "empty", "binary": "binary", "pipe": "regular"}
    for name, word in words.items():
        refused(run("ingest", tmp_path / name, "--store", store), word)
        refused(run("ingest", tmp_path / name, "--store", tmp_path / "new"), word)
    assert not (tmp_path / "new").exists()
    intact(store, "story")


def test_a_name_taken_by_another_content_is_refused(store: Path, story: Path) -> None:
    story.write_text(OTHER)
    refused(run("ingest", story, "--store", store), "story", "replace")
    intact(store, "story")


def test_the_same_command_resumes_an_ingest_after_ctrl_c(tmp_path: Path, story: Path) -> None:
    from pydoc_data.topics import topics

    book, store = tmp_path / "book", tmp_path / "mem"
    book.write_text("\n".join(topics.values())[:40_000])
    with start(
        "ingest", book, "--store", store, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert "tokens a second, about" in process.stderr.readline()
        process.send_signal(signal.SIGSTOP)  # while another process writes, however long this takes
        refused(run("ingest", story, "--store", store), str(process.pid), status=1)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        out, err = process.communicate()
    assert (process.returncode, out) == (130, "")
    assert "same command" in err.splitlines()[-1] and "Traceback" not in err
    refused(run("ask", "Who?", "--store", store), "no finished document")
    refused(run("ask", "Who?", "--store", store, "--document", "book"), "ingest again")
    assert is_whole(store)
    resumed = run("ingest", book, "--store", store, "--json").json["documents"][0]
    assert resumed["status"] == "resumed" and 0 < resumed["resumed_at"] < resumed["tokens"]
    intact(store, "book")
