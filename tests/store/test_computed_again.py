"""Missing or damaged keys and values are computed for a question, with the same result."""

import logging
import os
from pathlib import Path
from random import Random

import pytest
import torch

from memstore.disk.lmdb.transaction import record_range
from memstore.errors import BlocksUnavailable, StoreUnavailable
from memstore.share.local_cache import LocalCache
from memstore.share.manifest import read_newest
from memstore.share.open_object_store import open_object_store
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer import export_document, import_document, publish_memory
from memstore.store.verify import verify_memory
from support.published import Wild, WildServer, open_at
from support.publishing import contents_of
from support.tiny_decoder import decoder, learned_selector, random_adapter, tokenizer

pytest.importorskip("transformers")

from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.model.passages import passage_encoding
from memstore.model.passages.adaptation import Adaptation
from memstore.model.passages.selector import Chosen, Selector

TEXT = " ".join(
    f"The {colour} {thing} of the {place} has the number {len(colour + thing) * len(place)}."
    for colour in ("red", "grey", "silver", "copper")
    for thing in ("lantern", "barrel", "anchor", "ladder")
    for place in ("harbour", "mill", "chapel", "orchard")
)
FLIPS = int(os.environ.get("MEMSTORE_FLIPS", "24"))
QUESTION = "What number has the copper anchor of the orchard?"


def pointing(reader: HuggingFacePassageModel) -> Adaptation:
    return Adaptation(learned_selector(reader, layer=1, word_weight=1.0), top_k=3)


@pytest.fixture(scope="module")
def reader() -> HuggingFacePassageModel:
    model = decoder("llama")
    plain = HuggingFacePassageModel(
        model, tokenizer(), Adaptation(Selector()), kv_dtype=torch.float32
    )
    return HuggingFacePassageModel(
        model, tokenizer(), pointing(plain), adapter=random_adapter(model), kv_dtype=torch.float32
    )


def create(reader: HuggingFacePassageModel, path: Path, **options) -> MemoryStore:
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
    encode = passage_encoding.encode

    def counting(reader, passages, **how):
        some = list(passages)
        counts.append(len(some))
        return encode(reader, some, **how)

    monkeypatch.setattr(passage_encoding, "encode", counting)
    return counts


def spoil(store: MemoryStore, name: str, block: int) -> None:
    """Flip a bit in every record of a passage."""
    catalog = store._catalog

    def work(txn) -> None:
        (place,) = catalog.stored_at(txn, [(store.document(name).id, block)])
        for key, value in list(txn.scan("blocks", *record_range(place.number))):
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
    computed.clear()
    longer = changed + " The black door of the house has the number 7."
    reader.ingest(longer, store, name="copy", mode="replace")
    assert 1 <= sum(computed) <= 2
    assert store.stats()["bytes"] > before
    for name in ("kept", "copy"):
        assert store.document(name).state == "ready"
    assert store.verify().clean
    first, second = (states(reader, store, name, [0, 1]) for name in ("kept", "copy"))
    assert torch.equal(first, second)


@pytest.mark.parametrize("blocks", [[0], [2, 5, 6]])
def test_passages_kept_as_text_give_the_answers_of_stored_ones(
    reader, store, tmp_path, blocks
) -> None:
    expected = states(reader, store, "kept", blocks)
    with create(reader, tmp_path / "text") as text:
        document = reader.ingest(TEXT, text, name="text", keep="text")
        assert document.bytes == 0 and text.stats()["passages"]["stored"] == 0
        found = states(reader, text, "text", blocks)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
        assert text.stats()["passages"]["computed"] > 0
        assert text.stats()["passages"]["damaged"] == 0
        asked = [reader.ask(QUESTION, memory, max_new_tokens=4) for memory in (store, text)]
        assert asked[0].tokens == asked[1].tokens
        assert [s.text for s in asked[0].sources] == [s.text for s in asked[1].sources]
        assert text.verify().clean and text.stats()["file_bytes"] < store.stats()["file_bytes"] / 2


def test_documents_stored_as_text_are_exported_and_published(reader, tmp_path) -> None:
    with create(reader, tmp_path / "text") as text:
        reader.ingest(TEXT, text, name="text", keep="text")
        expected = states(reader, text, "text", [1])
        export_document(text, "text", tmp_path / "file")
        publish_memory(text, f"file://{tmp_path}/published")
    with create(reader, tmp_path / "other") as other:
        import_document(other, tmp_path / "file")
        assert torch.equal(states(reader, other, "text", [1]), expected)
        assert other.verify().clean
    url = f"file://{tmp_path}/published"
    with MemoryStore.open(url) as away:
        assert torch.equal(states(reader, away, "text", [1]), expected)
        assert away.stats()["passages"]["damaged"] == 0
        assert away.verify().clean


def test_a_repair_drops_damaged_keys_and_values_but_no_document(reader, store) -> None:
    reader.ingest(TEXT, store, name="copy")
    expected = states(reader, store, "kept", [1])
    spoil(store, "kept", 1)
    report = verify_memory(store.path)
    assert not report.clean and "passage 1 of document 'copy'" in report.problems[0].what
    report = store.verify(repair=True)
    assert not report.dropped and len(report.problems) == 1 and store.verify().clean
    with MemoryStore.open(store.path) as opened:
        for name in ("kept", "copy"):
            found = states(reader, opened, name, [1])
            atol = 1e-4 * float(expected.abs().max())
            torch.testing.assert_close(found, expected, rtol=0, atol=atol)
        assert opened.stats()["passages"]["computed"] == 1  # and then held for the other
        assert opened.stats()["passages"]["damaged"] == 0
    stored = store.stats()["passages"]["stored"]
    reader.ingest(TEXT + " More.", store, name="again")  # which stores it again
    assert store.stats()["passages"]["stored"] > stored


