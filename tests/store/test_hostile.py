"""Crafted and damaged exports, rows and names are refused by a named error with the memory
unchanged, or give a usable document.

MEMSTORE_HOSTILE (100) sets the examples of each property test; `make soak` sets more.
"""

import json
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_digest

from memstore.block import BlockKey
from memstore.decode import unpack
from memstore.disk.format.document import Document
from memstore.disk.lmdb.transaction import number_key
from memstore.disk.tables.catalog import Catalog
from memstore.errors import CorruptMemory, InvalidInput, MemstoreError
from memstore.share.document_file import DocumentFile, _trailer, write_document
from memstore.share.document_parts import Head, Part, PartOrder, Record, Tokens
from memstore.share.manifest import pack
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer import export_document, import_document
from memstore.store.verify import verify_memory
from support import passage_documents, selected_documents
from support.crafted import NAN, WRONG, changed, damaged, fuzzed, places
from support.selected_documents import QUESTION, selected
from support.synthetic_documents import (
    BLOCK,
    CHUNK,
    DIM,
    HEADS,
    SETTINGS,
    SIGNATURE,
    chunk,
    ingest,
    is_whole,
    stored,
    token_ids,
)


class Case(NamedTuple):
    """A memory to import into, and an export of a like memory."""

    store: MemoryStore
    file: Path

    @property
    def parts(self) -> list[Part]:
        return [*DocumentFile(self.file).parts()]


def create(kind: str, path: Path) -> MemoryStore:
    if kind == "chunks":
        return MemoryStore.create(path, SIGNATURE, codec="raw", host_budget=1 << 22)
    return selected_documents.create(path, codec="raw")


def fill(kind: str, store: MemoryStore) -> None:
    """Write the document `book`."""
    if kind == "chunks":
        ingest(store, "book", 5 * CHUNK + 2)
    else:
        passage_documents.ingest(store, "book", 40)


@pytest.fixture(scope="module", params=["chunks", "passages"])
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    path = tmp_path_factory.mktemp("hostile")
    with create(request.param, path / "from") as store:
        fill(request.param, store)
        export_document(store, "book", path / "export")
    with create(request.param, path / "memory") as store:
        other = passage_documents.ingest if store.selector else ingest
        other(store, "kept", 20, text=2)
        yield Case(store, path / "export")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MemoryStore]:
    with create("chunks", tmp_path / "memory") as store:
        ingest(store, "kept", 20, text=2)
        yield store


class Lenient(PartOrder):
    """Writes whatever parts are given."""

    def add(self, part: Part) -> None:
        with suppress(ValueError, TypeError, IndexError, MemstoreError):
            super().add(part)

    def end(self) -> None:
        pass


