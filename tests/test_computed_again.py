"""Keys and values that are not stored, or damaged, are computed when a question needs them: what is
read is the same.
"""

import logging
import os
import shutil
from pathlib import Path
from random import Random

import pytest
import torch
from tiny_decoder import decoder, tokenizer
from typer.testing import CliRunner

from memstore.disk.keys import record_range
from memstore.errors import BlocksUnavailable, InvalidInput
from memstore.store.memory_store import MemoryStore
from memstore.store.verify import verify_memory

pytest.importorskip("transformers")

from memstore import load_model
from memstore.cli.main import app
from memstore.hf.reader import HuggingFaceReader
from memstore.model.adaptation import Adaptation
from memstore.model.chosen import Chosen
from memstore.model.passages import stack
from memstore.model.selector_heads import PointerHeads
from memstore.model.selector_sum import Sum, Words

TEXT = " ".join(
    f"The {colour} {thing} of the {place} has the number {len(colour + thing) * len(place)}."
    for colour in ("red", "grey", "silver", "copper")
    for thing in ("lantern", "barrel", "anchor", "ladder")
    for place in ("harbour", "mill", "chapel", "orchard")
)
FLIPS = int(os.environ.get("MEMSTORE_FLIPS", "40"))
QUESTION = "What number has the copper anchor of the orchard?"


def pointing(reader: HuggingFaceReader) -> Adaptation:
    shape = reader.shape
    heads = PointerHeads(
        [(1, 0)], (shape.num_heads, shape.num_kv_heads, shape.head_dim), reader.rotate
    )
    return Adaptation(Sum([(heads, 1.0), (Words(), 1.0)]), top_k=3)


@pytest.fixture(scope="module")
def reader() -> HuggingFaceReader:
    model = decoder("llama")
    plain = HuggingFaceReader(model, tokenizer(), Adaptation(Words()), kv_dtype=torch.float32)
    return HuggingFaceReader(model, tokenizer(), pointing(plain), kv_dtype=torch.float32)


def create(reader: HuggingFaceReader, path: Path, **options) -> MemoryStore:
    how = {"codec": "raw", **options}
    return MemoryStore.create(path, reader.signature, selector=reader.keeps, **how)


@pytest.fixture
def store(reader, tmp_path):
    with create(reader, tmp_path / "m") as memory:
        reader.ingest(TEXT, memory, name="kept")
        yield memory


def states(reader, store: MemoryStore, name: str, blocks: list[int], **lookup) -> torch.Tensor:
    """Of a question that reads these passages of a document."""
    number = store.document(name).id
    ids, _ = reader.turn_ids(QUESTION, first=True)
    with reader.session(store, [name], top_k=8, **lookup) as session:
        session.read([Chosen(number, block) for block in blocks])
        return session.feed(ids)


@pytest.fixture
def computed(monkeypatch) -> list[int]:
    """How many passages went through the model to be read in."""
    counts: list[int] = []
    encode = stack.encode

    def counting(reader, passages, **how):
        some = list(passages)
        counts.append(len(some))
        return encode(reader, some, **how)

    monkeypatch.setattr(stack, "encode", counting)
    return counts


def spoil(store: MemoryStore, name: str, block: int) -> None:
    """Flip a bit in every record of a passage."""
    catalog = store._on_disk().catalog

    def work(txn) -> None:
        ((number, _),) = catalog.stored_at(txn, [(store.document(name).id, block)])
        for key, value in list(txn.scan("blocks", *record_range(number))):
            data = bytearray(value)
            data[-3] ^= 4
            txn.put("blocks", bytes(key), bytes(data))

    catalog.database.write(work)


def test_the_same_text_is_not_computed_again(reader, store, computed) -> None:
    reader.ingest(TEXT, store, name="copy")
    before = store.stats()["bytes"]
    assert sum(computed) == 0
    changed = TEXT.replace("The grey ladder of the mill has the number 40", "It has changed")
    assert changed != TEXT
    reader.ingest(changed, store, name="copy", mode="replace")
    assert 1 <= sum(computed) <= 4
    assert store.stats()["bytes"] > before
    for name in ("kept", "copy"):
        assert store.document(name).state == "ready"
    assert store.verify().clean
    first, second = (states(reader, store, name, [0, 1]) for name in ("kept", "copy"))
    assert torch.equal(first, second)


def test_an_append_computes_what_is_new(reader, store, computed) -> None:
    reader.ingest(
        " The black door of the house has the number 7.", store, name="kept", mode="append"
    )
    assert 1 <= sum(computed) <= 2


