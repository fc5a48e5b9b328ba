"""A tiny passage model and a memory of an inventory."""

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
