"""Files that somebody made to do harm, with right checksums: each is refused by name with nothing
left behind, or accepted and harmless.
"""

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from xxhash import xxh3_64_digest

from memstore.block import BlockKey
from memstore.cli.terminal import answers, console
from memstore.disk.format.document import Document
from memstore.disk.format.runs import KeyRun, RunForm
from memstore.errors import (
    CorruptMemory,
    InvalidConfig,
    InvalidInput,
    InvalidWeights,
    MemstoreError,
)
from memstore.index.faiss import faiss_files
from memstore.index.index_file import Unusable
from memstore.model.landmark.checkpoint import load_checkpoint, signature_of
from memstore.store.memory_store import MemoryStore
from memstore.tiers.lookup_trace import read_trace
from memstore.tiers.recorded import Recorded
from support.crafted import DEEP, NAN, WRONG, Frames, changed, fuzzed, places, write
from support.index_engines import build, filled, queries
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


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MemoryStore]:
    with MemoryStore.create(tmp_path / "memory", SIGNATURE, codec="raw") as store:
        ingest(store, "kept", 20, text=2)
        yield store


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> Frames:
    """Those of an export of five chunks and a short block, appended to once."""
    path = tmp_path_factory.mktemp("frames")
    with MemoryStore.create(path / "from", SIGNATURE) as store:
        ingest(store, "book", 4 * CHUNK + 5)
        ingest(store, "book", 5 * CHUNK + 2, mode="append")
        store.export_document("book", path / "export")
    packed = msgpack.Unpacker((path / "export").open("rb"))
    return [(kind, msgpack.unpackb(payload)) for kind, payload, _ in packed]


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
        hits = store.retrieval.search_landmarks(layer, q, scope, 2)
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
        assert type(error).__name__ in (
            "WrongModel",
            "NewerFormat",
            "OlderFormat",
            "DocumentExists",
        ), error
        assert stored(store.path) == before
        return False
    use(store, document, file.parent)
    assert [row.name for row in store.documents()] == ["kept"]
    return True


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


NOT_FINITE = np.full((22, HEADS, DIM), NAN, "<f2").view("<i2")
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
    (of_first("tokens", 1), b"abc"),
    (of_first("run", 0), 7),
    (of_first("run", 2), b""),
    (of_first("run", 2), RunForm(SIGNATURE.geometry).encode(KeyRun(0, NOT_FINITE))),
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


@pytest.mark.parametrize("part", [0, 1, 2])
def test_what_a_model_gives_that_is_not_finite_is_refused_before_it_is_stored(store, part):
    made = {"source_hash": "x", "settings": SETTINGS}
    for number in (NAN, float("inf")):
        with store.write_document("new", **made) as writer:
            layers, _ = chunk(1, 0, CHUNK)
            layers[2][part].view(-1)[-1] = number
            with pytest.raises(InvalidInput, match=r"layer 2.*not finite"):
                writer.add_chunk(token_ids(1, 0, CHUNK), 0, layers)
    assert store.document("new").tokens == 0
    ingest(store, "other", 20)


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
            # a record that an earlier change has spoiled cannot be signed anew
            if kind == "record" and (kind, value) in frames and data.draw(st.booleans()):
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
    from memstore.disk.format.keys import document_key
    from memstore.disk.tables.catalog import Catalog
    from memstore.store.verify.verify_memory import verify_memory

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


# Model directories


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def loads(directory: Path) -> bool:
    """Whether it was accepted; refused with a name otherwise."""
    try:
        transformer, tokenizer = load_checkpoint(directory)
    except (InvalidWeights, InvalidConfig):
        return False
    text = "The lantern, 42 é\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and max(ids) < transformer.config.landmark_id
    hash(signature_of(transformer, tokenizer).digest)
    return True


def with_file(model: Path, to: Path, name: str, content: bytes) -> Path:
    """The model but for one file; others that are there already stay."""
    to.mkdir(exist_ok=True)
    for file in model.iterdir():
        if file.name == name:
            (to / name).write_bytes(content)
        elif not (to / file.name).exists():
            shutil.copyfile(file, to / file.name)
    return to


SIZES = ["num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "mlp_size",
         "block_size", "vocab_size", "top_k", "chunk_blocks"]  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("to", [0, -1, 0.5, True, "2", None, 2**31, 2**62, 2**70, [], {}])
def test_a_size_that_no_model_has_is_refused(model, tmp_path, name, to):
    config = json.loads((model / "config.json").read_text())
    content = json.dumps({**config, name: to}).encode()
    assert not loads(with_file(model, tmp_path / "crafted", "config.json", content))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[" * 5000,
        b'{"a":' * 5000,
        b"\xff",
        b"null",
        b"[]",
        b'{"model": 1}',
        b'{"vocab_size":',
    ],
)
def test_what_is_no_json_object_is_refused(model, tmp_path, name, content):
    assert not loads(with_file(model, tmp_path / "crafted", name, content))


