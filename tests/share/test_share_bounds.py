"""What lies in a published memory or its caches and is too large, or is no file, is refused before
it is read; and a store that does not answer keeps neither Ctrl-C nor the end of the process.
"""

import _thread
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgpack
import pytest

from memstore.errors import CorruptMemory, InvalidInput
from memstore.share.caches.local_cache import LocalCache
from memstore.share.calls import Calls
from memstore.share.format import packed_objects as packed
from memstore.share.format.document_pages import PageRef
from memstore.share.format.manifest import FORMAT, manifest_name
from memstore.share.format.packed_objects import PACKED_BYTES
from memstore.share.format.published import Published
from memstore.share.format.segments import is_whole
from memstore.share.objects.daemon_threads import at_once, begin
from memstore.share.objects.object_store import OBJECT_BYTES
from memstore.share.objects.open_object_store import open_object_store
from memstore.store.memory_store import MemoryStore
from memstore.store.verify.verify_memory import verify_memory
from memstore.tiers.stats import TierCounter
from support.published import open_at, units_of
from support.services import S3_ENVIRONMENT
from support.synthetic_documents import SIGNATURE, ingest


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"file://{tmp_path}/library"
    with MemoryStore.create(tmp_path / "memory", SIGNATURE) as store:
        ingest(store, "a", 40)
        store.publish(url)
    return url


def one_of(url: str, folder: str) -> Path:
    """The file of an object that there is one of."""
    (file,) = (path for path in Path(url[7:], folder).rglob("*") if path.is_file())
    return file


@pytest.mark.parametrize("kind", ["manifests", "pages", "segments"])
def test_an_object_that_is_too_large_is_refused_by_its_size(url: str, kind: str) -> None:
    file = one_of(url, kind)
    os.truncate(file, OBJECT_BYTES + 1)  # sparse
    if kind == "segments":
        assert not is_whole(open_object_store(url), f"segments/{file.parent.name}/{file.name}")
        assert not verify_memory(url).clean
        return
    with pytest.raises(CorruptMemory, match=r"has 268,435,457 bytes, which should be .* at most"):
        MemoryStore.open(url)


@pytest.mark.parametrize("kind", ["manifests", "pages", "segments"])
def test_a_pipe_in_the_place_of_an_object_is_refused_and_never_opened(url: str, kind: str) -> None:
    file = one_of(url, kind)
    file.unlink()
    os.mkfifo(file)
    segment = f"segments/{file.parent.name}/{file.name}"
    reads = {
        "manifests": lambda: open_object_store(url).get(manifest_name(1)),
        "pages": lambda: MemoryStore.open(url),
        "segments": lambda: open_object_store(url).get_ranges(segment, [(0, 1)]),
    }
    before = threading.active_count()
    with pytest.raises(CorruptMemory, match="not a regular file"):
        reads[kind]()
    assert threading.active_count() <= before + 2  # those that requests are made on, idle
    if kind == "segments":
        assert not verify_memory(url).clean


def test_sizes_that_a_manifest_or_a_page_invents_are_refused(url: str) -> None:
    file, place = one_of(url, "pages"), open_object_store(url)
    segments, [(row, pieces)] = msgpack.unpackb(packed.decompressed(file.read_bytes()[16:-8]))
    pieces[0][7] = PACKED_BYTES + 1
    file.write_bytes(packed.pack(b"mRpage\0\0", FORMAT, (segments, [(row, pieces)])))
    page = Published.open(place).manifest.pages[0]

    def publish(page: PageRef) -> None:
        manifest = one_of(url, "manifests")
        values = msgpack.unpackb(packed.decompressed(manifest.read_bytes()[16:-8]))
        manifest.write_bytes(packed.pack(b"mRmanife", FORMAT, values | {"pages": [page]}))

    held = file.read_bytes()
    publish(page._replace(size=len(held), digest=packed.digest_of(held)))
    with pytest.raises(CorruptMemory, match="Expected `int` <="):
        Published.open(place).documents()
    publish(page._replace(size=PACKED_BYTES + 1))
    with pytest.raises(CorruptMemory, match="Expected `int` <="):
        Published.open(place)


def test_a_table_that_nobody_would_read_is_not_written() -> None:
    with pytest.raises(InvalidInput, match="another prefix"):
        packed.pack(b"mRpage\0\0", FORMAT, os.urandom(PACKED_BYTES))


@pytest.mark.parametrize("kind", ["large", "pipe"])
def test_what_is_no_value_in_a_local_cache_is_removed_and_read_anew(
    url: str, tmp_path: Path, kind: str
) -> None:
    cache = tmp_path / "cache"

    def read() -> dict[str, float]:
        with open_at(open_object_store(url), local=LocalCache(cache, 1 << 24)) as store:
            units = units_of(store, "a")
            with store.lease(units):
                pass
            store._on_disk().catalog.source.settle()
            return store.tier_stats()["local"]

    read()
    files = list(cache.glob("??/*"))
    for file in files:
        if kind == "large":
            os.truncate(file, 1 << 33)
        else:
            file.unlink()
            os.mkfifo(file)
    assert read()["failed_damaged"] > 0
    assert all(file.stat().st_size < 1 << 20 for file in cache.glob("??/*"))
    again = read()
    assert "failed" not in again and again["hits"] > 0


@pytest.mark.parametrize("way", ["at once", "until"])
def test_an_interrupt_that_comes_as_a_wait_begins_ends_it(way: str) -> None:
    """Such a one is noted, and wakes nobody: as interrupt_main does it."""
    given = threading.Event()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, _thread.interrupt_main).start()
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            if way == "at once":
                at_once(lambda _: given.wait(60), [1, 2])
            else:
                calls = Calls(TierCounter())
                calls.call(lambda left: given.wait(60), time.monotonic() + 60)
    finally:
        given.set()
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 30


OPENED = "MemoryStore.open(url, deadline=600)"
DIRECT = "Published.open(open_object_store(url, timeout=600))"


@pytest.mark.parametrize("how", [OPENED, DIRECT])
def test_a_store_that_does_not_answer_is_left_by_an_interrupt(how: str) -> None:
    code = f"""
from memstore.share.format.published import Published
from memstore.share.objects.open_object_store import open_object_store
from memstore.store.memory_store import MemoryStore
url = "s3://bucket/x"
{how}
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(120)
        environment = os.environ | S3_ENVIRONMENT
        environment["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, "-c", code]
        with subprocess.Popen(
            command,
            env=environment,
            stderr=subprocess.PIPE,
            # what a shell runs in the background ignores it
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        ) as process:
            connection, _ = server.accept()
            assert connection.recv(1)  # it waits for the answer
            process.send_signal(signal.SIGINT)
            try:
                _, said = process.communicate(timeout=180)
            finally:
                process.kill()
            assert said.strip().endswith(b"KeyboardInterrupt")


def test_work_is_done_side_by_side_by_threads_that_end_with_it() -> None:
    together = threading.Barrier(4)
    waiting = begin(lambda _: together.wait(60), range(12), most=4, name="memstore-test")
    assert sorted(turn.result(60) for turn in waiting) == sorted([*range(4)] * 3)
    left = [thread for thread in threading.enumerate() if thread.name.startswith("memstore-test")]
    for thread in left:
        thread.join(60)
        assert not thread.is_alive()


def test_what_is_cancelled_before_its_turn_is_not_done() -> None:
    began, go = threading.Event(), threading.Event()

    def work(number: int) -> int:
        began.set()
        assert go.wait(60)
        return number

    first, second = begin(work, [1, 2], most=1)
    assert began.wait(60) and second.cancel()
    go.set()
    assert first.result(60) == 1
