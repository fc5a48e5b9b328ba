"""A memory as its users see it: opening, writing, continuing, forgetting, moving and checking; many
processes.
"""

import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import torch

from memstore.block import BlockKey
from memstore.disk.format.codec import CODECS
from memstore.disk.lmdb.database import Database
from memstore.disk.lmdb.environment import Environment
from memstore.disk.tables.catalog import Catalog
from memstore.errors import (
    BudgetExceeded,
    CorruptMemory,
    DocumentExists,
    DocumentNotFound,
    InvalidInput,
    MemoryClosed,
    MemoryExists,
    MemoryLocked,
    MemoryNotFound,
    NewerFormat,
    ReadOnlyMemory,
    StorageFull,
    WrongModel,
)
from memstore.store.memory_store import MemoryStore
from memstore.store.verify.verify_memory import verify_memory
from memstore.store.verify.walk import walk
from support.fork_server import RIGHT, SEVERAL, ForkServer
from support.synthetic_documents import (
    BLOCK,
    CHUNK,
    CHUNK_BLOCKS,
    DIM,
    HEADS,
    OTHER_MODEL,
    SETTINGS,
    SIGNATURE,
    TOP_K,
    block,
    check_content,
    chunk,
    ingest,
    is_whole,
    stored,
    token_ids,
)

UNIT_BYTES = 2 * BLOCK * DIM * 2
BUDGET = 1 << 20
SECONDS = 100  # until a test that waits has failed
KILLS = 6


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "memory"


@pytest.fixture
def store(path: Path) -> MemoryStore:
    with MemoryStore.create(path, SIGNATURE, host_budget=BUDGET) as opened:
        yield opened


def opened_tables(path: Path) -> AbstractContextManager[Catalog]:
    """The tables of a memory, beside whatever has it open in this process."""
    return closing(Catalog.open(path))


def reopened(path: Path, **options: object) -> MemoryStore:
    return MemoryStore.open(path, SIGNATURE, **{"host_budget": BUDGET, **options})


@pytest.fixture
def elsewhere(children: ForkServer, tmp_path: Path) -> Callable[..., str]:
    """Runs Python code in another process; gives what it printed."""

    def run(code: str, *arguments: object) -> str:
        assert children.run("python_job", tmp_path / "printed", code, *arguments) == RIGHT
        return (tmp_path / "printed").read_text()

    return run


# Opening


def test_create_then_open_elsewhere(path: Path) -> None:
    with MemoryStore.create(path, SIGNATURE, codec="raw") as store:
        assert store.documents() == [] and store.path == path
        document = ingest(store, "book", 45)
    with MemoryStore.open(path) as store:
        assert store.signature == SIGNATURE
        assert store.documents() == [document]
        check_content(store, document, text=1)


def test_opening_what_is_no_memory_or_another_models_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(MemoryNotFound):
        MemoryStore.open(tmp_path)
    MemoryStore.create(path, SIGNATURE).close()
    with pytest.raises(MemoryExists):
        MemoryStore.create(path, SIGNATURE)
    with pytest.raises(WrongModel, match="weights"):
        MemoryStore.open(path, OTHER_MODEL)
    with pytest.raises(BudgetExceeded, match="raise"):
        MemoryStore.open(path, host_budget=UNIT_BYTES)
    with pytest.raises(BudgetExceeded):
        MemoryStore.create(tmp_path / "other", SIGNATURE, host_budget=10)
    assert not (tmp_path / "other").exists()
    with pytest.raises(InvalidInput, match="faiss-ivf-sq8"):
        MemoryStore.open(path, index="hnsw")
    MemoryStore.open(path, SIGNATURE).close()


def test_newer_format_is_refused_by_name(path: Path) -> None:
    import msgpack

    MemoryStore.create(path, SIGNATURE).close()
    catalog = Catalog.open(path)
    with catalog.database.read() as txn:
        row = msgpack.unpackb(txn.get_checked("meta", b"memory"))
    catalog.database.write(
        lambda txn: txn.put_checked("meta", b"memory", msgpack.packb({**row, "format": 99}))
    )
    catalog.close()
    with pytest.raises(NewerFormat, match="update"):
        MemoryStore.open(path)


def test_closed_store_says_so(path: Path) -> None:
    store = MemoryStore.create(path, SIGNATURE)
    store.close()
    store.close()
    for call in (
        store.documents,
        lambda: store.retrieval.session_document(),
        lambda: store.lease([]),
        store.stats,
    ):
        with pytest.raises(MemoryClosed):
            call()


@pytest.mark.parametrize("index", ["packed", "auto"])
def test_either_index_finds_the_same_blocks(path: Path, index: str) -> None:
    with MemoryStore.create(path, SIGNATURE) as store:
        document = ingest(store, "book", 20 * CHUNK)
        scope = [(document.id, 0, document.blocks)]
    with MemoryStore.open(path, index=index) as store:
        for number in (0, 33, 79):
            q = block(1, 2, number)[2].float()[:, None]  # its own landmark key as the query
            hits = store.retrieval.search_landmarks(2, q, scope, 3, return_lse=True)
            keys = store.retrieval.landmark_keys(2, scope)
            expected = (q @ keys.transpose(1, 2)).topk(3, -1)
            assert torch.equal(hits.candidates, expected.indices)
            assert torch.equal(
                store.retrieval.landmark_keys(2, scope, hits.candidates)[:, 0, 0],
                keys[[0, 1], hits.candidates[:, 0, 0]],
            )


# Writing


@pytest.mark.parametrize(
    "tokens", [0, 1, BLOCK, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 5 * CHUNK + 7]
)
@pytest.mark.parametrize("commit_bytes", [1, 16 << 20])
def test_document_reads_back_bit_for_bit(path: Path, tokens: int, commit_bytes: int) -> None:
    with MemoryStore.create(path, SIGNATURE, host_budget=BUDGET) as store:
        document = ingest(store, "book", tokens, commit_bytes=commit_bytes)
        assert (document.state, document.tokens, document.name) == ("ready", tokens, "book")
        check_content(store, document, text=1)
    with reopened(path, read_only=True) as store:
        assert store.documents() == [document]
        check_content(store, document, text=1)
        assert is_whole(store.path)


