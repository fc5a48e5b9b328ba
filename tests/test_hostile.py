"""Files that somebody made to do harm, with right checksums: each is refused by name with nothing
left behind, or accepted and harmless.
"""

import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic_documents import BLOCK, CHUNK, DIM, HEADS, SIGNATURE, ingest, is_whole, stored
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from memstore.block import BlockKey
from memstore.disk.document import Document
from memstore.errors import CorruptMemory, InvalidInput, MemstoreError
from memstore.store.memory_store import MemoryStore

EXAMPLES = int(os.environ.get("MEMSTORE_HOSTILE", "250"))  # of each fuzzer
fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="MEMSTORE_HOSTILE" not in os.environ,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

NAN = float("nan")
DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
WRONG = [
    None, True, False, -1, 0, 1, 2, 3, 255, 256, 70_000, 2**31, 2**40, 2**62, 2**64 - 1, -(2**63),
    0.5, NAN, float("inf"), -0.0, 1e300, "", "x", "ready", "importing", "\0", "\x1b[2J", "x" * 9000,
    b"", b"x", b"\xff" * 16, b"\0" * 64, [], [0], [[]], [1, 1], [NAN], {}, {"a": NAN}, {"a": [[1]]},
    {1: 2}, DEEP,
]  # fmt: skip
Frames = list[tuple[str, Any]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MemoryStore]:
    with MemoryStore.create(tmp_path / "memory", SIGNATURE, codec="raw") as store:
        ingest(store, "kept", 20, text=2)
        yield store


@pytest.fixture
def frames(tmp_path: Path) -> Frames:
    """Those of an export of five chunks and a short block, appended to once."""
    with MemoryStore.create(tmp_path / "from", SIGNATURE) as store:
        ingest(store, "book", 4 * CHUNK + 5)
        ingest(store, "book", 5 * CHUNK + 2, mode="append")
        store.export_document("book", tmp_path / "export")
    packed = msgpack.Unpacker((tmp_path / "export").open("rb"))
    return [(kind, msgpack.unpackb(payload)) for kind, payload, _ in packed]


def write(file: Path, frames: Frames) -> Path:
    """A file of these frames with right checksums; its end counts them."""
    with file.open("wb") as out:
        for number, (kind, value) in enumerate(frames):
            if kind == "end" and value is not None:
                value = number + 1
            payload = value if kind == "bytes" else msgpack.packb(value)
            digest = xxh3_64_intdigest(payload, xxh3_64_intdigest(kind.encode(), number))
            out.write(msgpack.packb([kind, payload, digest]))
    return file


def resigned(record: bytes) -> bytes:
    """A record with right checksums of its heads and of its header, as far as it has these."""
    sizes_at, each = 20 + 16 + 16 + 6, 4
    digests_at = sizes_at + each * HEADS
    end = digests_at + 8 * HEADS
    sizes = struct.unpack_from(f"<{HEADS}I", record, sizes_at)
    digests, at = b"", end + 8
    for size in sizes:
        digests += xxh3_64_digest(record[at : at + size])
        at += size
    header = record[:digests_at] + digests
    return header + xxh3_64_digest(header) + record[end + 8 :]


def use(store: MemoryStore, document: Document, scratch: Path) -> None:
    """Every verb, on a document that was accepted."""
    assert is_whole(store.path)
    rows = [asdict(row) for row in store.documents()]
    json.dumps(rows, allow_nan=False, default=bytes.hex)
    store.stats()
    assert document.blocks and len(store.tokens(document.id).ids) == document.tokens
    q = torch.ones(HEADS, 1, DIM)
    for layer in SIGNATURE.memory_layers:
        scope = [(document.id, 0, document.blocks)]
        hits = store.search_landmarks(layer, q, scope, 2)
        assert torch.isfinite(hits.scores).all()
        for block in range(document.blocks):
            with store.lease([BlockKey(document.id, layer, block, 0)]) as held:
                assert torch.isfinite(held.k[held.slots]).all()
                assert torch.isfinite(held.v[held.slots]).all()
    store.export_document(document.name, scratch / "again")
    if document.settings.chunk_blocks == 4 and document.settings.top_k == 2:
        try:
            appended = ingest(store, document.name, document.tokens + 9, mode="append")
        except MemstoreError:
            pass  # of other settings
        else:
            assert appended.tokens == document.tokens + 9
    assert is_whole(store.path)
    store.forget(document.name)


