"""One suite over every kind of object store."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from memstore.errors import CorruptMemory, MemoryNotFound, ObjectNotFound, StoreUnavailable
from memstore.share.manifest import read_manifest, read_newest
from memstore.share.object_store import ObjectStore
from memstore.share.open_object_store import open_object_store
from memstore.share.publish import prune, unpublish
from memstore.share.ranges import OBJECT_BYTES
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer import export_document, publish_memory, pull_document
from memstore.store.verify import verify_memory
from support.services import (
    AZURE_ENVIRONMENT,
    S3_ENVIRONMENT,
    azure_server,
    make_bucket,
    make_container,
    s3_server,
)
from support.synthetic_documents import SIGNATURE, ingest

S3_ENDPOINT = "AWS_ENDPOINT_URL"
SCHEME = {"s3": "s3", "azure": "az"}
SERVERS = [pytest.param(kind, marks=pytest.mark.services) for kind in SCHEME]
_numbers = count()


@contextmanager
def reached(environment: dict[str, str], engine: str) -> Iterator[None]:
    """Have only these variables in the environment of those that begin with an engine's name."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(engine)]:
            patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The endpoint of an S3 server with a bucket, and the environment that reaches it."""
    with s3_server() as endpoint, reached(S3_ENVIRONMENT | {S3_ENDPOINT: endpoint}, "AWS_"):
        make_bucket(endpoint, "bucket")
        yield endpoint


@pytest.fixture(scope="module")
def azure() -> Iterator[str]:
    """The endpoint of an Azure server with a container, and the environment that reaches it."""
    with (
        azure_server() as endpoint,
        reached(AZURE_ENVIRONMENT | {"AZURE_STORAGE_ENDPOINT": endpoint}, "AZURE_"),
    ):
        make_container(endpoint, "bucket")
        yield endpoint


@pytest.fixture(params=["memory", "file", *SERVERS])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    number = next(_numbers)
    if request.param in ("s3", "azure"):
        request.getfixturevalue(request.param)
        return f"{SCHEME[request.param]}://bucket/team {number}/library"
    return f"memory://place-{number}" if request.param == "memory" else f"file://{tmp_path}/a/b"


@pytest.fixture
def place(url: str) -> ObjectStore:
    return open_object_store(url, make=True)


def test_an_object_reads_back_whole_and_in_parts(place: ObjectStore) -> None:
    data = bytes(range(256)) * 5000
    place.put("some/name", data)
    assert bytes(place.get("some/name")) == data
    ranges = [(0, 1), (255, 3), (1_000_000, 5000), (70_000, 1), (len(data) - 4, 4)]
    for start, length in ranges:
        assert bytes(place.get_range("some/name", start, length)) == data[start : start + length]
    place.put("some/name", b"other")
    assert bytes(place.get("some/name")) == b"other"
    assert place.create("new", b"first") and not place.create("new", b"second")
    assert bytes(place.get("new")) == b"first"


def test_a_missing_object_or_range_is_an_error(place: ObjectStore) -> None:
    place.put("a/b", bytes(100))
    for read in (
        lambda: place.get("a/c"),
        lambda: place.get("a"),
        lambda: place.get_range("c", 0, 1),
    ):
        with pytest.raises(ObjectNotFound):
            read()
    for offset, length in ((90, 20), (200, 10), (95, 6)):
        with pytest.raises(CorruptMemory, match="truncated"):
            place.get_range("a/b", offset, length)


def test_objects_are_listed_below_a_prefix(place: ObjectStore) -> None:
    assert list(place.names("a")) == [] and place.first("a") is None
    for name in ("a/3", "a/1", "b/0", "a/2/deep", "ab/4"):
        place.put(name, name.encode())
    found = {each.name: each.size for each in place.names("a")}
    assert found == {"a/1": 3, "a/3": 3, "a/2/deep": 8}
    assert place.first("a") == "a/1" and place.first("b") == "b/0" and place.first("c") is None
    times = [each.modified for each in place.names("a")]
    assert max(times) - min(times) < 3600
    place.delete(["a/1", "a/none", "b/0", "b/none"])
    assert {each.name for each in place.names("")} == {"a/3", "a/2/deep", "ab/4"}


def test_a_memory_is_published_pulled_and_pruned(url: str, tmp_path: Path) -> None:
    if url.startswith("s3:"):  # with empty objects, by which consoles and mounts mark folders
        client = pytest.importorskip("boto3").client("s3")
        for folder in ("manifests/", "segments/"):
            client.put_object(Bucket="bucket", Key=f"{url.removeprefix('s3://bucket/')}/{folder}")
    with MemoryStore.create(tmp_path / "memory", SIGNATURE) as store:
        ingest(store, "a", 100)
        ingest(store, "b", 60, text=2)
        first = publish_memory(store, url)
        assert (first.number, first.documents) == (1, ["a", "b"])
        ingest(store, "a", 130, mode="replace")
        assert publish_memory(store, url, ["a"], replace=True).documents == ["a"]
        assert publish_memory(store, url).there == ["a", "b"]
        assert verify_memory(url).documents == 2
        with MemoryStore.create(tmp_path / "copy", SIGNATURE) as copy:
            pull_document(copy, "a", url)
            for memory, file in ((store, "original"), (copy, "copied")):
                export_document(memory, "a", tmp_path / file)
        assert (tmp_path / "copied").read_bytes() == (tmp_path / "original").read_bytes()
    place = open_object_store(url)
    assert unpublish(place, ["a"]) == 3
    assert prune(place).manifests == 0
    assert prune(place, grace=-10).manifests == 2
    assert [*read_newest(place).entries] == ["b"]
    assert verify_memory(url).clean
    assert read_manifest(place, 3).number == 3
    with pytest.raises(ObjectNotFound):
        read_manifest(place, 2)


def test_a_fork_of_a_process_that_called_a_store_is_refused_at_once(
    url: str, tmp_path: Path
) -> None:
    with MemoryStore.create(tmp_path / "memory", SIGNATURE) as store:
        ingest(store, "a", 40)
        publish_memory(store, url)
    with MemoryStore.open(url) as reader:
        tasks: list[Callable[[], object]] = [
            lambda: reader.tokens("a"),
            lambda: MemoryStore.open(url),
            lambda: open_object_store(url).put("x", b""),
            reader.close,
        ]
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()

        def child() -> None:
            for task in tasks:
                try:
                    task()
                    results.put("")
                except Exception as error:
                    results.put(f"{type(error).__name__}: {error}")

        process = context.Process(target=child)
        process.start()
        process.join(120)
        alive = process.is_alive()
        process.kill()
        assert not alive
        told = [results.get() for _ in tasks]
        assert told.pop() == ""  # closing it is allowed
        assert all(line.startswith("MemoryClosed") and "fork" in line for line in told), told
        assert reader.has("a") and [*reader.tokens("a").ids]


def test_publishers_at_the_same_time_lose_nothing(url: str, tmp_path: Path) -> None:
    """Each has a memory and a client of its own, as machines would."""

    def publish(who: int) -> list[int]:
        with MemoryStore.create(tmp_path / str(who), SIGNATURE) as store:
            numbers = []
            for number in range(2):
                ingest(store, f"{who}-{number}", 16, text=who)
                numbers.append(publish_memory(store, url, [f"{who}-{number}"]).number)
        return numbers

    with ThreadPoolExecutor(5) as pool:
        found = list(pool.map(publish, range(5)))
    assert sorted(number for numbers in found for number in numbers) == list(range(1, 11))
    names = [*read_newest(open_object_store(url)).entries]
    assert names == sorted(f"{who}-{number}" for who in range(5) for number in range(2))
    assert verify_memory(url).documents == 10


def test_a_memory_is_seen_by_another_process(url: str, tmp_path: Path) -> None:
    if url.startswith("memory"):
        pytest.skip("it is in this process")
    with MemoryStore.create(tmp_path / "memory", SIGNATURE) as store:
        ingest(store, "a", 40)
        publish_memory(store, url)
    code = "import atexit, sys; from memstore.cli.main import main; "
    code += "atexit.register(lambda: print('torch' in sys.modules)); main()"
    command = [sys.executable, "-c", code, "verify", "--store", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "1 document, " in done.stdout and "clean" in done.stdout
    assert done.stdout.endswith("\nFalse\n")


def test_a_manifest_that_is_too_large_is_refused_unread(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/library"
    with MemoryStore.create(tmp_path / "memory", SIGNATURE) as store:
        ingest(store, "a", 40)
        publish_memory(store, url)
    (file,) = (path for path in (tmp_path / "library" / "manifests").rglob("*") if path.is_file())
    os.truncate(file, OBJECT_BYTES + 1)  # sparse
    with pytest.raises(CorruptMemory, match=r"has 268,435,457 bytes, which should be .* at most"):
        read_manifest(open_object_store(url), 1)


# Servers


@pytest.mark.services
@pytest.mark.parametrize(
    ("kind", "endpoint", "environment"),
    [("s3", S3_ENDPOINT, S3_ENVIRONMENT), ("azure", "AZURE_STORAGE_ENDPOINT", AZURE_ENVIRONMENT)],
)
def test_a_store_that_refuses_or_is_unavailable_is_one_line(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    endpoint: str,
    environment: dict[str, str],
) -> None:
    request.getfixturevalue(kind)
    scheme = SCHEME[kind]
    with pytest.raises(MemoryNotFound, match="the bucket does not exist"):
        read_newest(open_object_store(f"{scheme}://nowhere-at-all/x"))
    with pytest.raises(MemoryNotFound, match="the bucket does not exist"):
        open_object_store(f"{scheme}://nowhere-at-all/x").put("a", b"")
    with pytest.raises(MemoryNotFound, match="holds no published memory"):
        read_newest(open_object_store(f"{scheme}://bucket/empty"))
    monkeypatch.setenv(endpoint, "http://127.0.0.1:9/devstoreaccount1")
    with pytest.raises(StoreUnavailable) as caught:
        read_newest(open_object_store(f"{scheme}://bucket/x", timeout=2))
    assert "\n" not in str(caught.value)
    keys = [value for name, value in environment.items() if "KEY" in name]
    assert keys and not any(key in str(caught.value) for key in keys)
