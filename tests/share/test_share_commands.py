"""Commands that publish a memory, and commands that read a publication."""

import os
from pathlib import Path

import pytest

from memstore.store.memory_store import MemoryStore
from support.commands import refused, run
from support.synthetic_documents import SIGNATURE, ingest


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    with MemoryStore.create(tmp_path / "memory", SIGNATURE) as store:
        ingest(store, "a", 60)
        ingest(store, "b", 30, text=2)
    return tmp_path / "memory"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/library"


def test_a_memory_is_published_listed_checked_and_pulled(
    memory: Path, url: str, tmp_path: Path
) -> None:
    first = run("share", "push", url, "a", "--store", memory, "--json").json
    assert (first["number"], first["documents"]) == (1, ["a"]) and first["bytes"] > 0
    said = run("share", "push", url, "--store", memory)
    assert said.out.startswith("1 document published, 1 unchanged; 1 segment sent")
    assert [d["name"] for d in run("ls", "--store", url, "--json").json["documents"]] == ["a", "b"]
    assert run("stats", "--store", url, "--json").json["documents"] == 2
    assert run("verify", "--store", url).out.endswith("clean\n")
    (pulled,) = run("share", "pull", url, "a", "--store", tmp_path / "new", "--json").json["pulled"]
    assert pulled["name"] == "a" and pulled["tokens"] == 60
    run("share", "pull", url, "b", "--store", tmp_path / "new", "--name", "c")
    restored = run("share", "pull", url, "--store", tmp_path / "all").out.splitlines()
    assert [line.split(", ")[0] for line in restored] == ["a: pulled", "b: pulled"]
    refused(run("share", "pull", url, "--name", "c", "--store", tmp_path / "all"), "one NAME")
    files = {}
    for store in (memory, url, tmp_path / "new", tmp_path / "all"):
        assert run("export", "a", tmp_path / "file", "--store", store).status == 0
        files[store] = (tmp_path / "file").read_bytes()
    assert len(set(files.values())) == 1
    assert run("share", "rm", url, "a").out == "a: no longer published; manifest 3\n"
    pruned = run("share", "prune", url, "--grace", 0, "--json").json
    assert pruned["manifests"] == 2 and pruned["objects"] == 1
    assert run("verify", "--store", url, "--json").json["documents"] == 1


def test_commands_name_damage_and_exit_with_1(memory: Path, url: str, tmp_path: Path) -> None:
    run("share", "push", url, "--store", memory)
    (segment,) = (tmp_path / "library" / "segments").glob("*/*")
    right = segment.read_bytes()
    segment.write_bytes(right[:500] + bytes([right[500] ^ 1]) + right[501:])
    result = run("verify", "--store", url)
    assert result.status == 1 and result.out.startswith("damaged: a: document 1, block 0")
    assert "verify" not in result.out and result.out.count("push --check") == 1
    refused(run("verify", "--store", url, "--repair"), "again with --check")
    for command in (["share", "pull", url, "a"], ["export", "a", tmp_path / "file"]):
        result = run(*command, "--store", url if "export" in command else tmp_path / "new")
        refused(result, "document 'a'", "is damaged", "publish it again with --check", status=1)
        assert "verify" not in result.err
    segment.unlink()
    assert "there is no segments/" in run("verify", "--store", url).out
    for spoilt in (right[:500] + right[499:-1], right[:-9], None):  # as the message advises
        segment.unlink(missing_ok=True)
        if spoilt is not None:
            segment.write_bytes(spoilt)
        run("share", "push", url, "--store", memory)
        assert run("verify", "--store", url).status == 1
        said = run("share", "push", url, "--check", "--store", memory)
        assert said.out.startswith("2 documents published, 0 unchanged; 1 segment sent")
        assert run("verify", "--store", url).out.endswith("clean\n")
        (segment,) = (tmp_path / "library" / "segments").glob("*/*")
    run("share", "pull", url, "a", "--store", tmp_path / "new")


def test_a_mistake_is_one_line(memory: Path, url: str, tmp_path: Path) -> None:
    refused(run("ls", "--store", url), "there is no such directory")
    refused(run("ls", "--store", "ftp://x/y"), "unknown scheme 'ftp'")
    refused(run("ls", "--store", "file://[::1/x"), "not a URL")
    refused(run("ls", "--store", "s3:///x"), "name a bucket")
    refused(run("ls", "--store", "file://host/x"), "directory of this machine")
    refused(run("share", "pull", url, "a", "--store", tmp_path / "new"), "no such directory")
    assert not (tmp_path / "new").exists()
    for other in (f"file:{tmp_path}/library", "S3://bucket/x"):  # directories for readers
        refused(run("share", "push", other, "--store", memory), "not a URL")
    run("share", "push", url, "--store", memory)
    refused(run("share", "pull", url, "z", "--store", tmp_path / "new"), "no document 'z'")
    assert not (tmp_path / "new").exists()
    refused(run("share", "rm", url, "z"), "no document 'z'")
    refused(run("share", "push", url, "z", "--store", memory), "no document 'z'")
    for command in (["rm", "a"], ["compact"], ["import", tmp_path / "x"]):
        refused(run(*command, "--store", url), "read-only", status=2)
    refused(run("share", "push", url, "--store", url), "read-only", status=2)
    refused(run("share", "push", f"file://{memory}", "--store", memory), "memory's directory")
    refused(run("share", "push", url, "--store", tmp_path / "none"), "holds no memory")


@pytest.mark.parametrize("scheme, status", [("s3", 1), ("gs", 2), ("az", 2)])  # 2: never asked
def test_missing_credentials_are_named(
    scheme: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*os.environ]:
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "bm90IGEgc2VjcmV0")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", "/nonexistent/account.json")
    refused(
        run("ls", "--store", f"{scheme}://bucket/x"), "credentials", "environment", status=status
    )


def test_no_line_shows_a_secret_of_the_environment(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE"),
        ("AWS_SECRET_ACCESS_KEY", "a-secret/of+mine"),
        ("AWS_SESSION_TOKEN", "a-session-of-mine"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9"),
        ("GOOGLE_SERVICE_ACCOUNT_KEY", '"a-secret/of+mine"'),  # obstore repeats what is no object
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("memstore.share.published_catalog.DEADLINE", 0.5)  # nobody is there
    for arguments in (
        ("ls", "--store", "s3://bucket/x", "--json"),
        ("share", "push", "s3://bucket/AKIAEXAMPLE", "--store", memory),
        ("ls", "--store", "gs://bucket/x"),
        ("ls", "--store", "s3://AKIAEXAMPLE:a-secret@bucket/x"),
        ("ls", "--store", "s3://AKIAEXAMPLE:a-secret/of+mine@bucket/x"),
        ("ls", "--store", "s3://AKIAEXAMPLE:an@a-secret@bucket/x"),
        ("ls", "--store", "s3://bucket/x", "--valkey", "redis://:an@a-secret@host:6379?x=1"),
        ("verify", "--repair", "--store", "s3://AKIAEXAMPLE:a-secret/of+mine@bucket/x"),
        ("rm", "a", "--store", "s3://AKIAEXAMPLE:a-secret/of+mine@bucket/x"),
        ("share", "push", "http://me:a-secret/of+mine@bucket/x", "--store", memory),
        ("share", "push", "az://bucket/x/?sig=a-secret/of+mine", "--store", memory),
    ):
        result = run(*arguments)
        assert result.status in (1, 2) and result.err
        assert not any(
            secret in result.out + result.err
            for secret in ("a-secret", "of+mine", "a-session-of-mine")
        )
