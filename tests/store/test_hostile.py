"""Crafted and damaged exports, rows and names: each is refused by a named error with the memory
unchanged, or is a document that every verb can use.

MEMSTORE_HOSTILE (100) sets how many examples each property test tries; `make soak` sets more.
"""

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from memstore.block import BlockKey
from memstore.cli import console
from memstore.disk.format.document import Document
from memstore.disk.format.keys import number_key
from memstore.disk.tables.catalog import Catalog
from memstore.errors import CorruptMemory, InvalidInput, InvalidWeights, MemstoreError
from memstore.model.landmark.checkpoint import load_checkpoint
from memstore.store.memory_store import MemoryStore
from memstore.store.verify.verify_memory import verify_memory
from support import passage_documents, selected_documents
from support.crafted import NAN, WRONG, changed, fuzzed, places
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
from support.tiny_model import save_tiny_model

Frames = list[tuple[str, Any]]


class Case(NamedTuple):
    """A memory to import into, and the frames of an export of a like memory."""

    store: MemoryStore
    frames: Frames

    def __repr__(self) -> str:  # frames fill pages
        return f"Case({self.store.path})"


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
        store.export_document("book", path / "export")
    packed = msgpack.Unpacker((path / "export").open("rb"))
    frames = [(kind, msgpack.unpackb(payload)) for kind, payload, _ in packed]
    with create(request.param, path / "memory") as store:
        other = selected_documents.ingest if store.selector else ingest
        other(store, "kept", 20, text=2)
        yield Case(store, frames)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MemoryStore]:
    with create("chunks", tmp_path / "memory") as store:
        ingest(store, "kept", 20, text=2)
        yield store


def write(file: Path, frames: Frames) -> Path:
    """Write an export of these frames with right checksums and a right count at its end."""
    with file.open("wb") as out:
        for number, (kind, value) in enumerate(frames):
            if kind == "end" and value is not None:
                value = number + 1
            payload = value if kind == "bytes" else msgpack.packb(value)
            digest = xxh3_64_intdigest(payload, xxh3_64_intdigest(kind.encode(), number))
            out.write(msgpack.packb([kind, payload, digest]))
    return file


def resigned(record: bytes) -> bytes:
    """A record with right checksums of its heads and of its header."""
    sizes_at = 20 + 16 + 16 + 6
    digests_at = sizes_at + 4 * HEADS
    end = digests_at + 8 * HEADS
    digests, at = b"", end + 8
    for size in struct.unpack_from(f"<{HEADS}I", record, sizes_at):
        digests += xxh3_64_digest(record[at : at + size])
        at += size
    header = record[:digests_at] + digests
    return header + xxh3_64_digest(header) + record[end + 8 :]


def contents(store: MemoryStore) -> tuple[object, ...]:
    assert store.path is not None
    return stored(store.path), selected(store.path), sorted(store.path.iterdir())


def imported(store: MemoryStore, file: Path) -> bool:
    """Import a file: refused with the memory unchanged, or used by every verb and forgotten."""
    assert store.path is not None
    before = contents(store)
    try:
        document = store.import_document(file)
    except MemstoreError as error:
        assert str(error) and contents(store) == before
        return False
    assert is_whole(store.path)
    json.dumps([asdict(row) for row in store.documents()], allow_nan=False, default=bytes.hex)
    assert document.blocks and len(store.tokens(document.id).ids) == document.tokens
    scope = [(document.id, 0, document.blocks)]
    if store.selector:
        assert torch.isfinite(store.retrieval.token_maxima(QUESTION, scope)).all()
        assert torch.isfinite(store.retrieval.word_scores({7: 1.0, 1001: 2.0}, scope)).all()
    else:
        for layer in SIGNATURE.memory_layers:
            hits = store.retrieval.search_landmarks(layer, torch.ones(HEADS, 1, DIM), scope, 2)
            assert torch.isfinite(hits.scores).all()
            for block in range(document.blocks):
                with store.lease([BlockKey(document.id, layer, block, 0)]) as held:
                    assert torch.isfinite(held.k[held.slots]).all()
                    assert torch.isfinite(held.v[held.slots]).all()
    store.export_document(document.name, file.with_name("again"))
    store.forget(document.name)
    assert contents(store) == before
    return True


def test_unchanged_export_is_imported(case: Case, tmp_path: Path) -> None:
    assert imported(case.store, write(tmp_path / "file", case.frames))


def crafted_value(data: st.DataObject, kind: str, value: Any) -> Any:
    """A frame's value with one of its parts, or a part of what it packs, replaced."""
    wrong = data.draw(st.sampled_from(WRONG))
    if kind == "record" and data.draw(st.booleans()):
        record = bytearray(value[2])
        record[data.draw(st.integers(0, len(record) - 1))] = data.draw(st.integers(0, 255))
        return [*value[:2], resigned(bytes(record))]
    if kind in ("tokens", "run") and data.draw(st.booleans()):
        packed = msgpack.Unpacker()
        packed.feed(value[-1])
        inner = packed.unpack()
        rest = value[-1][packed.tell() :]
        inner = changed(inner, data.draw(st.sampled_from(list(places(inner)))), wrong)
        rest = data.draw(st.sampled_from([rest, rest[:-1], rest + b"\0", b""]))
        return [*value[:-1], msgpack.packb(inner) + rest]
    return changed(value, data.draw(st.sampled_from(list(places(value)))), wrong)