@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize("blocks", [[0], [2, 5, 6]])
def test_what_is_kept_as_text_is_read_as_if_it_were_stored(
    reader, store, tmp_path, blocks, chained
) -> None:
    expected = states(reader, store, "kept", blocks, chained=chained)
    with create(reader, tmp_path / "text") as text:
        document = reader.ingest(TEXT, text, name="text", keep="text")
        assert document.bytes == 0 and text.stats()["passages"]["stored"] == 0
        found = states(reader, text, "text", blocks, chained=chained)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
        assert text.stats()["passages"]["computed"] > 0
        assert text.stats()["passages"]["damaged"] == 0
        asked = [reader.ask(QUESTION, memory, max_new_tokens=4) for memory in (store, text)]
        assert asked[0].tokens == asked[1].tokens
        assert [s.text for s in asked[0].sources] == [s.text for s in asked[1].sources]
        assert text.verify().clean and text.stats()["file_bytes"] < store.stats()["file_bytes"] / 2


def test_text_alone_is_computed_once(reader, tmp_path, computed) -> None:
    with create(reader, tmp_path / "text") as text:
        reader.ingest(TEXT, text, name="text", keep="text")
        first = sum(computed)
        reader.ingest(TEXT, text, name="copy", keep="text")
        assert first and sum(computed) == first
        reader.ingest(TEXT, text, name="whole")  # which stores what the others lack
        assert sum(computed) == 2 * first
        assert text.stats()["passages"]["stored"] == text.document("whole").blocks
        assert text.verify().clean


def test_text_alone_travels(reader, tmp_path) -> None:
    with create(reader, tmp_path / "text") as text:
        reader.ingest(TEXT, text, name="text", keep="text")
        expected = states(reader, text, "text", [1])
        text.export_document("text", tmp_path / "file")
        text.publish(f"file://{tmp_path}/published")
    with create(reader, tmp_path / "other") as other:
        other.import_document(tmp_path / "file")
        assert torch.equal(states(reader, other, "text", [1]), expected)
        assert other.verify().clean
    url = f"file://{tmp_path}/published"
    with MemoryStore.open(url) as away:
        assert torch.equal(states(reader, away, "text", [1]), expected)
        assert away.stats()["passages"]["damaged"] == 0
        assert away.verify().clean


@pytest.mark.parametrize("chained", [True, False])
def test_a_damaged_passage_is_computed_and_said(reader, store, caplog, chained) -> None:
    expected = states(reader, store, "kept", [1, 3], chained=chained)
    spoil(store, "kept", 1)
    with (
        MemoryStore.open(store.path) as opened,
        caplog.at_level(logging.WARNING, logger="memstore"),
    ):
        found = states(reader, opened, "kept", [1, 3], chained=chained)
        assert opened.stats()["passages"]["damaged"] == 1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    assert "1 damaged passages were computed anew" in caplog.text


def test_a_repair_drops_what_is_damaged_of_a_passage_and_no_document(reader, store) -> None:
    reader.ingest(TEXT, store, name="copy")
    expected = states(reader, store, "kept", [1])
    spoil(store, "kept", 1)
    report = verify_memory(store.path)
    assert not report.clean and "passage 1 of document 'kept'" in report.problems[0].what
    report = store.verify(repair=True)
    assert not report.dropped and len(report.problems) == 1 and store.verify().clean
    for name in ("kept", "copy"):
        found = states(reader, store, name, [1])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    assert store.stats()["passages"]["computed"] == 2
    assert store.stats()["passages"]["damaged"] == 0
    stored = store.stats()["passages"]["stored"]
    reader.ingest(TEXT + " More.", store, name="again")  # which stores it again
    assert store.stats()["passages"]["stored"] > stored


def test_verify_says_that_nothing_is_lost(reader, store) -> None:
    spoil(store, "kept", 0)
    path = store.path
    store.close()
    ran = CliRunner().invoke(app, ["verify", "--store", str(path)])
    assert ran.exit_code == 1 and "computed anew" in ran.output
    assert CliRunner().invoke(app, ["verify", "--store", str(path), "--repair"]).exit_code == 0
    assert CliRunner().invoke(app, ["verify", "--store", str(path)]).exit_code == 0


def test_other_models_and_words_are_refused(reader, store, tmp_path) -> None:
    with pytest.raises(InvalidInput, match="kv or text"):
        reader.ingest(TEXT, store, name="other", keep="some")
    model = load_model()
    with (
        MemoryStore.create(tmp_path / "landmarks", model.signature) as memory,
        pytest.raises(InvalidInput, match="leave keep out"),
    ):
        model.ingest(TEXT, memory, name="other", keep="text")
    shutil.rmtree(tmp_path / "landmarks")


