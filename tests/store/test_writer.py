"""The two threads behind a document's writer: one encodes while the other commits, and neither
loses an error.
"""

import threading
from pathlib import Path

import pytest

from memstore.disk.lmdb.database import Database
from memstore.disk.tables.block_table import BlockTable
from memstore.store.memory_store import MemoryStore
from support.counting_source import SECONDS
from support.synthetic_documents import (
    BLOCK,
    CHUNK,
    CHUNK_BLOCKS,
    DIM,
    HEADS,
    SETTINGS,
    SIGNATURE,
    check_content,
    chunk,
    ingest,
    token_ids,
)

CHUNK_BYTES = len(SIGNATURE.memory_layers) * CHUNK_BLOCKS * HEADS * 2 * BLOCK * DIM * 2


def test_the_next_chunk_is_encoded_while_one_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committing, go, encoded = threading.Event(), threading.Event(), threading.Semaphore(0)
    write, encode = Database.write, BlockTable.encode

    def stand_still(*arguments, **options):
        committing.set()
        assert go.wait(SECONDS)
        return write(*arguments, **options)

    def count(*arguments):
        records = encode(*arguments)
        if arguments[1].block >= CHUNK_BLOCKS:
            encoded.release()
        return records

    with MemoryStore.create(tmp_path / "m", SIGNATURE) as store:
        writer = store.write_document(
            "book", source_hash="1", settings=SETTINGS, commit_bytes=CHUNK_BYTES
        )
        monkeypatch.setattr(Database, "write", stand_still)
        monkeypatch.setattr(BlockTable, "encode", count)
        with writer:
            for number in range(2):
                first = number * CHUNK
                writer.add_chunk(
                    token_ids(1, first, first + CHUNK),
                    first * 3,
                    *chunk(1, number * CHUNK_BLOCKS, CHUNK),
                )
                assert committing.wait(SECONDS)
            assert encoded.acquire(timeout=SECONDS), (
                "the second chunk waits for the first one's commit"
            )
            assert store.document("book").blocks == 0
            go.set()
            document = writer.finish()
        check_content(store, document, text=1)


def test_an_error_of_the_encoder_ends_the_writing_after_what_came_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = BlockTable.encode

    def fail(*arguments):
        if arguments[1].block == 3 * CHUNK_BLOCKS:
            raise MemoryError("no room for records")
        return encode(*arguments)

    with MemoryStore.create(tmp_path / "m", SIGNATURE) as store:
        with monkeypatch.context() as patched:
            patched.setattr(BlockTable, "encode", fail)
            with pytest.raises(MemoryError, match="no room for records"):
                ingest(store, "book", 9 * CHUNK, commit_bytes=CHUNK_BYTES)
        document = store.document("book")
        assert document.state == "ingesting" and document.blocks == 3 * CHUNK_BLOCKS
        check_content(store, ingest(store, "book", 9 * CHUNK), text=1)