def test_what_is_stored_does_not_depend_on_when_it_was_committed(tmp_path: Path) -> None:
    tokens = 150 * CHUNK + 9  # several runs of landmark keys
    for name, commit_bytes in (("a", 1), ("b", 20_000), ("c", 16 << 20)):
        with MemoryStore.create(tmp_path / name, SIGNATURE, host_budget=8 << 20) as store:
            ingest(store, "book", tokens, commit_bytes=commit_bytes)
    assert stored(tmp_path / "a") == stored(tmp_path / "b") == stored(tmp_path / "c")


def test_layers_without_memory_keep_only_what_continuing_needs(
    store: MemoryStore, path: Path
) -> None:
    document = ingest(store, "book", 9 * CHUNK + 5)
    kept = range(9 * CHUNK_BLOCKS - TOP_K, document.blocks)
    with opened_tables(path) as catalog, catalog.database.read() as txn:
        records = [(key, len(data)) for key, data in catalog.blocks.walk(txn, document.id)]
    assert [key.block for key, _ in records if key.layer == 0] == list(kept)
    assert sum(size for _, size in records) == document.bytes
    with pytest.raises(CorruptMemory):
        store.lease([BlockKey(document.id, 0, 0, 0)])


def test_staged_chunks_can_be_searched_and_read_before_they_are_committed(
    store: MemoryStore,
) -> None:
    with store.write_document("book", source_hash="x", settings=SETTINGS) as writer:
        number = writer.document.id
        for first in range(0, 3 * CHUNK, CHUNK):
            writer.add_chunk(
                token_ids(1, first, first + CHUNK), first, chunk(1, first // BLOCK, CHUNK)[0]
            )
        assert (writer.tokens, writer.blocks, writer.document.tokens) == (
            3 * CHUNK,
            3 * CHUNK_BLOCKS,
            0,
        )
        assert store.documents()[0].state == "ingesting" and store.documents()[0].tokens == 0
        q = block(1, 1, 7)[2].float()[:, None]
        assert store.retrieval.search_landmarks(
            1, q, [(number, 0, 12)], 12
        ).candidates.sort().values[0, 0].tolist() == list(range(12))
        with store.lease([BlockKey(number, 1, 11, 1)]) as lease:
            assert (
                torch.equal(lease.k[lease.slots[0]], block(1, 1, 11)[0][1])
                and not lease.missed.any()
            )
        for layer in range(3):
            recent = writer.recent(layer, TOP_K)
            assert recent.blocks == range(10, 12)
            for i, b in enumerate(recent.blocks):
                k, v, landmark = block(1, layer, b)
                assert torch.equal(recent.k[i], k) and torch.equal(recent.v[i], v)
                assert torch.equal(recent.landmarks[i], landmark)
        assert store.stats()["tiers"]["disk"]["hits"] == 0


@pytest.mark.parametrize("codec", [name for name in CODECS if not CODECS[name].lossless])
def test_a_lossy_memory_shows_staged_blocks_as_they_will_be_stored(path: Path, codec: str) -> None:
    tokens = 2 * CHUNK + BLOCK + 1
    with MemoryStore.create(path, SIGNATURE, codec=codec, host_budget=BUDGET) as store:
        writer = store.write_document("book", source_hash="x", settings=SETTINGS)
        number = writer.document.id
        for first in range(0, tokens, CHUNK):
            end = min(first + CHUNK, tokens)
            writer.add_chunk(
                token_ids(1, first, end), first, *chunk(1, first // BLOCK, end - first)
            )
        units = [
            BlockKey(number, layer, b, head)
            for layer in (1, 2)
            for b in range(writer.blocks)
            for head in (0, 1)
        ]
        recent = [writer.recent(layer, TOP_K) for layer in range(3)]
        with store.lease(units) as lease:
            staged = lease.k[lease.slots], lease.v[lease.slots]
        assert store.stats()["tiers"]["disk"]["hits"] == 0
        writer.finish()
    with reopened(path) as store:
        with store.lease(units) as lease:
            assert torch.equal(lease.k[lease.slots], staged[0]) and torch.equal(
                lease.v[lease.slots], staged[1]
            )
        exact = torch.cat([block(1, layer, b)[1] for layer in (1, 2) for b in range(9)])
        assert not torch.equal(staged[1][: len(exact)], exact)
        for layer in range(3):
            with store.lease(
                [BlockKey(number, layer, b, head) for b in recent[layer].blocks for head in (0, 1)]
            ) as lease:
                assert torch.equal(lease.k[lease.slots], recent[layer].k.flatten(0, 1))


class Stop(Exception):
    pass


def interrupt_at(tokens: int, error: type[BaseException] = Stop):
    def after_chunk(done: int) -> None:
        if done >= tokens:
            raise error

    return after_chunk


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("commit_bytes", [1, 5000, 16 << 20])
def test_interrupted_ingest_keeps_whole_chunks_and_resumes_to_equal_bytes(
    tmp_path: Path, error: type[BaseException], commit_bytes: int
) -> None:
    tokens = 70 * CHUNK + 6
    with MemoryStore.create(tmp_path / "whole", SIGNATURE, host_budget=BUDGET) as store:
        ingest(store, "book", tokens)
    with MemoryStore.create(tmp_path / "cut", SIGNATURE, host_budget=BUDGET) as store:
        with pytest.raises(error):
            ingest(
                store,
                "book",
                tokens,
                commit_bytes=commit_bytes,
                after_chunk=interrupt_at(20 * CHUNK, error),
            )
        document = store.document("book")
        assert (document.state, document.tokens) == ("ingesting", 20 * CHUNK)
        with pytest.raises(DocumentNotFound):
            store.retrieval.landmark_keys(1, [(document.id, 0, 1)])
    with MemoryStore.open(tmp_path / "cut", host_budget=BUDGET) as store:
        check_content(store, store.document("book"), text=1)
        assert is_whole(store.path)
        writer = store.write_document("book", source_hash=f"1:{tokens}", settings=SETTINGS)
        assert (writer.tokens, writer.blocks) == (20 * CHUNK, 20 * CHUNK_BLOCKS)
        for layer in range(3):
            recent = writer.recent(layer, TOP_K)
            assert torch.equal(recent.k, torch.stack([block(1, layer, b)[0] for b in (78, 79)]))
            assert torch.equal(
                recent.landmarks, torch.stack([block(1, layer, b)[2] for b in (78, 79)])
            )
        writer.close()
        with pytest.raises(error):
            ingest(
                store,
                "book",
                tokens,
                commit_bytes=commit_bytes,
                after_chunk=interrupt_at(tokens, error),
            )
        assert store.document("book").tokens == 70 * CHUNK
        check_content(store, ingest(store, "book", tokens, commit_bytes=commit_bytes), text=1)
    assert stored(tmp_path / "whole") == stored(tmp_path / "cut")


def test_same_content_again_is_no_op_and_other_content_is_refused(
    store: MemoryStore, path: Path
) -> None:
    document = ingest(store, "book", 50)
    before = stored(path)
    assert ingest(store, "book", 50) == document
    with reopened(path, read_only=True) as reader:
        assert ingest(reader, "book", 50) == document
    with pytest.raises(DocumentExists, match="replace"):
        ingest(store, "book", 51)
    with pytest.raises(Stop):
        ingest(store, "part", 5 * CHUNK, after_chunk=interrupt_at(CHUNK))
    with pytest.raises(DocumentExists, match="partly"):
        ingest(store, "part", 6 * CHUNK)
    with pytest.raises(InvalidInput, match="top_k=2"):
        store.write_document(
            "part", source_hash=f"1:{5 * CHUNK}", settings=replace(SETTINGS, top_k=3)
        )
    with pytest.raises(DocumentExists, match="partly"):
        ingest(store, "part", 5 * CHUNK, mode="append")
    store.forget("part")
    assert stored(path) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mode": "overwrite"}, "append"),
        ({"name": ""}, "name"),
        ({"name": "a\0b"}, "name"),
        ({"settings": replace(SETTINGS, top_k=-1)}, "top_k"),
        ({"settings": replace(SETTINGS, chunk_blocks=0)}, "chunk_blocks"),
    ],
)
def test_bad_arguments_are_refused_at_the_boundary(
    store: MemoryStore, arguments: dict, words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        store.write_document(
            **{"name": "book", "source_hash": "x", "settings": SETTINGS, **arguments}
        )


def test_chunks_of_another_shape_or_off_the_grid_are_refused(store: MemoryStore) -> None:
    layers, _ = chunk(1, 0, CHUNK)
    with store.write_document("book", source_hash="x", settings=SETTINGS) as writer:
        with pytest.raises(InvalidInput, match="layers"):
            writer.add_chunk(token_ids(1, 0, CHUNK), 0, {1: layers[1]})
        with pytest.raises(InvalidInput, match="tokens"):
            writer.add_chunk(token_ids(1, 0, CHUNK - 1), 0, layers)
        with pytest.raises(InvalidInput, match="expected"):
            writer.add_chunk(
                token_ids(1, 0, CHUNK), 0, {**layers, 2: tuple(part.float() for part in layers[2])}
            )
        writer.add_chunk(token_ids(1, 0, 6), 0, *chunk(1, 0, 6))
        with pytest.raises(InvalidInput, match="append"):
            writer.add_chunk(token_ids(1, 0, CHUNK), 0, layers)
    assert store.document("book").tokens == 0


@pytest.mark.parametrize("before", [CHUNK - 3, CHUNK, 7 * CHUNK + 5, 7 * CHUNK + 2 * BLOCK])
@pytest.mark.parametrize("after", [1, CHUNK, 6 * CHUNK + 9])
def test_append_continues_from_the_last_full_chunk_as_if_read_at_once(
    tmp_path: Path, before: int, after: int
) -> None:
    tokens = before + after
    with MemoryStore.create(tmp_path / "whole", SIGNATURE, host_budget=BUDGET) as store:
        ingest(store, "book", tokens)
    with MemoryStore.create(tmp_path / "grown", SIGNATURE, host_budget=BUDGET) as store:
        old = ingest(store, "book", before)
        with store.lease([BlockKey(old.id, 1, old.blocks - 1, 0)]):
            pass
        writer = store.write_document(
            "book", source_hash=f"1:{tokens}", settings=SETTINGS, mode="append"
        )
        assert writer.tokens == before // CHUNK * CHUNK and writer.base_tokens == before
        span = writer.replaced_tokens()
        assert np.array_equal(span.ids, token_ids(1, writer.tokens, before))
        assert span.char_start + 3 * len(span.before) == 3 * writer.tokens
        writer.close()
        assert store.document("book") == old
        check_content(store, old, text=1)
        grown = ingest(store, "book", tokens, mode="append")
        check_content(store, grown, text=1)
        assert grown.appended_to == before
        assert is_whole(store.path)
        assert ingest(store, "book", tokens, mode="append") == grown
    with reopened(tmp_path / "grown") as store:
        check_content(store, store.document("book"), text=1)
    whole, grown_tables = stored(tmp_path / "whole"), stored(tmp_path / "grown")
    for table in ("blocks", "tokens", "landmarks"):
        assert whole[table] == grown_tables[table], table


def test_interrupted_append_answers_from_the_old_until_its_first_commit_then_resumes(
    store: MemoryStore, path: Path
) -> None:
    before, tokens = 3 * CHUNK + 5, 9 * CHUNK + 2
    old = ingest(store, "book", before)
    writer = store.write_document(
        "book", source_hash=f"1:{tokens}", settings=SETTINGS, mode="append"
    )
    check_content(store, old, text=1)  # while it is being appended to
    first = writer.tokens
    writer.add_chunk(
        token_ids(1, first, first + CHUNK), 3 * first, chunk(1, first // BLOCK, CHUNK)[0]
    )
    assert store.document("book").state == "ingesting"
    writer.close()
    document = store.document("book")
    assert (document.tokens, document.appended_to) == (4 * CHUNK, before)
    with pytest.raises(DocumentNotFound):
        store.retrieval.search_landmarks(
            1, torch.zeros(HEADS, 1, DIM), [(old.id, 0, old.blocks)], 1
        )
    with pytest.raises(DocumentExists):
        ingest(store, "book", before)
    with reopened(path) as again:
        writer = again.write_document(
            "book", source_hash=f"1:{tokens}", settings=SETTINGS, mode="append"
        )
        assert (writer.tokens, writer.base_tokens, len(writer.replaced_tokens().ids)) == (
            4 * CHUNK,
            before,
            0,
        )
        writer.close()
        check_content(again, ingest(again, "book", tokens, mode="append"), text=1)
        assert is_whole(again.path)


def test_append_needs_a_ready_document_and_the_same_settings(store: MemoryStore) -> None:
    with pytest.raises(DocumentNotFound, match="holds none"):
        ingest(store, "book", 10, mode="append")
    ingest(store, "book", 10)
    with pytest.raises(InvalidInput, match="chunk_blocks=4"):
        store.write_document(
            "book", source_hash="y", settings=replace(SETTINGS, chunk_blocks=8), mode="append"
        )


def test_replacement_answers_with_the_old_content_until_it_is_whole(
    store: MemoryStore, path: Path
) -> None:
    old = ingest(store, "book", 5 * CHUNK + 1, text=1)
    other = ingest(store, "other", 30, text=3)

    def still_old(done: int) -> None:
        assert store.document("book") == old and len(store.documents()) == 2
        check_content(store, old, text=1)

    with pytest.raises(Stop):
        ingest(
            store, "book", 6 * CHUNK, text=2, mode="replace", after_chunk=interrupt_at(3 * CHUNK)
        )
    still_old(0)
    assert is_whole(store.path)
    with reopened(path) as again:
        assert len(again.documents()) == 2
        done: list[int] = []
        new = ingest(again, "book", 6 * CHUNK, text=2, mode="replace", after_chunk=done.append)
        assert done == [4 * CHUNK, 5 * CHUNK, 6 * CHUNK]  # continued
        assert again.documents() == [other, new] or again.documents() == [new, other]
        check_content(again, new, text=2)
        with pytest.raises(DocumentNotFound):
            again.lease([BlockKey(old.id, 1, 0, 0)])
    with pytest.raises(DocumentNotFound):  # in the store that has the old one cached
        store.lease([BlockKey(old.id, 1, 0, 0)])
    check_content(store, store.document("book"), text=2)
    assert ingest(store, "book", 6 * CHUNK, text=2, mode="replace") == new
    newest = ingest(
        store,
        "book",
        10,
        text=4,
        mode="replace",
        after_chunk=lambda done: check_content(store, new, text=2),
    )
    check_content(store, newest, text=4)
    assert ingest(store, "fresh", 10, text=4, mode="replace").name == "fresh"
    assert is_whole(store.path)


def test_ids_are_never_reused(store: MemoryStore) -> None:
    first = ingest(store, "a", 10)
    store.forget("a")
    assert ingest(store, "a", 10).id > first.id


def test_who_asks_for_no_document_is_told_of_twenty(store: MemoryStore) -> None:
    for number in range(21):
        ingest(store, f"{number:02}", 1)
        with pytest.raises(DocumentNotFound) as told:
            store.forget("none")
        names = ", ".join(repr(f"{each:02}") for each in range(min(number + 1, 20)))
        assert str(told.value).endswith(f"; there are {names}" + (", ..." if number == 20 else ""))


# Forgetting


def test_forgotten_document_leaves_nothing_to_read(store: MemoryStore, path: Path) -> None:
    before = stored(path)
    document = ingest(store, "secret", 4 * CHUNK + 3)
    kept = ingest(store, "kept", 2 * CHUNK, text=2)
    check_content(store, document, text=1)
    assert store.forget("secret") == document
    with pytest.raises(DocumentNotFound):
        store.lease([BlockKey(document.id, 1, 0, 0)])
    with pytest.raises(DocumentNotFound):
        store.retrieval.search_landmarks(1, torch.zeros(HEADS, 1, DIM), [(document.id, 0, 4)], 1)
    with pytest.raises(DocumentNotFound):
        store.tokens(document.id)
    with pytest.raises(DocumentNotFound, match="'kept'"):
        store.forget("secret")
    check_content(store, kept, text=2)
    assert is_whole(store.path)
    store.forget("kept")
    assert stored(path) == before
    size, smaller = store.compact()
    assert smaller < size


def test_document_forgotten_by_another_process_is_not_found_at_the_next_read(
    elsewhere: Callable[..., str], store: MemoryStore, path: Path
) -> None:
    document = ingest(store, "book", 3 * CHUNK)
    units = [BlockKey(document.id, 1, 2, 0)]
    lease = store.lease(units)
    elsewhere("with MemoryStore.open(arguments[0]) as store: store.forget('book')", path)
    # what is leased stays as it is
    assert torch.equal(lease.k[lease.slots[0]], block(1, 1, 2)[0][0])
    for read in (
        lambda: store.lease(units),
        lambda: store.retrieval.search_landmarks(
            1, torch.zeros(HEADS, 1, DIM), [(document.id, 0, 4)], 1
        ),
        lambda: store.retrieval.landmark_keys(1, [(document.id, 0, 4)]),
        lambda: store.document("book"),
    ):
        with pytest.raises(DocumentNotFound):
            read()
    lease.release()


# Processes and threads


def test_reader_sees_what_another_process_commits(
    elsewhere: Callable[..., str], store: MemoryStore, path: Path
) -> None:
    with reopened(path, read_only=True) as reader:
        assert reader.documents() == []
        elsewhere("with MemoryStore.open(arguments[0]) as store: ingest(store, 'book', 100)", path)
        check_content(reader, reader.document("book"), text=1)
        elsewhere(
            "with MemoryStore.open(arguments[0]) as store: ingest(store, 'book', 400, "
            "mode='append')",
            path,
        )
        assert reader.document("book").tokens == 400
        check_content(reader, reader.document("book"), text=1)


def test_committed_documents_are_read_while_another_process_writes(
    elsewhere: Callable[..., str], store: MemoryStore, path: Path
) -> None:
    document = ingest(store, "book", 20 * CHUNK)
    code = "with MemoryStore.open(arguments[0]) as store: "
    code += "check_content(store, store.document('book'), text=1); print('right')"
    with store.write_document("next", source_hash="x", settings=SETTINGS, commit_bytes=1) as writer:
        writer.add_chunk(token_ids(2, 0, CHUNK), 0, chunk(2, 0, CHUNK)[0])
        assert elsewhere(code, path) == "right\n"
    assert store.document("book") == document


def test_another_process_that_writes_is_refused_with_the_first_ones_pid(
    elsewhere: Callable[..., str], store: MemoryStore, path: Path
) -> None:
    code = """
try:
    with MemoryStore.open(arguments[0]) as store: ingest(store, 'two', 10)
except MemstoreError as error:
    print(type(error).__name__, error)
"""
    with store.write_document("one", source_hash="x", settings=SETTINGS):
        said = elsewhere(code, path)
        assert said.startswith("MemoryLocked") and str(os.getpid()) in said
    assert "Error" not in elsewhere(code, path)
    assert [d.name for d in store.documents()] == ["one", "two"]


@pytest.mark.parametrize("one_store", [True, False])
def test_several_documents_are_written_at_once(path: Path, one_store: bool) -> None:
    sizes = {text: (30 + 7 * text) * CHUNK + text for text in range(1, 5)}
    begun = threading.Barrier(len(sizes))
    failures: list[BaseException] = []
    with (
        MemoryStore.create(path, SIGNATURE, host_budget=BUDGET) as store,
        nullcontext(store) if one_store else reopened(path) as other,
    ):

        def write(text: int) -> None:
            def together(done: int) -> None:  # nobody ends before everybody has committed
                if done == 2 * CHUNK:
                    begun.wait(SECONDS)

            try:
                ingest(
                    store if text % 2 else other,
                    f"book {text}",
                    sizes[text],
                    text=text,
                    commit_bytes=1 if text < 3 else 5000,
                    after_chunk=together,
                )
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=write, args=(text,)) for text in sizes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        for text, tokens in sizes.items():
            for reader in (store, other):
                document = reader.document(f"book {text}")
                assert (document.state, document.tokens) == ("ready", tokens)
                check_content(reader, document, text)
    assert is_whole(path)


def test_one_document_is_written_by_one_writer_at_a_time(store: MemoryStore, path: Path) -> None:
    ingest(store, "two", 10)
    with (
        reopened(path) as again,
        store.write_document("one", source_hash="x", settings=SETTINGS) as writer,
        store.write_document("two", source_hash="x", settings=SETTINGS, mode="replace"),
    ):
        for one in (store, again):
            for name in ("one", "two"):
                for mode in ("new", "append", "replace"):
                    with pytest.raises(MemoryLocked, match="this process"):
                        one.write_document(name, source_hash="y", settings=SETTINGS, mode=mode)
                with pytest.raises(MemoryLocked, match="this process"):
                    one.forget(name)
        with pytest.raises(MemoryLocked, match="this process"):
            again.verify(repair=True)
        ingest(again, "three", 10, text=3)
        again.forget("three")
        writer.add_chunk(token_ids(1, 0, CHUNK), 0, chunk(1, 0, CHUNK)[0])
        check_content(store, writer.finish(), text=1)
        assert ingest(again, "one", CHUNK + 5, mode="append").state == "ready"
    store.forget("one")
    store.forget("two")
    assert store.documents() == []


def test_writers_make_room_for_each_other_in_the_tiers(path: Path) -> None:
    chunk_bytes = 3 * CHUNK_BLOCKS * HEADS * UNIT_BYTES
    with MemoryStore.create(path, SIGNATURE, host_budget=3 * chunk_bytes) as store:
        writers = {
            text: store.write_document(f"book {text}", source_hash=f"{text}", settings=SETTINGS)
            for text in (1, 2)
        }
        for number in range(6):  # none of it would be committed yet
            for text, writer in writers.items():
                first = number * CHUNK
                layers, _ = chunk(text, first // BLOCK, CHUNK)
                writer.add_chunk(token_ids(text, first, first + CHUNK), 3 * first, layers)
        for text, writer in writers.items():
            check_content(store, writer.finish(), text)
    assert is_whole(path)


def test_an_import_in_progress_is_left_alone_by_other_writers(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "book.memdoc"
    ingest(store, "book", 40 * CHUNK)
    store.export_document("book", file)
    store.forget("book")
    write = Database.write
    states: list[str] = []

    def write_another_after_the_first(database: Database, work, **options):
        result = write(database, work, **options)
        if not states:
            states.append(result.state)
            ingest(store, "beside", 20, text=2)
        return result

    monkeypatch.setattr(Database, "write", write_another_after_the_first)
    check_content(store, store.import_document(file), text=1)
    check_content(store, store.document("beside"), text=2)
    assert states == ["importing"] and is_whole(store.path)


def test_killed_writers_of_one_process_leave_each_document_absent_resumable_or_ready(
    children: ForkServer, path: Path
) -> None:
    MemoryStore.create(path, SIGNATURE).close()
    states: set[str] = set()
    for trial in range(KILLS):
        children.kill(0.02 + 0.05 * trial, "several_job", path)  # wherever that is
        assert is_whole(path)
        with reopened(path) as store:
            for document in store.documents():
                states.add(document.state)
                assert document.state == "ready" or document.tokens % CHUNK == 0
                check_content(store, document, text=int(document.name))
    assert children.run("several_job", path) == RIGHT
    with reopened(path) as store:
        assert [d.state for d in store.documents()] == ["ready"] * len(SEVERAL)
        for document in store.documents():
            assert document.tokens == SEVERAL[int(document.name)]
            check_content(store, document, text=int(document.name))


def test_writer_waits_for_another_if_asked(
    children: ForkServer, store: MemoryStore, path: Path, tmp_path: Path
) -> None:
    code = "with MemoryStore.open(arguments[0], wait_for_writer=True) as store: "
    code += "ingest(store, 'two', 10)"
    with store.write_document("one", source_hash="x", settings=SETTINGS):
        pid = children.start("python_job", tmp_path / "said", code, path)
        while not re.search(rf"-> FLOCK .* {pid} ", Path("/proc/locks").read_text()):
            time.sleep(0.01)  # until it waits
        assert not store.has("two")
    assert children.end() == RIGHT
    assert store.document("two").state == "ready"


def test_read_only_memory_is_asked_and_refuses_writing(path: Path, tmp_path: Path) -> None:
    with MemoryStore.create(path, SIGNATURE) as store:
        document = ingest(store, "book", 60)
        store.export_document("book", tmp_path / "book.memdoc")
    with reopened(path, read_only=True) as reader:
        check_content(reader, document, text=1)
        assert reader.verify().clean
        for change in (
            lambda: ingest(reader, "new", 10),
            lambda: reader.forget("book"),
            lambda: reader.import_document(tmp_path / "book.memdoc", "again"),
            reader.compact,
            lambda: reader.verify(repair=True),
        ):
            with pytest.raises(ReadOnlyMemory):
                change()
        check_content(reader, document, text=1)


def test_threads_ask_while_one_writes(path: Path) -> None:
    failures: list[BaseException] = []
    with MemoryStore.create(path, SIGNATURE, host_budget=60 * UNIT_BYTES * HEADS * 3) as store:
        document = ingest(store, "book", 10 * CHUNK)
        done = threading.Event()

        def ask(seed: int) -> None:
            random = np.random.default_rng(seed)
            try:
                while not done.is_set():
                    number = int(random.integers(document.blocks))
                    layer = int(random.choice([1, 2]))
                    scope = [(document.id, 0, document.blocks)]
                    q = block(1, layer, number)[2].float()[:, None]
                    assert store.retrieval.search_landmarks(
                        layer, q, scope, document.blocks
                    ).candidates.unique().tolist() == list(range(document.blocks))
                    with store.lease(
                        [BlockKey(document.id, layer, number, head) for head in (1, 0)]
                    ) as lease:
                        assert torch.equal(lease.k[lease.slots], block(1, layer, number)[0].flip(0))
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for text in range(2, 5):
            check_content(
                store,
                ingest(store, f"book {text}", 15 * CHUNK + text, text=text, commit_bytes=4000),
                text,
            )
        store.forget("book 3")
        done.set()
        for thread in threads:
            thread.join(60)
        assert not failures
        assert is_whole(store.path)


# Budgets


def test_host_budget_holds_while_reading_and_writing_more(path: Path) -> None:
    budget = 40 * UNIT_BYTES * HEADS
    with MemoryStore.create(path, SIGNATURE, host_budget=budget) as store:
        held: list[int] = []
        document = ingest(
            store,
            "book",
            30 * CHUNK,
            commit_bytes=16 << 20,
            after_chunk=lambda _: held.append(store.tier_stats()["host"]["held"]),
        )
        check_content(store, document, text=1)
        assert max(held) <= budget and store.stats()["tiers"]["host"]["held"] <= budget
        with pytest.raises(BudgetExceeded) as refused:
            store.lease([BlockKey(document.id, 1, number, 0) for number in range(100)])
        assert refused.value.fits == 80 == store.tiers.capacity
    with (
        reopened(path, host_budget=5 * UNIT_BYTES * HEADS) as small,
        pytest.raises(BudgetExceeded, match="raise"),
    ):
        ingest(small, "too large a chunk", CHUNK)


def test_quota_stops_an_ingest_with_the_memory_intact(path: Path) -> None:
    with MemoryStore.create(path, SIGNATURE, quota=600_000, host_budget=BUDGET) as store:
        first = ingest(store, "first", 10 * CHUNK)
        with pytest.raises(StorageFull, match="quota"):
            ingest(store, "second", 4000 * CHUNK, text=2, commit_bytes=10_000)
        second = store.document("second")
        assert (
            second.state == "ingesting"
            and 0 < second.tokens < 4000 * CHUNK
            and second.tokens % CHUNK == 0
        )
        check_content(store, first, text=1)
        check_content(store, second, text=2)
        assert is_whole(store.path)
        assert store.stats()["file_bytes"] <= store.quota == 600_000
        store.forget("second")
        check_content(store, ingest(store, "third", 10 * CHUNK, text=3), text=3)
        store.set_quota(None)
        check_content(store, ingest(store, "fourth", 300 * CHUNK, text=4), text=4)


@pytest.mark.parametrize("mode", ["new", "replace"])
def test_an_ingest_that_finds_no_room_for_a_block_leaves_no_row(path: Path, mode: str) -> None:
    name = "first" if mode == "replace" else "second"
    with MemoryStore.create(path, SIGNATURE, quota=600_000, host_budget=BUDGET) as store:
        first = ingest(store, "first", 10 * CHUNK)
        with pytest.raises(StorageFull, match="quota"):
            ingest(store, name, 4000 * CHUNK, text=2, mode=mode, commit_bytes=16 << 20)
        assert store.documents() == [first]
        check_content(store, first, text=1)
    with closing(Catalog.open(path)) as catalog, catalog.database.read() as txn:
        assert catalog.documents(txn) == [first]  # nor one that would have replaced it
    with MemoryStore.open(path) as store:
        check_content(store, ingest(store, name, 20 * CHUNK, text=3, mode=mode), text=3)
        assert is_whole(path)


def test_a_document_whose_commit_stands_is_kept_whatever_fails_behind_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true, failed = Environment._write, []

    def write(self: Environment, work: Any, *, beyond_limit: bool) -> Any:
        if beyond_limit and work.__name__ == "<lambda>" and not failed:  # behind the commit
            failed.append(work)
            raise lmdb.DiskError("No space left on device")
        return true(self, work, beyond_limit=beyond_limit)

    with MemoryStore.create(path, SIGNATURE, host_budget=BUDGET) as store:
        ingest(store, "book", 5 * CHUNK)
        monkeypatch.setattr(Environment, "_write", write)
        with pytest.raises(StorageFull):
            ingest(store, "book", 5 * CHUNK, text=2, mode="replace", commit_bytes=16 << 20)
        assert failed
    with MemoryStore.open(path) as store:
        check_content(store, store.document("book"), text=2)


# Scratch


def test_scratch_documents_live_in_memory_only() -> None:
    with MemoryStore.in_memory(SIGNATURE, host_budget=BUDGET) as store:
        assert store.documents() == [] and store.path is None
        with store.retrieval.session_document() as own, store.retrieval.session_document() as other:
            assert own.document < 0 and other.document < 0 and own.document != other.document
            for layer in range(3):
                for first in (0, 4):
                    layers, _ = chunk(1, first, CHUNK)
                    assert own.add(layer, *layers[layer]) == first
            own.trim(3)
            assert own.blocks(1) == (3, 8)
            q = block(1, 1, 5)[2].float()[:, None]
            assert store.retrieval.search_landmarks(
                1, q, [(own.document, 3, 8)], 5
            ).candidates.sort().values[0, 0].tolist() == [0, 1, 2, 3, 4]
            with store.lease([BlockKey(own.document, 1, 5, 1)]) as lease:
                assert torch.equal(lease.v[lease.slots[0]], block(1, 1, 5)[1][1])
            for gone in (BlockKey(own.document, 1, 2, 1), BlockKey(other.document, 1, 0, 0)):
                with pytest.raises(DocumentNotFound):
                    store.lease([gone])
            own.trim(99, layers=[0])
            assert own.blocks(0) == (8, 8) and own.blocks(2) == (3, 8)
            own.add(0, *chunk(1, 8, CHUNK)[0][0])
            assert own.blocks(0) == (8, 12)
        assert store.stats()["tiers"]["host"]["held"] == 0
        with pytest.raises(DocumentNotFound):
            store.retrieval.landmark_keys(1, [(own.document, 3, 8)])
        with pytest.raises((DocumentNotFound, ReadOnlyMemory)):
            ingest(store, "book", 10)


def test_scratch_beyond_the_budget_is_refused_whole() -> None:
    with (
        MemoryStore.in_memory(SIGNATURE, host_budget=10 * UNIT_BYTES) as store,
        store.retrieval.session_document() as own,
    ):
        own.add(1, *chunk(1, 0, CHUNK)[0][1])
        with pytest.raises(BudgetExceeded):
            own.add(1, *chunk(1, 4, CHUNK)[0][1])
        assert own.blocks(1) == (0, 4)


# Export and import


def test_export_and_import_carry_a_document_into_another_memory(
    store: MemoryStore, path: Path, tmp_path: Path
) -> None:
    ingest(store, "unrelated", 10, text=9)
    document = ingest(store, "book", 80 * CHUNK + 5)
    file = tmp_path / "book.memdoc"
    assert store.export_document("book", file) == file.stat().st_size
    with MemoryStore.create(tmp_path / "other", SIGNATURE, codec="raw") as other:
        imported = other.import_document(file)
        assert replace(imported, id=document.id) == replace(document, bytes=imported.bytes)
        check_content(other, imported, text=1)
        assert other.import_document(file) == imported
        check_content(other, other.import_document(file, "again"), text=1)
        assert is_whole(other.path)
        ingest(other, "taken", 10, text=5)
        with pytest.raises(DocumentExists):
            other.import_document(file, "taken")
        check_content(other, ingest(other, "book", 90 * CHUNK, mode="append"), text=1)
    with pytest.raises(Stop):
        ingest(store, "part", 9 * CHUNK, text=2, after_chunk=interrupt_at(CHUNK))
    with pytest.raises(InvalidInput, match="partly"):
        store.export_document("part", tmp_path / "part")
    with pytest.raises(InvalidInput):
        store.export_document("book", tmp_path / "no such directory" / "file")


@pytest.mark.parametrize("there", ["data.mdb", "new", "text", "link", "device", "folder"])
def test_an_export_takes_the_place_of_nothing_but_an_export(
    store: MemoryStore, path: Path, tmp_path: Path, there: str
) -> None:
    document = ingest(store, "book", 50)
    (tmp_path / "text").write_text("my own words")
    (tmp_path / "link").symlink_to(tmp_path / "text")
    (tmp_path / "device").symlink_to("/dev/null")
    (tmp_path / "folder").mkdir()
    file = (path if there in ("data.mdb", "new") else tmp_path) / there
    before = os.path.lexists(file) and os.lstat(file)
    with pytest.raises(InvalidInput, match="name a"):
        store.export_document("book", file)
    assert (os.path.lexists(file) and os.lstat(file)) == before
    assert (tmp_path / "text").read_text() == "my own words"
    assert is_whole(path) and store.documents() == [document]


def test_an_export_takes_the_place_of_an_older_one(store: MemoryStore, tmp_path: Path) -> None:
    ingest(store, "book", 50)
    file = tmp_path / "file"
    file.touch()
    store.export_document("book", file)
    whole = file.read_bytes()
    file.write_bytes(whole[:200])  # of an interrupted copy
    store.export_document("book", file)
    assert file.read_bytes() == whole


def test_import_refuses_another_models_or_damaged_file_and_leaves_the_memory_as_it_was(
    store: MemoryStore, path: Path, tmp_path: Path
) -> None:
    ingest(store, "book", 6 * CHUNK + 5)
    file = tmp_path / "book.memdoc"
    store.export_document("book", file)
    store.forget("book")
    kept = ingest(store, "kept", 20, text=2)
    before = stored(path)
    data = file.read_bytes()
    bad = tmp_path / "bad"
    random = np.random.default_rng(0)
    for trial in range(120):
        if trial < 80:
            at = int(random.integers(len(data)))
            changed = data[:at] + bytes([data[at] ^ int(1 << random.integers(8))]) + data[at + 1 :]
        elif trial < 110:
            changed = data[: int(random.integers(len(data)))]
        else:
            changed = data + data[: int(random.integers(1, 100))]
        bad.write_bytes(changed)
        with pytest.raises(InvalidInput):
            store.import_document(bad)
    for missing in (tmp_path / "nothing", tmp_path):
        with pytest.raises(InvalidInput):
            store.import_document(missing)
    assert stored(path) == before
    with MemoryStore.create(tmp_path / "other", OTHER_MODEL) as other:
        with pytest.raises(WrongModel, match="weights"):
            other.import_document(file)
        assert other.documents() == []
    check_content(store, kept, text=2)
    check_content(store, store.import_document(file), text=1)


def test_what_an_interrupted_import_left_is_never_seen_and_goes_with_the_next_write(
    store: MemoryStore, tmp_path: Path
) -> None:
    book = ingest(store, "book", 40)
    row = replace(book, id=77, name="comes", state="importing", tokens=0, blocks=0)
    with opened_tables(store.path) as catalog:
        catalog.database.write(lambda txn: catalog.put_document(txn, row))
        assert [d.name for d in store.documents()] == ["book"]
        assert is_whole(store.path)
        ingest(store, "next", 10)
        with catalog.database.read() as txn:
            assert [d.name for d in catalog.documents(txn)] == ["book", "next"]


@pytest.mark.parametrize("written", [True, False])
def test_a_memory_whose_directory_was_removed_says_so(
    path: Path, tmp_path: Path, written: bool
) -> None:
    with MemoryStore.create(path, SIGNATURE, host_budget=BUDGET) as store:
        ingest(store, "book", 100)
        store.export_document("book", tmp_path / "export")
    with reopened(path) as store:
        document = ingest(store, "next", 50, text=2) if written else store.document("book")
        path.rename(tmp_path / "moved")
        for verb in (
            lambda: ingest(store, "more", 100),
            lambda: ingest(store, "book", 200, mode="append"),
            lambda: store.import_document(tmp_path / "export", "again"),
            lambda: store.forget("book"),
            lambda: store.set_quota(1 << 30),
            store.compact,
            store.stats,
            store.verify,
        ):
            with pytest.raises(MemoryNotFound):
                verb()
        check_content(store, document, text=2 if written else 1)  # as it was
    assert not path.exists() and is_whole(tmp_path / "moved")


def test_a_memory_whose_directory_was_made_anew_is_not_written_to_by_who_had_the_old_one_open(
    path: Path, tmp_path: Path
) -> None:
    with MemoryStore.create(path, SIGNATURE, host_budget=BUDGET) as store:
        ingest(store, "book", 100)
        store.export_document("book", tmp_path / "export")
    with reopened(path) as reader, reopened(path) as store:
        document = ingest(store, "next", 50, text=2)
        shutil.rmtree(path)
        with MemoryStore.create(path, SIGNATURE, host_budget=BUDGET) as other:
            ingest(other, "another", 100, text=3)
            before = stored(path)
            for opened in (store, reader):
                for verb in (
                    lambda opened=opened: ingest(opened, "more", 100),
                    lambda opened=opened: opened.import_document(tmp_path / "export", "again"),
                    lambda opened=opened: opened.forget("book"),
                    lambda opened=opened: opened.forget("book", erase=True),
                    lambda opened=opened: opened.set_quota(1 << 30),
                    opened.compact,
                ):
                    with pytest.raises(MemoryNotFound, match="replaced"):
                        verb()
                check_content(opened, document, text=2)
            assert stored(path) == before
            ingest(other, "more", 30, text=3)  # its lock was given back
    assert is_whole(path)


# Verify


def test_verify_names_the_damaged_document_and_repair_drops_it_whole(path: Path) -> None:
    with MemoryStore.create(path, SIGNATURE) as store:
        whole = ingest(store, "whole", 100, text=2)
        damaged = ingest(store, "damaged", 100)
        report = store.verify()
        assert report.clean and report.documents == 2
        assert report.bytes == whole.bytes + damaged.bytes

        def flip(txn) -> None:
            key, value = next(
                item for item in txn.scan("blocks") if item[0] > damaged.id.to_bytes(8, "big")
            )
            txn.put("blocks", key, bytes(value[:-1]) + bytes([value[-1] ^ 1]))

        with opened_tables(path) as catalog:
            catalog.database.write(flip)
        assert not is_whole(path)
        report = store.verify(repair=True)
        assert [(p.document, p.name) for p in report.problems] == [(damaged.id, "damaged")]
        assert report.dropped == ["damaged"] and report.documents == 1
        assert [d.name for d in store.documents()] == ["whole"]
        check_content(store, whole, text=2)
        assert is_whole(path)
        check_content(store, ingest(store, "damaged", 100), text=1)


@pytest.mark.parametrize("table", ["blocks", "tokens", "landmarks", "documents"])
def test_verify_misses_nothing_that_is_missing(path: Path, table: str) -> None:
    with MemoryStore.create(path, SIGNATURE) as store:
        document = ingest(store, "book", 100)

        def drop_one(txn) -> None:
            txn.delete(table, next(txn.scan(table))[0])

        with opened_tables(path) as catalog:
            catalog.database.write(drop_one)
    if table != "documents":
        events = list(walk(path, set()))
        assert [event["document"] for event in events if event["event"] == "problem"] == [
            document.id
        ]
        return
    report = verify_memory(path, repair=True)
    assert [problem.document for problem in report.problems] == [document.id]
    assert is_whole(path)
    with MemoryStore.open(path) as store:
        assert store.documents() == []


def test_verify_survives_pages_that_end_the_process_and_repair_saves_the_rest(path: Path) -> None:
    with MemoryStore.create(path, SIGNATURE) as store:
        ingest(store, "one", 400 * CHUNK, text=1, commit_bytes=1 << 20)
        ingest(store, "two", 100, text=2)
    data = path / "data.mdb"
    pages = bytearray(data.read_bytes())
    # a leaf in the middle of the first document's records
    for page in range(2, len(pages) // 4096):
        start = page * 4096
        flags = int.from_bytes(pages[start + 10 : start + 12], "little")
        if (
            flags == 2
            and pages[start : start + 4096].count(b"mR") > 3
            and page > len(pages) // 8192
        ):
            pages[start + 16 : start + 64] = b"\xff" * 48
            break
    data.write_bytes(pages)
    report = verify_memory(path, repair=True)
    assert {problem.name for problem in report.problems} == {"one"}
    assert report.dropped == ["one"]
    assert is_whole(path)
    with MemoryStore.open(path) as store:
        assert [d.name for d in store.documents()] == ["two"]
        check_content(store, store.document("two"), text=2)
        ingest(store, "three", 300, text=3)


def test_verify_of_what_is_no_memory(tmp_path: Path) -> None:
    with pytest.raises(MemoryNotFound):
        verify_memory(tmp_path)


# Statistics and speed


def test_stats_count_what_is_held_and_looked_up(store: MemoryStore) -> None:
    document = ingest(store, "book", 100)
    with store.lease([BlockKey(document.id, 1, 0, 0), BlockKey(document.id, 1, 0, 1)]):
        pass
    with store.lease([BlockKey(document.id, 1, 0, 0)]) as lease:
        assert lease.missed.tolist() == [False]
    store.retrieval.search_landmarks(
        1, torch.zeros(HEADS, 3, DIM), [(document.id, 0, document.blocks)], 2
    )
    stats = store.stats()
    assert (stats["documents"], stats["tokens"], stats["blocks"], stats["bytes"]) == (
        1,
        100,
        25,
        document.bytes,
    )
    assert stats["tiers"]["host"]["misses"] == 2 and stats["tiers"]["host"]["hits"] == 1
    assert stats["tiers"]["disk"]["hits"] == 2 and stats["tiers"]["disk"]["bytes"] == 2 * UNIT_BYTES
    assert (
        stats["index"]["searches"] == 1
        and stats["index"]["rows"] == 3 * HEADS
        and stats["landmarks"] > 0
    )
    assert stats["index"]["kind"] == "auto" and stats["index"]["landmarks"] == dict.fromkeys(
        (1, 2), 25
    )
    assert stats["codec"] == store.codec == "zstd"
    assert store.tiers.layers()["host"][1].misses == 2


def test_tokens_come_with_where_their_characters_begin(store: MemoryStore) -> None:
    document = ingest(store, "book", 100)
    for first, end in ((0, 100), (5, 6), (CHUNK, CHUNK + 3), (99, 100), (30, 60), (100, 100)):
        span = store.tokens("book", first, end)
        assert np.array_equal(span.ids, token_ids(1, first, end))
        assert span.char_start + 3 * len(span.before) == 3 * first
    assert len(store.tokens(document.id, 95).ids) == 5
    with pytest.raises(DocumentNotFound):
        store.tokens("other", 0, 1)
