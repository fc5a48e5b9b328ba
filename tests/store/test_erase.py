"""Which bytes of a document remain in a memory's files after it was forgotten, erased, or partly
imported.
"""

import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memstore.disk.format.document import Document
from memstore.disk.tables.texts import Passage
from memstore.errors import MemoryLocked
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer import export_document, import_document
from support import passage_documents
from support.fork_server import RIGHT, ForkServer
from support.selected_documents import FORM
from support.selected_documents import create as create_selected
from support.synthetic_documents import (
    BUDGET,
    CHUNK,
    CHUNK_BLOCKS,
    SETTINGS,
    SIGNATURE,
    blocks,
    check_content,
    chunk,
    ingest,
    is_whole,
    opened,
)

Numbers = np.ndarray[Any, np.dtype[np.uint64]]
SECRET, TEXT, TOKENS = "a name that is to be erased", 77, 40 * CHUNK + 5
IDS = np.random.default_rng(5).integers(1 << 24, 1 << 31, TOKENS)


def ingest_secret(store: MemoryStore) -> Document:
    """A document of token ids that no other has."""
    writer = store.write_document(
        SECRET, source_hash="a hash that is erased", settings=SETTINGS, commit_bytes=4000
    )
    with writer:
        for first in range(0, TOKENS, CHUNK):
            end = min(first + CHUNK, TOKENS)
            layers, short = chunk(TEXT, first // CHUNK * CHUNK_BLOCKS, end - first)
            writer.add_chunk(IDS[first:end], first * 3, layers, short)
        return writer.finish()


@cache
def pieces() -> dict[str, Numbers]:
    """What the document is made of, in pieces of 8 bytes."""
    ids = np.lib.stride_tricks.sliding_window_view(IDS.astype("<u4"), 2)
    some = {
        "row": np.frombuffer(SECRET.encode()[:24], np.uint64),
        "tokens": ids.copy().view(np.uint64).ravel(),
    }
    for layer in SIGNATURE.memory_layers:
        for kind, numbers in zip(("keys", "values", "landmarks"), blocks(TEXT, layer, 0, TOKENS)):
            rows = numbers.view(torch.int16).numpy().reshape(-1, 4).view(np.uint64)
            some[f"{kind} {layer}"] = rows[rows != 0]  # but padding
    return some


def slots(eights: Numbers) -> Numbers:
    """Of each piece a number below 2^20, which few others have."""
    return (eights * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(44)


def found(path: Path) -> dict[str, int]:
    """How many pieces (of 8 bytes) of the document are in the files of a memory, by what they are
    of.
    """
    files = (file.read_bytes() for file in path.rglob("*") if file.is_file())
    data = np.frombuffer(b"".join(files) + bytes(8), np.uint8)
    eights = np.lib.stride_tricks.sliding_window_view(data, 8).copy().view(np.uint64).ravel()
    known = np.zeros(1 << 20, bool)
    for some in pieces().values():
        known[slots(some)] = True
    eights = eights[known[slots(eights)]]
    return {
        kind: count
        for kind, some in pieces().items()
        if (count := int(np.isin(eights, some).sum()))
    }


@pytest.fixture(scope="module", params=["raw", "zstd"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory of three documents. One of them holds the secret."""
    path = tmp_path_factory.mktemp("erase") / "memory"
    with MemoryStore.create(path, SIGNATURE, codec=request.param, host_budget=BUDGET) as store:
        ingest(store, "before", 60 * CHUNK, text=2)
        ingest_secret(store)
        ingest(store, "after", 30 * CHUNK + 3, text=3)
    return path


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "memory")


def check_rest(store: MemoryStore) -> None:
    assert [document.name for document in store.documents()] == ["before", "after"]
    check_content(store, store.document("before"), text=2)
    check_content(store, store.document("after"), text=3)


def test_forgetting_leaves_bytes_until_compacting_and_erasing_leaves_none(path: Path) -> None:
    stays = {"row", "tokens", "landmarks 1", "landmarks 2"}  # zstd shuffles keys and values
    assert stays <= found(path).keys()
    erased = shutil.copytree(path, path.with_name("erased"))
    with opened(path) as store:
        store.forget(SECRET)
        assert stays <= found(path).keys()
        store.compact()
        check_rest(store)
    assert found(path) == {} and is_whole(path)
    with opened(erased) as store:
        assert store.forget(SECRET, erase=True).tokens == TOKENS
        check_rest(store)
        assert found(erased) == {}
    assert is_whole(erased)


def secret_passages(count: int) -> tuple[list[Passage], torch.Tensor, list[list[tuple[int, int]]]]:
    """Passages of token ids that no other has, with a gap, landmarks and words of their own."""
    random, made = np.random.default_rng(7), list[Passage]()
    for block in range(count):
        one = passage_documents.passage(TEXT, block)
        ids, gap = random.integers(1 << 24, 1 << 31, len(one.ids)), f"a gap of secret {block:09}"
        start = (made[-1].end if made else 0) + len(gap)
        made.append(one._replace(ids=ids, gap=gap, start=start))
    tokens = sum(len(one.ids) for one in made)
    numbers = random.integers(-127, 128, (tokens, FORM.width))
    words = [[(int(word), 1) for word in random.integers(0, 1 << 32, 4)] for _ in made]
    return made, torch.from_numpy(numbers).to(torch.int8), words


@pytest.mark.parametrize("way", ["compacted", "erased"])
def test_nothing_is_left_of_a_document_of_passages(tmp_path: Path, way: str) -> None:
    made, landmarks, words = secret_passages(40)
    kv = passage_documents.kept(TEXT, 0, 40)
    path, texts = tmp_path / "memory", {"before": 2, "after": 3}
    with create_selected(path, codec="raw") as store:
        passage_documents.ingest(store, "before", 30, text=2)
        settings = passage_documents.SETTINGS
        writer = store.write_document(SECRET, source_hash="hash", settings=settings)
        with writer:
            writer.add_passages(made, kv, landmarks=landmarks, words=words)
            writer.finish()
        passage_documents.ingest(store, "after", 30, text=3)
    pieces = {
        "name": SECRET.encode(),
        "gap": made[9].gap.encode(),
        "ids": made[9].ids.astype("<u4").tobytes(),
        "keys": kv[9][0][0].view(torch.int16).numpy().tobytes(),
        "values": kv[9][1][0].view(torch.int16).numpy().tobytes(),
        "landmarks": landmarks[50].numpy().tobytes(),
        "words": np.sort([word for word, _ in words[9]]).astype("<u4").tobytes(),
    }

    def left() -> set[str]:
        data = b"\0".join(file.read_bytes() for file in path.rglob("*") if file.is_file())
        return {name for name, piece in pieces.items() if piece in data}

    assert left() == pieces.keys()
    with opened(path) as store:
        store.forget(SECRET, erase=way == "erased")
        if way == "compacted":
            assert left() == pieces.keys()
            store.compact()
        assert left() == set()
        for name, text in texts.items():
            passage_documents.check_content(store, store.document(name), text)
    assert is_whole(path)


def test_pages_written_after_an_erasure_hold_no_freed_process_memory(path: Path) -> None:
    with opened(path) as store:
        document = store.document(SECRET)
        for _ in range(20):  # the ids are in freed memory of this process, too
            store.tokens(document.id)
        store.forget(SECRET, erase=True)
        for text in range(4, 10):
            ingest(store, str(text), 13 * CHUNK, text=text)
            assert found(path) == {}
        store.forget("5")
        ingest(store, "more", 50 * CHUNK, text=4)
    assert found(path) == {} and is_whole(path)


def test_erasing_removes_index_and_partial_files_and_other_openings_go_on(path: Path) -> None:
    pytest.importorskip("faiss")
    with opened(path) as store, MemoryStore.open(path) as other:
        ingest(other, "long", 300 * CHUNK, text=4, commit_bytes=1 << 20)
        other.build_index()
        built = {file.name for file in (path / "index").iterdir()}
        assert built == {"layer-1.idx", "layer-2.idx"}
        (path / "index" / "mine.idx").touch()
        for folder in (path, path / "index"):  # as a process that is killed leaves them
            begun = folder / "memstore-0123456789abcdef.partial"
            begun.write_bytes((path / "data.mdb").read_bytes())
        assert len(list(path.rglob("*.partial"))) == 2
        document = other.document("after")
        store.forget(SECRET, erase=True)
        assert found(path) == {} and [f.name for f in (path / "index").iterdir()] == ["mine.idx"]
        query = torch.zeros(2, 1, 8)
        scope = [(document.id, 0, document.blocks)]
        other.retrieval.landmarks(scope).search(1, query, scope, 2)
        assert [row.name for row in other.documents()] == ["before", "after", "long"]
        other.build_index()  # it is built from the remaining documents
        assert found(path) == {}
        check_content(other, ingest(other, "next", 100, text=5), text=5)
        assert [row.name for row in store.documents()][-1] == "next"


def test_erasing_is_refused_while_another_process_has_the_memory_open(path: Path) -> None:
    code = """
import sys
from memstore.store.memory_store import MemoryStore
with MemoryStore.open(sys.argv[1], read_only=True) as store:
    for _ in range(2):
        print(len(store.documents()), flush=True)
        sys.stdin.readline()
"""
    with (
        opened(path) as store,
        subprocess.Popen(
            [sys.executable, "-c", code, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as other,
    ):
        assert other.stdout.readline() == "3\n"
        with pytest.raises(MemoryLocked, match="another process"):
            store.forget(SECRET, erase=True)
        assert len(store.documents()) == 3
        ingest(store, "more", 100, text=4)
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline() == "4\n"
        other.communicate("\n")
        store.forget(SECRET, erase=True)
        assert [row.name for row in store.documents()] == ["before", "after", "more"]
    assert found(path) == {} and is_whole(path)


def test_erasing_without_room_changes_nothing(path: Path, children: ForkServer) -> None:
    code = """
import resource
with MemoryStore.open(arguments[0]) as store:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        store.forget(arguments[1], erase=True)
    except StorageFull as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        print(len(store.documents()), len(list(store.path.rglob("*.partial"))))
    store.forget(arguments[1], erase=True)
"""
    said = path.with_name("said")
    assert children.run("python_job", said, code, path, SECRET) == RIGHT
    assert said.read_text() == "3 0\n"
    with opened(path) as store:
        check_rest(store)
    assert found(path) == {}


def test_an_erasure_killed_at_any_system_call_is_done_or_not_begun(
    path: Path, children: ForkServer, tmp_path: Path
) -> None:
    code = """
import os, signal
from memstore.disk import files
from memstore.disk.lmdb import environment
steps = 0
def step(function):
    def stepped(*given, **named):
        global steps
        steps += 1
        if steps == int(arguments[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given, **named)
    return stepped
for name in ("pwrite", "fsync", "replace", "unlink", "ftruncate", "fchmod", "open"):
    setattr(os, name, step(getattr(os, name)))
with MemoryStore.open(arguments[0]) as store:
    store.forget(arguments[1], erase=True)
"""
    outcomes = set()
    for at in range(1, 100):
        copy = shutil.copytree(path, tmp_path / str(at))
        outcome = children.run("python_job", tmp_path / "said", code, copy, SECRET, at)
        with opened(copy) as store:
            names = [row.name for row in store.documents()]
            assert names in (["before", "after"], ["before", SECRET, "after"])
            ingest(store, "next", 10)  # sweeps
            if SECRET in names:
                store.forget(SECRET, erase=True)
        assert found(copy) == {} and is_whole(copy) and not list(copy.rglob("*.partial"))
        outcomes.add((outcome, SECRET in names))
        shutil.rmtree(copy)
        if outcome == RIGHT:
            break
    assert outcomes == {(-signal.SIGKILL, True), (-signal.SIGKILL, False), (RIGHT, False)}


def test_a_killed_import_is_forgotten_or_done_again(
    path: Path, children: ForkServer, tmp_path: Path
) -> None:
    with opened(path) as store:
        export_document(store, SECRET, tmp_path / "export")
        store.forget(SECRET, erase=True)
    code = """
import os, signal
from memstore.store import transfer
transfer._BATCH_BYTES = 10_000
store_batch, batches = transfer._store, 0
def count(*given):
    global batches
    batches += 1
    if batches == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    store_batch(*given)
transfer._store = count
with MemoryStore.open(arguments[0]) as store:
    transfer.import_document(store, arguments[1])
"""
    said = tmp_path / "said"
    assert children.run("python_job", said, code, path, tmp_path / "export") == -signal.SIGKILL
    assert "tokens" in found(path)
    again = shutil.copytree(path, tmp_path / "again")
    with opened(path) as store:
        begun = store.document(SECRET)
        assert (begun.state, begun.tokens) == ("ingesting", 0) and is_whole(path)
        store.forget(SECRET, erase=True)
        check_rest(store)
    assert found(path) == {}
    with opened(again) as store:
        document = import_document(store, tmp_path / "export")
        assert [row.state for row in store.documents()] == ["ready"] * 3
        assert store.tokens(document.id).ids.tolist() == IDS.tolist()
    assert is_whole(again)


def test_a_change_after_compacting_is_noticed_even_with_a_reused_transaction_number(
    tmp_path: Path,
) -> None:
    path = tmp_path / "memory"
    with MemoryStore.create(path, SIGNATURE, host_budget=BUDGET) as store:
        for text in range(1, 4):
            ingest(store, str(text), 10 * CHUNK, text=text)
        with opened(path) as other:
            assert len(other.documents()) == 3
            database = other._catalog.database
            seen = database.version.transaction
            store.compact()
            ingest(store, "4", 10, text=4)
            while database.version.transaction < seen:
                store.describe("4", {"turn": database.version.transaction})
            assert database.version.transaction == seen  # as if nothing had happened
            assert len(other.documents()) == 4