def write(file: Path, head: Head, parts: list[Part]) -> Path:
    """Write an export of these parts, with right checksums."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memstore.share.contents.PartOrder", Lenient)
        write_document(head, parts, file)
    return file


def with_footer(file: Path, change: Callable[[Any], Any], out: Path) -> Path:
    """Write an export with a changed footer, with right checksums."""
    data = file.read_bytes()
    size = int.from_bytes(data[-24:-16], "little")
    footer = msgpack.unpackb(zstandard.decompress(data[-24 - size : -24][16:-8]))
    packed = pack(b"mRfooter", change(footer))
    out.write_bytes(data[: -24 - size] + packed + _trailer(len(packed)))
    return out


def resigned(record: bytes) -> bytes:
    """A record with right checksums of its heads and of its header."""
    sizes_at = 8 + 16 + 16 + 6
    digests_at = sizes_at + 4 * HEADS
    end = digests_at + 8 * HEADS
    digests, at = b"", end + 8
    for size in struct.unpack_from(f"<{HEADS}I", record, sizes_at):
        digests += xxh3_64_digest(record[at : at + size])
        at += size
    header = record[:digests_at] + digests
    return header + xxh3_64_digest(header) + record[end + 8 :]


def contents(store: MemoryStore) -> tuple[object, ...]:
    return stored(store.path), selected(store.path), sorted(store.path.iterdir())


def imported(store: MemoryStore, file: Path) -> bool:
    """Import a file: refused with the memory unchanged, or used by every verb and forgotten."""
    before = contents(store)
    try:
        document = import_document(store, file)
    except MemstoreError as error:
        assert str(error) and contents(store) == before
        return False
    assert is_whole(store.path)
    json.dumps([asdict(row) for row in store.documents()], allow_nan=False, default=bytes.hex)
    assert document.blocks
    scope = [(document.id, 0, document.blocks)]
    if store.selector:
        passages = store.passages(document.id)
        assert sum(len(passage.ids) for passage in passages) == document.tokens
        assert torch.isfinite(store.retrieval.selected.token_maxima(QUESTION, scope)).all()
        assert torch.isfinite(
            store.retrieval.selected.word_scores({7: 1.0, 1001: 2.0}, scope)
        ).all()
    else:
        assert len(store.tokens(document.id).ids) == document.tokens
        for layer in SIGNATURE.memory_layers:
            hits = store.retrieval.landmarks(scope).search(
                layer, torch.ones(HEADS, 1, DIM), scope, 2
            )
            assert torch.isfinite(hits.scores).all()
            for block in range(document.blocks):
                with store.lease([BlockKey(document.id, layer, block, 0)]) as held:
                    assert torch.isfinite(held.k[held.slots]).all()
                    assert torch.isfinite(held.v[held.slots]).all()
    export_document(store, document.name, file.with_name("again"))
    store.forget(document.name)
    assert contents(store) == before
    return True


def test_unchanged_export_is_imported(case: Case, tmp_path: Path) -> None:
    head = DocumentFile(case.file).head
    assert write(tmp_path / "file", head, case.parts).read_bytes() == case.file.read_bytes()
    assert imported(case.store, tmp_path / "file")


def crafted_part(data: st.DataObject, part: Part) -> Part:
    """A part in which one value, or a part of what it packs, is replaced."""
    wrong = data.draw(st.sampled_from(WRONG))
    if not isinstance(part, Tokens) and data.draw(st.booleans()):
        value = bytearray(part[-1])
        value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
        if isinstance(part, Record):
            return part._replace(data=data.draw(st.sampled_from([b"", resigned(bytes(value))])))
        return part._replace(value=bytes(value[: data.draw(st.sampled_from([None, -1, 30, 0]))]))
    if isinstance(part, Tokens) and data.draw(st.booleans()):
        packed = msgpack.Unpacker()
        packed.feed(part.value)
        inner = packed.unpack()
        rest = part.value[packed.tell() :]
        inner = changed(inner, data.draw(st.sampled_from(list(places(inner)))), wrong)
        rest = data.draw(st.sampled_from([rest, rest[:-1], rest + b"\0", b""]))
        return part._replace(value=msgpack.packb(inner) + rest)
    name = data.draw(st.sampled_from(part._fields))
    return part._replace(**{name: wrong})


@fuzzed
@given(data=st.data())
def test_crafted_export_is_refused_or_usable(
    case: Case, tmp_path: Path, data: st.DataObject
) -> None:
    """A value of its footer is another, or of its parts one is another, missing or misplaced; all
    checksums are right.
    """
    file, crafted = tmp_path / "file", case.parts
    try:
        if data.draw(st.booleans()):

            def change(footer: Any) -> Any:
                way = data.draw(st.sampled_from([*places(footer)][1:]))
                return changed(footer, way, data.draw(st.sampled_from(WRONG)))

            with_footer(case.file, change, file)
        else:
            for _ in range(data.draw(st.integers(1, 2))):
                at = data.draw(st.integers(0, len(crafted) - 1))
                how = data.draw(st.sampled_from(["value"] * 4 + ["drop", "twice", "swap"]))
                if how == "value":
                    crafted[at] = crafted_part(data, crafted[at])
                elif how == "drop":
                    del crafted[at]
                elif how == "twice":
                    crafted.insert(at, crafted[at])
                else:
                    other = data.draw(st.integers(0, len(crafted) - 1))
                    crafted[at], crafted[other] = crafted[other], crafted[at]
            write(file, DocumentFile(case.file).head, crafted)
    except (ValueError, TypeError, OverflowError, AttributeError, IndexError, struct.error):
        return  # no file holds such a value
    except MemstoreError:
        return
    imported(case.store, file)


@fuzzed
@given(data=st.data())
def test_damaged_export_is_refused(case: Case, tmp_path: Path, data: st.DataObject) -> None:
    whole = case.file.read_bytes()
    (tmp_path / "file").write_bytes(data.draw(damaged(whole).filter(lambda bad: bad != whole)))
    assert not imported(case.store, tmp_path / "file")


def test_export_with_a_byte_after_its_end_is_refused(case: Case, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(case.file.read_bytes() + b"\0")
    assert not imported(case.store, tmp_path / "file")


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    signature = replace(SIGNATURE, architecture={"vocab_size": 1000})
    with MemoryStore.create(tmp_path / "memory", signature) as store:
        ingest(store, "book", CHUNK)  # with tokens up to 2,000
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("memstore.share.contents.PartOrder", Lenient)
            export_document(store, "book", tmp_path / "file")
        store.forget("book")
        with pytest.raises(InvalidInput, match="vocabulary"):
            import_document(store, tmp_path / "file")


def test_stored_numbers_that_are_not_finite_are_refused(store: MemoryStore, tmp_path: Path) -> None:
    ingest(store, "book", CHUNK)
    export_document(store, "book", tmp_path / "file")
    exported = DocumentFile(tmp_path / "file")
    parts = [*exported.parts()]
    store.forget("book")
    at, record = next((at, part) for at, part in enumerate(parts) if isinstance(part, Record))
    numbers = np.full((HEADS, 2, BLOCK, DIM), NAN, "<f2").tobytes()
    parts[at] = record._replace(data=resigned(record.data[: -len(numbers)] + numbers))
    with pytest.raises(InvalidInput, match="not finite"):
        import_document(store, write(tmp_path / "other", exported.head, parts))


@pytest.mark.parametrize("part", [0, 1, 2])
def test_numbers_of_a_model_that_are_not_finite_are_refused(store: MemoryStore, part: int) -> None:
    for number in (NAN, float("inf")):
        with store.write_document("new", source_hash="x", settings=SETTINGS) as writer:
            layers, _ = chunk(1, 0, CHUNK)
            layers[2][part].view(-1)[-1] = number
            with pytest.raises(InvalidInput, match=r"layer 2.*not finite"):
                writer.add_chunk(token_ids(1, 0, CHUNK), 0, layers)
    assert store.document("new").tokens == 0
    ingest(store, "other", 20)


# Rows


def row_of(packed: bytes) -> Document:
    return Document.decode(unpack(packed, dict[str, Any]) | {"id": 1})


@fuzzed
@given(data=st.data())
def test_crafted_row_is_refused_or_a_document(store: MemoryStore, data: st.DataObject) -> None:
    row = asdict(store.document("kept"))
    path = data.draw(st.sampled_from([place for place in places(row) if place != ("id",)]))
    crafted = changed(row, path, data.draw(st.sampled_from(WRONG)))
    try:
        document = row_of(msgpack.packb(crafted))
    except ValueError as error:
        assert str(error)
        return
    json.dumps(asdict(document), allow_nan=False, default=bytes.hex)
    assert document.name and document.settings.chunk_blocks >= 1
    assert row_of(msgpack.packb(asdict(document))) == document


def test_repair_names_and_drops_an_unreadable_row(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    with MemoryStore.create(path, SIGNATURE) as store:
        ingest(store, "kept", 20, text=2)
        row = asdict(ingest(store, "book", 20))
    catalog = Catalog.open(path)
    packed = msgpack.packb({**row, "name": []})
    catalog.database.write(lambda txn: txn.put_checked("documents", number_key(row["id"]), packed))
    catalog.close()
    with pytest.raises(CorruptMemory, match=r"document 2.*repair"), MemoryStore.open(path) as store:
        store.documents()
    assert not verify_memory(path).clean
    verify_memory(path, repair=True)
    with MemoryStore.open(path) as store:
        assert [document.name for document in store.documents()] == ["kept"]


# Names


def test_invalid_document_names_are_refused(store: MemoryStore) -> None:
    for name in ("\udcff", "", "a\0b", "x" * 5000):
        with pytest.raises(InvalidInput):
            ingest(store, name, 20)
    assert [row.name for row in store.documents()] == ["kept"]