@fuzzed
@given(data=st.data())
def test_crafted_export_is_refused_or_usable(
    case: Case, tmp_path: Path, data: st.DataObject
) -> None:
    crafted = list(case.frames)
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.sampled_from([0, 0, 0, *range(len(crafted))]))
        kind, value = crafted[at]
        how = data.draw(st.sampled_from(["value"] * 4 + ["drop", "twice", "swap", "kind"]))
        if how == "value":
            if (kind, value) in case.frames:  # a part that was changed before may not unpack
                crafted[at] = kind, crafted_value(data, kind, value)
        elif how == "drop":
            del crafted[at]
        elif how == "twice":
            crafted.insert(at, crafted[at])
        elif how == "swap":
            other = data.draw(st.integers(0, len(crafted) - 1))
            crafted[at], crafted[other] = crafted[other], crafted[at]
        else:
            kinds = ["head", "tokens", "record", "run", "end", "?"]
            crafted[at] = data.draw(st.sampled_from(kinds)), value
    imported(case.store, write(tmp_path / "file", crafted))


@fuzzed
@given(data=st.data())
def test_damaged_export_is_refused(case: Case, tmp_path: Path, data: st.DataObject) -> None:
    whole = write(tmp_path / "file", case.frames).read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytes([whole[at] ^ 1 << data.draw(st.integers(0, 7))])
    damaged = [whole[:at] + flipped + whole[at + 1 :], whole[:at]]
    (tmp_path / "file").write_bytes(data.draw(st.sampled_from(damaged)))
    assert not imported(case.store, tmp_path / "file")


def test_export_with_a_byte_after_its_end_is_refused(case: Case, tmp_path: Path) -> None:
    whole = write(tmp_path / "file", case.frames).read_bytes()
    for stray in (b"\x93", b"\xc4", b"x", b"\0", b"\xc1"):  # a frame begun, a value, no msgpack
        (tmp_path / "file").write_bytes(whole + stray)
        assert not imported(case.store, tmp_path / "file")


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    signature = replace(SIGNATURE, architecture={"vocab_size": 1000})
    with MemoryStore.create(tmp_path / "memory", signature) as store:
        ingest(store, "book", CHUNK)  # with tokens up to 2,000
        store.export_document("book", tmp_path / "file")
        store.forget("book")
        with pytest.raises(InvalidInput, match="vocabulary"):
            store.import_document(tmp_path / "file")


def test_stored_numbers_that_are_not_finite_are_refused(store: MemoryStore, tmp_path: Path) -> None:
    ingest(store, "book", CHUNK)
    store.export_document("book", tmp_path / "file")
    packed = msgpack.Unpacker((tmp_path / "file").open("rb"))
    frames = [(kind, msgpack.unpackb(payload)) for kind, payload, _ in packed]
    store.forget("book")
    at = next(at for at, frame in enumerate(frames) if frame[0] == "record")
    block, layer, record = frames[at][1]
    numbers = np.full((HEADS, 2, BLOCK, DIM), NAN, "<f2").tobytes()
    frames[at] = "record", [block, layer, resigned(record[: -len(numbers)] + numbers)]
    with pytest.raises(InvalidInput, match="not finite"):
        store.import_document(write(tmp_path / "file", frames))


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


@fuzzed
@given(data=st.data())
def test_crafted_row_is_refused_or_a_document(store: MemoryStore, data: st.DataObject) -> None:
    row = asdict(store.document("kept"))
    path = data.draw(st.sampled_from([place for place in places(row) if place != ("id",)]))
    crafted = changed(row, path, data.draw(st.sampled_from(WRONG)))
    try:
        document = Document.unpack(1, msgpack.packb(crafted))
    except ValueError as error:
        assert str(error)
        return
    json.dumps(asdict(document), allow_nan=False, default=bytes.hex)
    assert document.name and document.settings.chunk_blocks >= 1
    assert Document.unpack(1, msgpack.packb(asdict(document))) == document


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


# Weights


@pytest.mark.parametrize(
    "change",
    [
        lambda weights, name: {**weights, name: weights[name][:1].clone()},
        lambda weights, name: {**weights, name: weights[name].int()},
        lambda weights, name: {**weights, name: weights[name] * NAN},
        lambda weights, name: {**weights, "more": weights[name].clone()},
        lambda weights, name: {key: value for key, value in weights.items() if key != name},
    ],
    ids=["shape", "dtype", "not finite", "additional", "missing"],
)
def test_weights_that_contradict_the_config_are_refused(
    tmp_path: Path, change: Callable[..., dict[str, torch.Tensor]]
) -> None:
    model = save_tiny_model(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    save_file(change(weights, sorted(weights)[0]), model / "model.safetensors")
    with pytest.raises(InvalidWeights):
        load_checkpoint(model)


# Text that reaches the terminal or names a document


def test_control_characters_are_escaped_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "a\x1b[2J\x07\x9b1m\u202eb\udc80\r\x7f"
    console.say(hostile)
    console.note(hostile)
    console.emit({"name": hostile})
    source = {"weight": 1.0, "document": hostile, "span": (0, 1), "reads": []}
    console.print_answer(
        {
            "text": hostile,
            "sources": [{**source, "text": hostile, "place": hostile}],
            "lookups": {"done": 1, "skipped": 0},
            "tiers": {},
            "seconds": 0.0,
        },
        streamed=False,
    )
    print(console.columns([("name",), (hostile + "\n",)]))
    shown = "".join(capsys.readouterr())
    assert all(letter.isprintable() or letter == "\n" for letter in shown), ascii(shown)
    assert r"\u001b[2J" in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("{")]
    assert json.loads(line) == {"name": hostile}


def test_invalid_document_names_are_refused(store: MemoryStore) -> None:
    for name in ("\udcff", "", "a\0b", "x" * 5000):
        with pytest.raises(InvalidInput):
            ingest(store, name, 20)
    assert [row.name for row in store.documents()] == ["kept"]
