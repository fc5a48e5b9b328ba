"""A tiny passage model and a memory of an inventory."""

from memstore.model.passages.selectors.selector_sum import Sum, Words
from memstore.store.memory_store import MemoryStore
from support.tiny_decoder import pointer_heads, word_reader

WINDOW, GONE = 256, 64  # tokens
QUESTION = "How much does the copper anchor of the orchard weigh?"
KETTLE, LADDER = "The red kettle of the mill has no lid. ", "The grey ladder of the quarry broke. "
DOCUMENT = KETTLE * 8 + LADDER * 8


def reader_of(pointing=False, **adapted):
    """A window of 256 tokens; found by words, or by words and pointer heads."""
    made = word_reader(**adapted)
    if pointing:
        heads = pointer_heads(made, (2, 1), (1, 3))
        made.selector = Sum([(heads, 1.0), (Words(), 50.0)])
    made.lookup = made.lookup.changed(local_tokens=WINDOW)
    return made


def memory(reader, tmp_path, **options):
    store = MemoryStore.create(tmp_path / "m", reader.signature, selector=reader.keeps, **options)
    reader.ingest(DOCUMENT, store, name="inventory")
    return store