def refused_or_harmless(store: MemoryStore, file: Path) -> bool:
    """Whether it was accepted."""
    assert store.path is not None
    before, files = stored(store.path), sorted(store.path.iterdir())
    try:
        document = store.import_document(file)
    except InvalidInput:
        assert stored(store.path) == before and sorted(store.path.iterdir()) == files
        return False
    except MemstoreError as error:  # other models', newer
        assert type(error).__name__ in ("WrongModel", "NewerFormat", "DocumentExists"), error
        assert stored(store.path) == before
        return False
    use(store, document, file.parent)
    assert [row.name for row in store.documents()] == ["kept"]
    return True


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every part of a value."""
    yield path
    if isinstance(value, dict | list):
        keys = value if isinstance(value, dict) else range(len(value))
        for key in keys:
            yield from places(value[key], (*path, key))


def changed(value: Any, path: tuple[Any, ...], to: Any) -> Any:
    if not path:
        return to
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:], to)
    return copy


def test_an_export_is_unchanged_by_being_taken_apart(store, frames, tmp_path):
    assert refused_or_harmless(store, write(tmp_path / "file", frames))


def of_head(*path: Any) -> Callable[[Frames, Any], Frames]:
    return lambda frames, to: [("head", changed(frames[0][1], path, to)), *frames[1:]]


def of_first(kind: str, place: int) -> Callable[[Frames, Any], Frames]:
    def change(frames: Frames, to: Any) -> Frames:
        at = next(at for at, frame in enumerate(frames) if frame[0] == kind)
        value = changed(frames[at][1], (place,), to)
        return [*frames[:at], (kind, value), *frames[at + 1 :]]

    return change


PINNED = [
    (of_head("document", "name"), []),
    (of_head("document", "name"), ""),
    (of_head("document", "created"), NAN),
    (of_head("document", "created"), "today"),
    (of_head("document", "settings"), {}),
    (of_head("document", "settings"), None),
    (of_head("document", "settings", "chunk_blocks"), 0),
    (of_head("document", "metadata"), [1]),
    (of_head("document", "metadata"), {"a": DEEP}),
    (of_head("document", "layers"), [1]),
    (of_head("document", "layers"), [0, 1, 2, 3]),
    (of_head("document", "writes"), []),
    (of_head("document", "blocks"), 2**32 - 1),
    (of_head("document", "state"), "ingesting"),
    (of_head("signature", "num_layers"), 2**62),
    (of_head("signature", "architecture"), DEEP),
    (of_head("format"), "2"),
    (of_first("tokens", 0), 1),
    (of_first("tokens", 2), b"abc"),
    (of_first("landmarks", 2), np.full((22, HEADS, DIM), NAN, "<f2").tobytes()),
    (of_first("landmarks", 3), 2),
    (of_first("record", 2), b""),
]


@pytest.mark.parametrize("number", range(len(PINNED)))
def test_an_export_that_no_memory_could_use_is_refused(store, frames, tmp_path, number):
    change, to = PINNED[number]
    assert not refused_or_harmless(store, write(tmp_path / "file", change(frames, to)))


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path):
    signature = replace(SIGNATURE, architecture={"vocab_size": 1000})
    with MemoryStore.create(tmp_path / "memory", signature) as store:
        ingest(store, "book", CHUNK)  # with tokens up to 2,000
        store.export_document("book", tmp_path / "file")
        store.forget("book")
        with pytest.raises(InvalidInput, match="vocabulary"):
            store.import_document(tmp_path / "file")


def test_numbers_that_are_not_finite_and_lengths_that_no_block_has_are_refused(
    store, frames, tmp_path
):
    at = next(at for at, frame in enumerate(frames) if frame[0] == "record")
    block, layer, record = frames[at][1]
    for place, value in ((16, struct.pack("<I", 0)), (16, struct.pack("<I", BLOCK + 1))):
        new = resigned(record[:place] + value + record[place + len(value) :])
        file = write(
            tmp_path / "file", [*frames[:at], ("record", [block, layer, new]), *frames[at + 1 :]]
        )
        assert not refused_or_harmless(store, file)
    header = len(record) - sum(struct.unpack_from(f"<{HEADS}I", record, 58))
    payload = np.full((HEADS, 2, BLOCK, DIM), NAN, "<f2").tobytes()
    raw = bytearray(record[:header])
    raw[3] = 0  # codec raw
    struct.pack_into(f"<{HEADS}I", raw, 58, *[len(payload) // HEADS] * HEADS)
    new = resigned(bytes(raw) + payload)
    file = write(
        tmp_path / "file", [*frames[:at], ("record", [block, layer, new]), *frames[at + 1 :]]
    )
    with pytest.raises(InvalidInput, match="not finite"):
        store.import_document(file)


@fuzzed
@given(data=st.data())
def test_a_crafted_export_is_refused_or_harmless(store, frames, tmp_path, data):
    crafted = list(frames)
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.sampled_from([0, 0, 0, *range(len(crafted))]))
        kind, value = crafted[at]
        how = data.draw(
            st.sampled_from(["value", "value", "value", "drop", "twice", "swap", "kind"])
        )
        if how == "value":
            if kind == "record" and isinstance(value, list) and data.draw(st.booleans()):
                record = bytearray(value[2])
                place = data.draw(st.integers(0, len(record) - 1))
                record[place] = data.draw(st.integers(0, 255))
                crafted[at] = kind, [*value[:2], resigned(bytes(record))]
            else:
                path = data.draw(st.sampled_from(list(places(value))))
                crafted[at] = kind, changed(value, path, data.draw(st.sampled_from(WRONG)))
        elif how == "drop":
            del crafted[at]
        elif how == "twice":
            crafted.insert(at, crafted[at])
        elif how == "swap":
            other = data.draw(st.integers(0, len(crafted) - 1))
            crafted[at], crafted[other] = crafted[other], crafted[at]
        else:
            crafted[at] = (
                data.draw(st.sampled_from(["head", "tokens", "record", "end", "?"])),
                value,
            )
    refused_or_harmless(store, write(tmp_path / "file", crafted))


@fuzzed
@given(data=st.data())
def test_a_crafted_row_is_refused_or_a_document(store, data):
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


def test_a_row_that_is_not_understood_is_named_and_dropped_by_a_repair(tmp_path):
    from memstore.disk.catalog import Catalog
    from memstore.disk.keys import document_key
    from memstore.store.verify import verify_memory

    path = tmp_path / "memory"
    with MemoryStore.create(path, SIGNATURE) as store:
        ingest(store, "kept", 20, text=2)
        row = asdict(ingest(store, "book", 20))
    catalog = Catalog.open(path)
    packed = msgpack.packb({**row, "name": []})
    catalog.database.write(
        lambda txn: txn.put_checked("documents", document_key(row["id"]), packed)
    )
    catalog.close()
    with pytest.raises(CorruptMemory, match=r"document 2.*repair"), MemoryStore.open(path) as store:
        store.documents()
    assert not verify_memory(path).clean
    verify_memory(path, repair=True)
    with MemoryStore.open(path) as store:
        assert [document.name for document in store.documents()] == ["kept"]
