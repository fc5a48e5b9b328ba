"""What an ingest tells of a document before it reads it, and what it refuses."""

import shutil

import pytest

from memstore import MemoryStore
from memstore.errors import InvalidInput, StorageFull
from memstore.model.landmark.landmark_ingest import about_tokens
from memstore.model.texts.source_text import Text
from support.tiny_decoder import word_reader
from support.tiny_model import text, tiny_model


def landmark_reader(path):
    return tiny_model(path)


def choosing_reader(path):
    made = word_reader(read_from=2)
    made.lookup = made.lookup.changed(chunk_blocks=2)
    made.window_blocks = 3
    return made


def created(reader, path, **options):
    return MemoryStore.create(path, reader.signature, selector=reader.keeps, **options)


@pytest.fixture(scope="module", params=[landmark_reader, choosing_reader])
def reader(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("reader") / "model")


def forecast_of(reader, store, content, name="book", **more):
    told = []
    reader.ingest(content, store, name=name, expect=told.append, **more)
    return told


@pytest.mark.parametrize("words", [3, 90, 250])
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_the_bytes_foretold_are_those_of_the_records(reader, tmp_path, codec, words):
    content = text(words)
    with created(reader, tmp_path / "m", codec=codec) as store:
        settings = reader.ingest("some words", store, name="first").settings
        tokens = len(reader.tokenizer.encode(content))
        exact = store.estimate_size("book", tokens, source_hash="", settings=settings)
        (told,) = forecast_of(reader, store, content)
        document = store.document("book")
        assert not exact.most
        if reader.keeps is None:
            assert (exact.tokens, exact.bytes) == (document.tokens, document.bytes)
        else:  # it is not known how full passages will be, and what stands between them
            assert exact.tokens == pytest.approx(document.tokens, rel=0.05, abs=2)
        assert told.bytes == pytest.approx(document.bytes, rel=0.3, abs=8000)
        # what is there already is not foretold, let alone refused
        assert not forecast_of(reader, store, content)


def test_contexts_in_front_of_passages_are_foretold(tmp_path):
    reader = choosing_reader(tmp_path / "model")
    content = ". ".join(text(90, seed=number).capitalize() for number in range(20))
    told = {}
    for context in ("none", "sentence"):
        reader.context = context
        with created(reader, tmp_path / context, codec="raw") as store:
            (told[context],) = forecast_of(reader, store, content)
            tokens = store.document("book").tokens
            assert told[context].tokens == pytest.approx(tokens, rel=0.1)
    assert told["sentence"].tokens > 1.05 * told["none"].tokens


def test_a_memory_that_compresses_tells_from_what_it_has(reader, tmp_path):
    with created(reader, tmp_path / "m", codec="zstd") as store:
        (told,) = forecast_of(reader, store, text(300), "first")
        # random numbers do not compress, and have frames around them
        assert told.most and 1.05 * told.bytes > store.document("first").bytes
        (told,) = forecast_of(reader, store, text(300, seed=1), "second")
        assert not told.most
        assert told.bytes == pytest.approx(store.document("second").bytes, rel=0.1)


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_a_document_beyond_the_quota_is_refused_before_it_is_read(reader, tmp_path, codec):
    with created(reader, tmp_path / "m", codec=codec, quota=400_000) as store:
        read = []
        with pytest.raises(StorageFull, match=r"'book' has about [\d,]+ tokens and needs .* quota"):
            reader.ingest(text(4000), store, name="book", progress=read.append)
        assert not read and not store.documents()
        store.set_quota(None)
        assert reader.ingest(text(300), store, name="book").state == "ready"


def test_a_document_beyond_the_disk_is_refused_before_it_is_read(reader, tmp_path, monkeypatch):
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=50_000))
    with created(reader, tmp_path / "m", codec="raw") as store:
        with pytest.raises(StorageFull, match=r"the disk of .* has room for .* MB; make room"):
            reader.ingest(text(4000), store, name="book")
        assert not store.documents()


def test_what_was_read_before_an_interrupt_needs_no_room_again(reader, tmp_path):
    content = text(700)
    with created(reader, tmp_path / "m", codec="raw") as store:
        seen = []

        def interrupt(progress):
            seen.append(progress)
            if progress.characters > 0.6 * progress.total_characters:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            reader.ingest(content, store, name="book", progress=interrupt)
        part = store.document("book")
        assert part.state == "ingesting" and part.tokens
        assert seen[-1].tokens_per_second > 0 and seen[-1].seconds_left > 0
        whole = store.estimate_size(
            "new", len(reader.tokenizer.encode(content)), source_hash="", settings=part.settings
        )
        # room for the rest, not for all of it
        with store._on_disk().catalog.database.read() as txn:
            used = txn.used_bytes
        store.set_quota(used + int(0.7 * whole.bytes))
        with pytest.raises(StorageFull):
            reader.ingest(" ".join(reversed(content.split())), store, name="again")
        rest = []
        try:
            reader.ingest(content, store, name="book", expect=rest.append)
        except StorageFull as error:  # the file's own pages are more than its records
            assert "used up its quota" in str(error)
        assert rest and rest[0].tokens >= part.tokens


def test_a_compressing_memory_refuses_once_it_knows(tmp_path, monkeypatch):
    monkeypatch.setattr("memstore.store.write.writer.COMMIT_BYTES", 100_000)
    reader, chunks = choosing_reader(tmp_path), []
    with created(reader, tmp_path / "m", quota=1_000_000) as store:
        with pytest.raises(StorageFull, match=r"'book' has about .* of the quota of 1\.0 MB"):
            reader.ingest(text(3000), store, name="book", progress=chunks.append)
        assert not chunks or chunks[-1].characters < 0.5 * chunks[-1].total_characters
        assert store.document("book").state == "ingesting" and store.verify().clean
        store.set_quota(None)
        assert reader.ingest(text(3000), store, name="book").state == "ready"


def test_tokens_are_counted_by_passages_from_all_over_a_text(tmp_path):
    model = tiny_model(tmp_path / "model")
    plain, other = text(20_000), "0 1 2 3 4 5 6 7 8 9 " * 10_000
    for content in (plain, plain + other, other + plain, "one word"):
        one = Text(content, "a")
        one.check()
        assert sum(map(len, one.sample)) <= 33 * 4096
        counted = len(model.tokenizer.encode(content))
        assert about_tokens(one, model.tokenizer) == pytest.approx(counted, rel=0.05)
    with pytest.raises(InvalidInput):
        Text(" ", "blank").check()
