"""A user's mistake is reported in one line and changes nothing."""

import subprocess
from pathlib import Path
from typing import Any

import msgpack
import pytest

import memstore
from memstore.disk.lmdb.database import Database
from memstore.errors import InvalidConfig
from support.commands import intact, refused, run, start, write_model

pytestmark = pytest.mark.usefixtures("the_model")


def test_commands_that_read_create_no_memory(tmp_path: Path, story: Path) -> None:
    none = tmp_path / "none"
    commands = f"ask Who?,chat,search x,ls,stats,rm x,verify,export x {tmp_path}/f,compact"
    for command in commands.split(","):
        for place in (none, tmp_path, story):
            refused(run(*command.split(), "--store", place), str(place))
    assert not none.exists()
    refused(run("ingest", story, "--store", story), "directory")
    refused(run("ingest", story, "--store", tmp_path), "not empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["story"]


def test_memories_of_another_model_or_a_newer_format_are_refused(
    store: Path, tmp_path: Path, story: Path
) -> None:
    other = write_model(tmp_path / "other", seed=1)
    refused(run("ask", "Who?", "--store", store, "--model", other), "was made with tiny", "other")
    refused(run("ingest", story, "--store", store, "--model", other), "was made with tiny", "other")
    longer = write_model(tmp_path / "longer", block_size=16)
    refused(run("ask", "Who?", "--store", store, "--model", longer), "longer")
    intact(store, "story")
    with Database.open(store) as database:

        def newer(txn: Any) -> None:
            row = msgpack.unpackb(txn.get_checked("meta", b"memory"))
            txn.put_checked("meta", b"memory", msgpack.packb({**row, "format": 99}))

        database.write(newer)
    refused(run("ask", "Who?", "--store", store), "99", "update", status=1)


def test_unknown_documents_and_empty_memories_are_reported(store: Path, tmp_path: Path) -> None:
    commands = f"rm tale,export tale {tmp_path}/f,search mill @,ask Who? @,chat @"
    for command in commands.replace("@", "--document tale").split(","):
        refused(run(*command.split(), "--store", store), "'tale'", "'story'")
    refused(run("ask", "  ", "--store", store), "empty")
    assert run("rm", "story", "--store", store).status == 0
    refused(run("ask", "Who?", "--store", store), "no finished document")


def test_settings_out_of_range_are_refused(store: Path, story: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    for arguments, word in [
        (("serve", "--store", store, "--host", "0.0.0.0"), "--api-key-file"),
        (("ask", "Who?", "--store", store, "--top-k", "0"), "top_k"),
        (("serve", "--store", store, "--score-range", "-1"), "score_range"),
        (("chat", "--store", store, "--caution", "nan"), "caution"),
        (("ask", "Who?", "--store", store, "--host-budget", "1kB"), "budget"),
        (("ask", "Who?", "--store", store, "--device-budget", "1 parsec"), "size"),
        (("ask", "Who?", "--store", store, "--policy", "fifo"), "lru"),
        (("chat", "--store", store, "--prefetch", "all"), "speculative"),
        (("ingest", story, "--store", new, "--host-budget", "1kB"), "budget"),
    ]:
        refused(run(*arguments), word)
    assert not new.exists()
    intact(store, "story")


def test_missing_transformers_are_reported(
    store: Path, story: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "need transformers"
    monkeypatch.setattr("memstore.hf.models_by_name.find_spec", lambda name: None)
    commands = f"ask Who? --model smollm2,ingest {story} --model some/decoder"
    monkeypatch.setenv("MEMSTORE_STORE", str(store))
    for command in (*commands.split(","), f"adapt smollm2 --questions {story}"):
        refused(run(*command.split()), words, "pip install '.[hf]'")
    with pytest.raises(InvalidConfig, match=words):
        _ = memstore.load_reader


def test_json_output_names_the_error(tmp_path: Path) -> None:
    long = tmp_path / ("a" * 300)
    for command, error in (
        (("ls", "--store", tmp_path / "none"), "MemoryNotFound"),
        (("import", long, "--store", tmp_path / "none"), "InvalidInput"),
    ):
        result = run(*command, "--json")
        assert result.status == 2 and result.err.startswith("error: ")
        assert result.json["error"]["name"] == error


def test_a_closed_pipe_is_no_error(store: Path) -> None:
    for command, fresh in ((["ls"], True), (["ask", "Who?"], False)):
        process = start(
            *command, "--store", store, fresh=fresh, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        process.stdout.close()
        assert process.stderr.read() == ""
        process.stderr.close()
        assert process.wait() in (0, 1)


@pytest.mark.parametrize("ls", [["ls"], ["ls", "--json"]])
def test_a_full_device_as_stdout_is_reported(store: Path, ls: list[str]) -> None:
    with open("/dev/full", "w") as full:
        process = start(*ls, "--store", store, fresh=True, stdout=full, stderr=subprocess.PIPE)
        _, err = process.communicate()
    assert process.returncode == 1 and err.startswith("error: ") and err.count("\n") == 1
