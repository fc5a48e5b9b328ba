"""Memories of format 1, written by the version before: they open, answer, and are written on.

tests/data/memory-format1.tar.zst: one memory a codec, each with the documents of
synthetic_documents: "ready" (text 1), "appended" (text 2), "replaced" (text 3, and two chunks of
text 4 that will replace it), "interrupted" (text 5, three chunks of it); and "ready" as an export.
memory-format1-read.tar.zst: a text that the shipped model read, and the answer it gave.
"""

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest
import zstandard
from synthetic_documents import CHUNK, HEADS, SIGNATURE, block, check_content, ingest

from memstore import MemoryStore, load_model
from memstore.block import BlockKey
from memstore.disk.catalog import Catalog
from memstore.disk.codec import CODECS
from memstore.store.verify import verify_memory
from memstore.tiers.raw_bits import raw_view

DATA = Path(__file__).parent / "data"
SIZES = {"ready": 3 * CHUNK + 5, "appended": 4 * CHUNK + 3, "replaced": 2 * CHUNK + 1}
SIZES["interrupted"] = 3 * CHUNK
TEXTS = {"ready": 1, "appended": 2, "replaced": 3, "interrupted": 5}
LOSSLESS = [name for name, codec in CODECS.items() if codec.lossless]


def unpack(name: str, to: Path) -> Path:
    """An archive's files, in a directory of their own."""
    packed = (DATA / name).read_bytes()
    data = zstandard.ZstdDecompressor().decompressobj().decompress(packed)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(to, filter="data")
    return to


