"""A tiny passage model and a memory of an inventory."""

from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.model.passages.selectors.adaptation import Adaptation
from memstore.model.passages.selectors.pointer_heads import PointerHeads
from memstore.model.passages.selectors.selector_sum import Sum, Words
from memstore.store.memory_store import MemoryStore
from support.tiny_decoder import decoder, tokenizer

WINDOW, GONE = 256, 64  # tokens
QUESTION = "How much does the copper anchor of the orchard weigh?"
KETTLE, LADDER = "The red kettle of the mill has no lid. ", "The grey ladder of the quarry broke. "
DOCUMENT = KETTLE * 8 + LADDER * 8


def reader_of(pointing=False, **adapted):
    """A window of 256 tokens; found by words, or by words and pointer heads."""
    made = HuggingFacePassageModel(
        decoder("llama"), tokenizer(), Adaptation(Words(), **{"top_k": 1, **adapted})
    )
    if pointing:
        shape = made.shape
        sizes = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        heads = PointerHeads([(2, 1), (1, 3)], sizes, made.rotate)
        made.selector = Sum([(heads, 1.0), (Words(), 50.0)])
    made.lookup = made.lookup.changed(local_tokens=WINDOW)
    return made


def memory(reader, tmp_path, **options):
    store = MemoryStore.create(tmp_path / "m", reader.signature, selector=reader.keeps, **options)
    reader.ingest(DOCUMENT, store, name="inventory")
    return store
