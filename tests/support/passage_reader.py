"""A tiny passage model and a memory of an inventory."""

from torch import Tensor

from memstore.block import BlockKey
from memstore.store.memory_store import MemoryStore
from support.tiny_decoder import learned_selector, word_reader

WINDOW, GONE = 256, 64  # tokens
QUESTION = "How much does the copper anchor of the orchard weigh?"
KETTLE, LADDER = "The red kettle of the mill has no lid. ", "The grey ladder of the quarry broke. "
DOCUMENT = KETTLE * 8 + LADDER * 8


def reader_of(learned=False, **adapted):
    """A window of 256 tokens; found by words, or by words and a learned projection."""
    made = word_reader(**adapted)
    if learned:
        made.selector = learned_selector(made, word_weight=50.0)
    made.lookup = made.lookup.changed(local_tokens=WINDOW)
    return made


def memory(reader, tmp_path, **options):
    store = MemoryStore.create(tmp_path / "m", reader.signature, selector=reader.keeps, **options)
    reader.ingest(DOCUMENT, store, name="inventory", keep="kv")
    return store


def keys_and_values(store: MemoryStore, name: str) -> dict[int, tuple[Tensor, Tensor]]:
    """Everything that is stored of a document's keys and values, by block."""
    document = store.document(name)
    found = {}
    for block in range(document.blocks):
        ((number, at),) = store.retrieval.stored_at([(document.id, block)])
        with store.lease([BlockKey(number, 0, at, 0)]) as lease:
            rows, keys, values = lease.tokens()
            found[block] = rows[keys], rows[values]
    return found
