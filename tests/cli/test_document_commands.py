"""The commands that maintain a memory: ls, stats, rm, verify, export, import, compact, index."""

from pathlib import Path

import pytest

from memstore.disk.lmdb.database import Database
from support.commands import OTHER, intact, refused, run
from support.passage_documents import ingest
from support.selected_documents import create

pytestmark = pytest.mark.usefixtures("the_model")


def test_maintaining_a_memory_needs_no_model(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMSTORE_MODEL", str(tmp_path / "gone"))
    assert run("ls", "--store", store).out.splitlines()[1].startswith("story")
    stats = run("stats", "--store", store, "--json").json
    assert stats["documents"] == 1 and stats["tokens"] > 0
    assert stats["tiers"] == {}  # nothing was looked up
    assert "documents  1\n" in run("stats", "--store", store).out
    file = tmp_path / "story.memstore"
    exported = run("export", "story", file, "--store", store, "--json").json
    assert exported["bytes"] == file.stat().st_size
    told = run("import", file, "--store", tmp_path / "copy", "--name", "tale", "--json").json
    assert (told["imported"]["name"], told["imported"]["state"]) == ("tale", "ready")
    intact(tmp_path / "copy", "tale")
    removed = run("rm", "story", "--store", store, "--json").json["removed"]
    assert [d["name"] for d in removed] == ["story"]
    sizes = run("compact", "--store", store, "--json").json
    assert sizes["bytes_after"] < sizes["bytes_before"]
    assert run("ls", "--store", store).out == "no documents\n"
    intact(store)


def test_verify_finds_damage_and_repair_drops_it(store: Path, tmp_path: Path, story: Path) -> None:
    assert run("verify", "--store", store).out.endswith("clean\n")
    other = tmp_path / "other"
    other.write_text(OTHER)
    assert run("ingest", other, "--store", store).status == 0
    with Database.open(store) as database:
        key, value = database.write(lambda txn: [(k, bytes(v)) for k, v in txn.scan("blocks")][5])
        database.write(lambda txn: txn.put("blocks", key, value[:-1] + bytes([value[-1] ^ 1])))
    found = run("verify", "--store", store, "--json")
    assert found.status == 1 and found.json["problems"][0]["name"] == "story"
    assert run("verify", "--store", store, "--repair", "--json").json["dropped"] == ["story"]
    intact(store, "other")
    assert run("ingest", story, "--store", store).status == 0
    intact(store, "other", "story")


def test_a_memory_that_import_makes_has_the_codec_of_its_document(tmp_path: Path) -> None:
    with create(tmp_path / "m", codec="int8") as store:
        ingest(store, "notes", 4)
    run("export", "notes", tmp_path / "f", "--store", tmp_path / "m")
    run("import", tmp_path / "f", "--store", tmp_path / "copy")
    assert run("stats", "--store", tmp_path / "copy", "--json").json["codec"] == "int8"


def test_a_small_memory_needs_no_index(store: Path) -> None:
    assert "no index was built" in run("index", "--store", store).out


def test_rm_removes_nothing_if_a_name_is_unknown(store: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_text(OTHER)
    assert run("ingest", tmp_path / "other", "--store", store).status == 0
    refused(run("rm", "other", "stor", "--store", store), "'stor' in", "it holds 'story', 'other'")
    intact(store, "story", "other")
    told = run("rm", "story", "other", "story", "--store", store, "--erase", "--json").json
    assert [document["name"] for document in told["removed"]] == ["story", "other"]
    intact(store)


def test_files_that_are_not_exports_are_refused(store: Path, tmp_path: Path, story: Path) -> None:
    refused(run("import", story, "--store", tmp_path / "new"), "story")
    refused(run("import", tmp_path / "none", "--store", tmp_path / "new"), "none")
    assert not (tmp_path / "new").exists()
    file = tmp_path / "my; story.memstore"
    assert run("export", "story", file, "--store", store).status == 0
    whole = file.read_bytes()
    for damaged, why in ((whole[:-50], ""), (whole[:500] + b"?!" + whole[502:], "wrong checksum)")):
        file.write_bytes(damaged)
        refused(run("import", file, "--store", store, "--name", "again"), "my; story.memstore", why)
    refused(run("export", "story", tmp_path / "no" / "where", "--store", store), "where")
    intact(store, "story")