@pytest.mark.timeout(3600 if FLIPS > 200 else 300)
def test_a_flipped_bit_of_a_record_never_changes_an_answer(reader, store, caplog) -> None:
    rng, blocks = Random(3), store.document("kept").blocks
    expected = [states(reader, store, "kept", [block]) for block in range(blocks)]
    catalog = store._catalog
    path = store.path
    for flip in range(FLIPS):
        block = rng.randrange(blocks)
        with catalog.database.read() as txn:
            (place,) = catalog.stored_at(txn, [(store.document("kept").id, block)])
            records = [
                (bytes(k), bytes(v)) for k, v in txn.scan("blocks", *record_range(place.number))
            ]
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
    assert caplog.text.count("1 damaged passages were computed again") == FLIPS
    assert store.verify().clean


def test_unavailable_passages_are_computed_or_named_and_left_out(
    reader, store, tmp_path, monkeypatch
) -> None:
    url = f"file://{tmp_path}/published"
    expected = states(reader, store, "kept", [0, 1, 2])
    publish_memory(store, url)
    with MemoryStore.open(url) as away:
        number, lease = away.document("kept").id, away.lease
        ((gone, _),) = away.retrieval.stored_at([(number, 1)])

        def leased(units):
            if missing := [unit for unit in units if unit.document == gone]:
                raise BlocksUnavailable("the store is away", missing)
            return lease(units)

        monkeypatch.setattr(away, "lease", leased)
        found = states(reader, away, "kept", [0, 1, 2])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
        assert (
            away.stats()["passages"] | {"computed": 1, "damaged": 0, "away": 1}
            == (away.stats()["passages"])
        )

        def no_tokens(*wanted):
            raise StoreUnavailable("the store is away")

        monkeypatch.setattr(away, "passages", no_tokens)
        with reader.session(away, top_k=8) as session:
            passages = [Chosen(number, block) for block in (0, 1, 2)]
            with pytest.raises(BlocksUnavailable, match="is away"):
                session.read(passages)
            session.read([passages[0], passages[2]])
            assert [one.block for one in session.chosen] == [0, 2]


def test_the_next_reader_of_a_publication_reuses_computed_passages(reader, store, tmp_path) -> None:
    url = f"file://{tmp_path}/published"
    expected = states(reader, store, "kept", [0, 3, 5])
    publish_memory(store, url, keep="text")
    with MemoryStore.open(url) as away:
        asked = [reader.ask(QUESTION, memory, max_new_tokens=4) for memory in (store, away)]
        assert asked[0].tokens == asked[1].tokens
        assert [s.text for s in asked[0].sources] == [s.text for s in asked[1].sources]
        hits = [[s.text for s in reader.search("the copper anchor", m)] for m in (store, away)]
        assert hits[0] == hits[1] and away.stats()["passages"]["computed"] > 0
    place, server = open_object_store(url), WildServer(Wild(0, 0.0))
    caches = LocalCache(tmp_path / "cache", 1 << 24), None
    for local, shared in ((None, server), caches):
        for computed in (3, 0):
            with open_at(place, local=local, shared=shared, host_budget=1 << 24) as away:
                found = states(reader, away, "kept", [0, 3, 5])
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
                told = away.stats()["passages"]
                assert (told["computed"], told["damaged"]) == (computed, 0)
    for name, value in server.held.items():  # it is no more believed than what was published
        server.held[name] = value[:-1] + bytes([value[-1] ^ 1])
    with open_at(place, shared=server, host_budget=1 << 24) as away:
        assert torch.equal(states(reader, away, "kept", [0, 3, 5]), found)
        assert away.stats()["tiers"]["valkey"]["failed_damaged"] > 0


def test_a_damaged_published_passage_is_computed_and_told(reader, store, tmp_path, caplog) -> None:
    url = f"file://{tmp_path}/published"
    expected = states(reader, store, "kept", [0, 3, 5])
    publish_memory(store, url)
    place = open_object_store(url)
    (entry,) = read_newest(place).entries.values()
    record = contents_of(place, entry).record(0, 0)
    data = bytearray(place.get(record.name))
    data[record.offset + 200] ^= 1
    place.put(record.name, bytes(data))
    budget = reader.signature.geometry.record_bytes  # for one passage at a time
    with (
        MemoryStore.open(url, host_budget=budget) as away,
        caplog.at_level(logging.WARNING, logger="memstore"),
    ):
        found = states(reader, away, "kept", [0, 3, 5])
        assert away.stats()["passages"]["damaged"] == 1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    assert "damaged passages were computed again" in caplog.text


def test_the_next_question_reuses_computed_passages(reader, tmp_path) -> None:
    path = tmp_path / "text"
    with create(reader, path) as text:
        reader.ingest(TEXT, text, name="text", keep="text")
        first = reader.ask(QUESTION, text, max_new_tokens=4)
        computed = text.stats()["passages"]["computed"]
        assert computed and first.tiers["computed"]["hits"] == first.tiers["host"]["misses"] > 0
        assert first.tiers["computed"]["seconds"] > 0
        again = reader.ask(QUESTION, text, max_new_tokens=4)
        assert again.tokens == first.tokens and again.tiers["computed"]["hits"] == 0
        assert text.stats()["passages"]["computed"] == computed
        assert text.stats()["passages"]["stored"] == 0
    with MemoryStore.open(path) as opened:
        other = reader.ask(QUESTION, opened, max_new_tokens=4)
        assert other.tokens == first.tokens and opened.stats()["passages"]["computed"] == computed