@fuzzed
@given(data=st.data())
def test_a_crafted_config_is_refused_or_a_model(model, tmp_path, data):
    config = json.loads((model / "config.json").read_text())
    path = data.draw(st.sampled_from(list(places(config))))
    to = data.draw(st.sampled_from([value for value in WRONG if type(value) is not bytes]))
    content = json.dumps(changed(config, path, to)).encode()
    loads(with_file(model, tmp_path / "crafted", "config.json", content))


@fuzzed
@given(data=st.data())
def test_a_crafted_tokenizer_is_refused_or_loses_no_text(model, tmp_path, data):
    whole = json.loads((model / "tokenizer.json").read_text())
    vocab, merges = whole["model"]["vocab"], whole["model"]["merges"]
    how = data.draw(st.sampled_from(["whole", "id", "token", "drop", "merge", "options"]))
    token = data.draw(st.sampled_from(sorted(vocab)))
    to = data.draw(st.sampled_from([value for value in WRONG if type(value) is not bytes]))
    if how == "whole":
        path = data.draw(st.sampled_from([(), ("model",), ("model", "vocab"), ("model", "merges")]))
        whole = changed(whole, path, to)
    elif how == "id":
        vocab[token] = to
    elif how == "token":
        vocab[data.draw(st.sampled_from(["", " ", "\0", "é\n", "zzzzzzzz"]))] = vocab.pop(token)
    elif how == "drop":
        del vocab[token]
    elif how == "merge":
        merges[data.draw(st.integers(0, len(merges) - 1))] = to
    else:
        whole |= {
            "truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 0,
                           "direction": "Right"},
            "normalizer": {"type": "Lowercase"},
        }  # fmt: skip
    crafted = with_file(model, tmp_path / "crafted", "tokenizer.json", json.dumps(whole).encode())
    assert loads(crafted) or how != "options"


def test_weights_of_another_shape_or_type_than_the_config_says_are_not_read(model, tmp_path):
    weights = load_file(model / "model.safetensors")
    name = sorted(weights)[0]
    for changed_weights in (
        {**weights, name: weights[name][:1].clone()},
        {**weights, name: weights[name].int()},
        {**weights, "more": weights[name].clone()},
        {key: value for key, value in weights.items() if key != name},
        {},
    ):
        crafted = with_file(model, tmp_path / "crafted", "", b"")
        save_file(changed_weights, crafted / "model.safetensors")
        assert not loads(crafted)
    data = (model / "model.safetensors").read_bytes()
    for content in (b"", data[:100], b"\xff" * 64, data[:-1], b"\0" * 8 + data[8:]):
        assert not loads(with_file(model, tmp_path / "crafted", "model.safetensors", content))