@pytest.fixture(params=[name for name in CODECS if name != "int4+zstd"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A memory of format 1."""
    return unpack("memory-format1.tar.zst", tmp_path) / str(request.param)


@pytest.fixture
def lossless(tmp_path: Path) -> Iterator[MemoryStore]:
    with MemoryStore.open(unpack("memory-format1.tar.zst", tmp_path) / "zstd") as store:
        yield store


def format_of(path: Path) -> int:
    catalog = Catalog.open(path, read_only=True)
    with catalog.database.read() as txn:
        row = msgpack.unpackb(txn.get_checked("meta", b"memory") or b"")
    catalog.close()
    return int(row["format"])


def check(store: MemoryStore, name: str, codec: str) -> None:
    """A document is what was read: bit for bit or, with a lossy codec, near it."""
    document = store.document(name)
    assert document.tokens == SIZES[name]
    if codec in LOSSLESS:
        check_content(store, document, text=TEXTS[name])
        return
    for number in range(document.blocks):
        length = min(4, document.tokens - 4 * number)
        k, v, _ = block(TEXTS[name], 1, number, length)
        with store.lease([BlockKey(document.id, 1, number, head) for head in range(HEADS)]) as held:
            error = max(
                float((held.k[held.slots] - k).abs().max()),
                float((held.v[held.slots] - v).abs().max()),
            )
            assert error < (0.02 if codec.startswith("int8") else 0.3)


def test_everything_in_it_is_read_and_nothing_is_changed_by_that(path):
    before = (path / "data.mdb").read_bytes()
    assert verify_memory(path).clean
    with MemoryStore.open(path, SIGNATURE, read_only=True) as store:
        assert store.codec == path.name
        assert [document.name for document in store.documents()] == list(SIZES)
        states = {document.name: document.state for document in store.documents()}
        assert states.pop("interrupted") == "ingesting" and {*states.values()} == {"ready"}
        for name in SIZES:
            check(store, name, path.name)
        appended = store.document("appended")
        assert appended.appended_to == 2 * CHUNK + 6 and appended.settings.top_k == 2
    assert format_of(path) == 1 and (path / "data.mdb").read_bytes() == before


def test_what_was_begun_is_ended_and_raises_the_format(path):
    with MemoryStore.open(path) as store:
        ingest(store, "interrupted", 5 * CHUNK + 2, text=5)
        assert format_of(path) == 2
        replaced = ingest(store, "replaced", 4 * CHUNK, text=4, mode="replace")
        assert replaced.tokens == 4 * CHUNK and replaced.appended_to == 0
        ingest(store, "appended", 6 * CHUNK + 1, text=2, mode="append")
        with pytest.MonkeyPatch.context() as patched:
            patched.setitem(SIZES, "interrupted", 5 * CHUNK + 2)
            patched.setitem(SIZES, "replaced", 4 * CHUNK)
            patched.setitem(TEXTS, "replaced", 4)
            patched.setitem(SIZES, "appended", 6 * CHUNK + 1)
            for name in SIZES:
                check(store, name, path.name)
        writes = {document.name: document.writes for document in store.documents()}
    assert writes["ready"] == ()
    assert [write.first for write in writes["interrupted"]] == [12]
    assert [write.first for write in writes["replaced"]] == [8]
    assert [write.first for write in writes["appended"]] == [16]
    assert verify_memory(path).clean
    with MemoryStore.open(path, read_only=True) as store:
        check(store, "ready", path.name)


def test_forgetting_raises_the_format(path):
    with MemoryStore.open(path) as store:
        store.forget("replaced")
    assert format_of(path) == 2
    with MemoryStore.open(path) as store:
        assert [document.name for document in store.documents()] == [
            "ready",
            "appended",
            "interrupted",
        ]
        check(store, "ready", path.name)
    assert verify_memory(path).clean


def test_a_document_is_taken_to_a_new_memory(path, tmp_path):
    export = tmp_path / "document"
    with MemoryStore.open(path, read_only=True) as store:
        store.export_document("appended", export)
    with MemoryStore.create(tmp_path / "new", SIGNATURE, codec="raw") as store:
        document = store.import_document(export)
        assert [write.first for write in document.writes] == [0]
        check(store, "appended", path.name)
        again = tmp_path / "again"
        store.export_document("appended", again)
        other = store.import_document(again, "twin")
        assert other.writes == document.writes  # ids are kept
    assert verify_memory(tmp_path / "new").clean


def test_a_document_of_two_formats_is_exported_and_imported(lossless, tmp_path):
    ingest(lossless, "appended", 6 * CHUNK + 1, text=2, mode="append")
    lossless.export_document("appended", tmp_path / "document")
    with MemoryStore.create(tmp_path / "new", SIGNATURE) as store:
        document = store.import_document(tmp_path / "document")
        assert [write.first for write in document.writes] == [0, 16]
        assert document.writes[1:] == lossless.document("appended").writes
        check_content(store, document, text=2)
    assert verify_memory(tmp_path / "new").clean


def test_an_export_of_the_version_before_is_imported(lossless, tmp_path):
    document = lossless.import_document(tmp_path / "ready.export", "copy")
    check_content(lossless, document, text=1)
    assert len(document.writes) == 1
    with MemoryStore.create(tmp_path / "new", SIGNATURE, codec="int4") as store:
        check_content(store, store.import_document(tmp_path / "ready.export"), text=1)
    assert verify_memory(tmp_path / "new").clean


def test_damage_is_found_and_repaired(lossless, tmp_path):
    catalog = Catalog.open(lossless.path)
    with catalog.database.read() as txn:
        document = catalog.document(txn, "ready")
        key, data = next(catalog.blocks.walk(txn, document.id))
        data = bytes(data)
    lossless.close()
    damaged = data[:-1] + bytes([data[-1] ^ 1])
    catalog.database.write(lambda txn: catalog.blocks.put(txn, key, damaged))
    catalog.close()
    report = verify_memory(lossless.path, repair=True)
    assert report.dropped == ["ready"] and str(key) in report.problems[0].what
    with MemoryStore.open(lossless.path) as store:
        check(store, "appended", "zstd")


def test_the_shipped_model_gives_the_answer_that_it_gave(tmp_path):
    unpack("memory-format1-read.tar.zst", tmp_path)
    expected = json.loads((tmp_path / "expected.json").read_text())
    model = load_model()
    with MemoryStore.open(tmp_path / "memory", model.signature) as store:
        answer = model.ask(expected["question"], store, supersede=0.0)  # which it did not have
        assert answer.text == expected["text"]
        assert [[s.document, list(s.span)] for s in answer.sources] == expected["sources"]
        (document,) = store.documents()
        keys = store.landmark_keys(model.signature.memory_layers[0], [(document.id, 0, 1)])
        assert np.isfinite(raw_view(keys).view(np.float32)).all()
    assert format_of(tmp_path / "memory") == 1