@pytest.mark.timeout(3600 if FLIPS > 200 else 300)
def test_whatever_bit_of_a_record_flips_what_is_read_is_right(reader, store) -> None:
    rng, blocks = Random(3), store.document("kept").blocks
    expected = [states(reader, store, "kept", [block]) for block in range(blocks)]
    catalog = store._on_disk().catalog
    path = store.path
    for flip in range(FLIPS):
        block = rng.randrange(blocks)
        with catalog.database.read() as txn:
            ((number, _),) = catalog.stored_at(txn, [(store.document("kept").id, block)])
            records = [(bytes(k), bytes(v)) for k, v in txn.scan("blocks", *record_range(number))]
        key, whole = rng.choice(records)
        data = bytearray(whole)
        at, bit = rng.randrange(len(data)), rng.randrange(8)
        data[at] ^= 1 << bit
        catalog.database.write(lambda txn: txn.put("blocks", key, bytes(data)))  # noqa: B023
        with MemoryStore.open(path, read_only=True, host_budget=1 << 24) as opened:
            found = states(reader, opened, "kept", [block])
            assert opened.stats()["passages"]["damaged"] == 1, (flip, at, bit)
        scale = float(expected[block].abs().max())
        torch.testing.assert_close(found, expected[block], rtol=0, atol=1e-4 * scale)
        catalog.database.write(lambda txn: txn.put("blocks", key, whole))  # noqa: B023
    assert store.verify().clean


def test_an_append_to_text_alone_leaves_a_row_that_can_be_read(reader, store, tmp_path) -> None:
    with create(reader, tmp_path / "text") as text:
        reader.ingest(TEXT, text, name="text", keep="text")
        reader.ingest(TEXT, text, name="whole")  # whose keys and values are the other's, too
        more = " The end of the list."
        document = reader.ingest(more, text, name="text", mode="append", keep="text")
        assert document == text.document("text") and document.bytes > 0
        assert text.verify().clean
    with MemoryStore.open(tmp_path / "text", read_only=True) as opened:
        assert opened.document("text").bytes == document.bytes


def test_an_append_to_an_import_keeps_its_codec(reader, tmp_path) -> None:
    with create(reader, tmp_path / "raw") as raw:
        reader.ingest(TEXT, raw, name="list")
        raw.export_document("list", tmp_path / "file")
    with create(reader, tmp_path / "int8", codec="int8") as other:
        other.import_document(tmp_path / "file")
        reader.ingest(" The end of the list.", other, name="list", mode="append")
        catalog, document = other._on_disk().catalog, other.document("list")
        assert document.codec == "raw"
        with catalog.database.read() as txn:
            for _, row in catalog.passages_of(txn, document):
                for key, data in catalog.blocks.walk(txn, row.number):
                    assert catalog.blocks.header(data, key, row.digest).codec == "raw"


def test_passages_that_cannot_be_had_are_left_out_and_their_document_named(
    reader, store, tmp_path, monkeypatch
) -> None:
    url = f"file://{tmp_path}/published"
    store.publish(url)
    with MemoryStore.open(url) as away:
        number, lease = away.document("kept").id, away.lease
        ((gone, _),) = away.stored_at([(number, 1)])

        def leased(units):
            if missing := [unit for unit in units if unit.document == gone]:
                raise BlocksUnavailable("the store is away", missing)
            return lease(units)

        monkeypatch.setattr(away, "lease", leased)
        with reader.session(away, top_k=8, chained=False) as session:
            passages = [Chosen(number, block) for block in (0, 1, 2)]
            with pytest.raises(BlocksUnavailable, match="is away"):
                session.read(passages)
            away._on_disk().catalog.allow_partial = True
            session.read(passages)
            assert [one.block for one in session.chosen] == [0, 2]
            assert session.absent == {number}


def test_text_alone_needs_no_selector_that_looks_at_states(tmp_path) -> None:
    words = HuggingFaceReader(decoder("llama"), tokenizer(), Adaptation(Words(), top_k=1))
    with create(words, tmp_path / "text") as text, create(words, tmp_path / "kept") as kept:
        words.ingest(TEXT, text, name="list", keep="text")
        words.ingest(TEXT, kept, name="list")
        answers = [words.ask(QUESTION, store, max_new_tokens=4) for store in (text, kept)]
        assert answers[0].tokens == answers[1].tokens
        assert answers[0].sources[0].span == answers[1].sources[0].span
        words.ingest(TEXT, text, name="copy", keep="text")
        assert text.stats()["passages"]["different"] == text.document("list").blocks
