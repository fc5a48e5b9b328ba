"""A memory with a spoiled page of keys."""

from pathlib import Path

from memstore.store.memory_store import MemoryStore
from support.synthetic_documents import CHUNK, ingest

BUDGET = 1 << 20


def damage_tree(memory: Path) -> None:
    """Spoil a page of keys of a new document's records, which only a new file repairs."""
    with MemoryStore.open(memory, host_budget=BUDGET) as store:
        write = ingest(store, "damaged", 50 * CHUNK, text=1, commit_bytes=1 << 20).write
    data = bytearray((memory / "data.mdb").read_bytes())
    for page in reversed(range(0, len(data), 4096)):
        if data[page + 10] == 2 and data[page : page + 4096].count(write) > 3:
            data[page + 16 : page + 64] = b"\xff" * 48
            break
    (memory / "data.mdb").write_bytes(data)