@pytest.mark.parametrize("number", [NAN, float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(model, tmp_path, number):
    weights = load_file(model / "model.safetensors")
    for name in (sorted(weights)[0], sorted(weights)[-1]):
        wrong = weights[name].clone()
        wrong.view(-1)[-1] = number
        crafted = with_file(model, tmp_path / "crafted", "", b"")
        save_file({**weights, name: wrong}, crafted / "model.safetensors")
        with pytest.raises(InvalidWeights, match=f"{name} holds numbers that are not finite"):
            load_checkpoint(crafted)


def test_weights_that_overflow_in_a_smaller_type_are_refused(model, tmp_path):
    weights = load_file(model / "model.safetensors")
    name = sorted(weights)[0]
    crafted = with_file(model, tmp_path / "crafted", "", b"")
    large = weights[name].clone()
    large.view(-1)[0] = 1e30
    save_file({**weights, name: large}, crafted / "model.safetensors")
    with pytest.raises(InvalidWeights, match="float16"):
        load_checkpoint(crafted, torch.float16)


HEADER = struct.Struct("<Q")


@fuzzed
@given(data=st.data())
def test_a_crafted_header_of_weights_is_refused_or_a_model(model, tmp_path, data):
    content = (model / "model.safetensors").read_bytes()
    (size,) = HEADER.unpack_from(content)
    header, numbers = json.loads(content[8 : 8 + size]), content[8 + size :]
    for _ in range(data.draw(st.integers(1, 2))):
        how = data.draw(st.sampled_from(["value", "value", "overlap", "type", "size", "more"]))
        if how == "value":
            path = data.draw(st.sampled_from(list(places(header))))
            to = data.draw(st.sampled_from([value for value in WRONG if type(value) is not bytes]))
            header = changed(header, path, to)
            if not isinstance(header, dict):
                break
        names = [name for name, part in header.items() if isinstance(part, dict)]
        if how in ("overlap", "type") and names:
            one, other = (header[data.draw(st.sampled_from(names))] for _ in range(2))
            key = "data_offsets" if how == "overlap" else "dtype"
            if key in other:
                one[key] = (
                    other[key]
                    if how == "overlap"
                    else data.draw(
                        st.sampled_from(
                            ["F16", "BF16", "F64", "I32", "U8", "BOOL", "F8_E4M3", "F4"]
                        )
                    )
                )
        elif how == "size":
            numbers = numbers[: data.draw(st.integers(0, len(numbers)))]
        elif how == "more":
            numbers += bytes(data.draw(st.integers(0, 64)))
    packed = json.dumps(header).encode()
    crafted = HEADER.pack(len(packed)) + packed + numbers
    loads(with_file(model, tmp_path / "crafted", "model.safetensors", crafted))


# Traces


@fuzzed
@given(data=st.data())
def test_a_crafted_trace_is_refused_or_read(tmp_path, data):
    entries: list[Any] = [
        {"format": 1, "unit_bytes": 64},
        [0, 10, 1, [1, 1], [0, 1], [0, 1], [1]],
        [1, 20, 2, [1], [3], [0], []],
    ]
    path = data.draw(st.sampled_from([place for place in places(entries) if place]))
    entries = changed(entries, path, data.draw(st.sampled_from(WRONG)))
    packed = b"".join(msgpack.packb(entry) for entry in entries)
    (tmp_path / "trace").write_bytes(zstandard.compress(packed))
    try:
        found = list(read_trace(tmp_path / "trace"))
        Recorded.load(tmp_path / "trace").reuse()
    except InvalidInput:
        return
    for entry in found:
        assert entry.units and all(0 <= place < len(entry.units) for place in entry.missed)


# Index files


@pytest.fixture(scope="module")
def index_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of an index's layer 0."""
    index, _ = filled("faiss-ivf-sq8")
    build(index)
    directory = tmp_path_factory.mktemp("index")
    faiss_files.write_engines(directory, index, 0)
    return faiss_files.file_of(directory, 0)


def index_parts(content: bytes) -> tuple[bytes, dict[str, Any], bytes]:
    """Magic, header and payload of an index file."""
    at = content.index(b"\n") + 1
    end = at + 16 + int.from_bytes(content[at : at + 8], "little")
    return content[:at], msgpack.unpackb(content[at + 16 : end]), content[end:]


def takes(directory: Path, header: Any, payload: bytes, magic: bytes) -> bool:
    """Whether a file with right checksums is taken; searching must then work."""
    if isinstance(header, dict) and "payload" in header:
        header = {**header, "payload": xxh3_64_digest(payload)}
    packed = msgpack.packb(header)
    size = len(packed).to_bytes(8, "little")
    content = magic + size + xxh3_64_digest(packed) + packed + payload
    faiss_files.file_of(directory, 0).write_bytes(content)
    index, scope = filled("faiss-ivf-sq8")
    try:
        index.install(0, faiss_files.read_engines(directory, index, 0))
    except Unusable:
        return False
    found = index.search(0, queries(3), scope, 4)
    assert ((found.candidates >= -1) & (found.candidates < sum(end for *_, end in scope))).all()
    return True


@fuzzed
@given(data=st.data())
def test_a_crafted_index_file_is_unusable_or_harmless(index_file, tmp_path, data):
    magic, header, payload = index_parts(index_file.read_bytes())
    assert "payload" in header
    path = data.draw(st.sampled_from(list(places(header))))
    to = data.draw(st.sampled_from(WRONG))
    takes(tmp_path, changed(header, path, to), payload, magic)


def test_an_index_file_whose_engines_hold_other_rows_is_unusable(index_file, tmp_path):
    magic, header, payload = index_parts(index_file.read_bytes())
    assert takes(tmp_path, header, payload, magic)
    wrong = {
        "end": header["end"] - 1,
        "metrics": header["metrics"][:1],
        "calibrations": [],
        "lengths": [],
        "runs": [[1, 0, header["end"], 1, b""]],
    }
    for name, to in wrong.items():
        assert not takes(tmp_path, {**header, name: to}, payload, magic)
    last = len(payload) - 8  # a row's number
    assert not takes(tmp_path, header, payload[:last] + b"\xff\xff\xff\x7f" + b"\0" * 4, magic)
    for cut in (b"", payload[:4], b"ilod" + payload[4:]):
        sizes = [len(cut), *([0] * (len(header["lengths"]) - 1))]
        assert not takes(tmp_path, {**header, "lengths": sizes}, cut, magic)


# What reaches the terminal


def test_control_characters_are_shown_and_never_sent(capsys):
    hostile = "a\x1b[2J\x07\x9b1m\u202eb\udc80\r\x7f"
    console.say(hostile)
    console.note(hostile)
    console.emit({"name": hostile})
    answers.print_answer(
        {
            "text": hostile,
            "sources": [
                {
                    "weight": 1.0,
                    "document": hostile,
                    "span": (0, 1),
                    "reads": [],
                    "text": hostile,
                    "place": hostile,
                }
            ],
            "lookups": {"done": 1, "skipped": 0},
            "tiers": {},
            "seconds": 0.0,
        },
        streamed=False,
    )
    print(console.columns([("name",), (hostile + "\n",)]))
    told = "".join(capsys.readouterr())
    assert all(letter.isprintable() or letter == "\n" for letter in told), ascii(told)
    assert r"\u001b[2J" in told
    (line,) = [line for line in told.splitlines() if line.startswith("{")]
    assert json.loads(line) == {"name": hostile}


def test_a_name_that_is_not_utf8_is_refused(store):
    for name in ("\udcff", "", "a\0b", "x" * 5000):
        with pytest.raises(InvalidInput):
            ingest(store, name, 20)
    assert [row.name for row in store.documents()] == ["kept"]
