"""Every architecture: a document that was stored, and read whole, gives the logits that the stock
model gives for the same text; or the architecture is refused by name.
"""

import pytest
import torch
from tiny_decoder import decoder, tokenizer

from memstore.errors import InvalidWeights
from memstore.store.memory_store import MemoryStore

pytest.importorskip("transformers")

from memstore.hf.reader import HuggingFaceReader
from memstore.model.adaptation import UNADAPTED
from memstore.model.chosen import Chosen

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS = {
    "llama": {},
    "llama, scaled as Llama 3": {"rope_parameters": {"rope_theta": 1e4, **LLAMA3}},
    "llama, YaRN": {"rope_parameters": {"rope_theta": 1e4, **YARN}},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 50},
    "mixtral": {"num_local_experts": 4},
    "gemma": {},
    "gemma2": {"sliding_window": 50},
    "gemma3_text": {"sliding_window": 50, "num_hidden_layers": 6},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {},
    "glm": {},
    "glm4": {},
    "olmo2": {},
    "stablelm": {},
    "granite": {"logits_scaling": 3.0},
    "cohere": {},
    "cohere2": {"sliding_window": 50},
    "smollm3": {"no_rope_layer_interval": 2},
    "gpt_neox": {"num_key_value_heads": 4},
}
TEXT = "The keeper of the seventh lighthouse counts nine bells. " * 40
TOLERANCE = 2e-4  # of the largest logit: float32, in another order


@pytest.mark.parametrize("kind", KINDS)
def test_reads_what_the_stock_model_would_have_read(kind, tmp_path):
    model = decoder(kind.partition(",")[0], **KINDS[kind])
    reader = HuggingFaceReader(model, tokenizer(), UNADAPTED, kv_dtype=torch.float32)
    reader.lookup = reader.lookup.changed(chunk_blocks=1)  # blocks see one another as stored
    reader.window_blocks = 16  # all of them
    with MemoryStore.create(tmp_path / "m", reader.signature, selector=reader.keeps) as store:
        document = reader.ingest(TEXT, store, name="text")
        ids = store.tokens("text").ids.tolist()
        blocks = [Chosen(document.id, block, 0.0) for block in range(document.blocks)]
        question, _ = reader.turn_ids("How many bells?", first=True)
        # the whole blocks alone: behind a short one there would be a gap
        whole = len(ids) // 64
        with reader.session(store, retrieve=False, top_k=whole, margin=0) as session:
            session.read(blocks[:whole])
            with torch.no_grad():
                ours = session.logits(session.feed(question))
    text = [*reader.prefix_ids, *ids[: whole * 64], *question]
    with torch.no_grad():
        stock = model(torch.tensor([text])).logits[0, -len(question) :].float()
    assert whole >= 5 and document.blocks == whole + 1
    torch.testing.assert_close(ours, stock, rtol=0, atol=TOLERANCE * float(stock.abs().max()))


@pytest.mark.parametrize(
    ("kind", "changed", "why"),
    [
        ("opt", {"word_embed_proj_dim": 64, "ffn_dim": 96}, "no rotary positions"),
        ("llama4_text", {}, "in a way of its own"),
        ("gemma4_text", {}, "different shapes"),
        ("gpt_oss", {"num_local_experts": 4}, "s_aux"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "dynamic RoPE",
        ),
        (
            "phi3",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "original_max_position_embeddings": 256,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                }
            },
            "LongRoPE",
        ),
        ("deepseek_v3", {}, "not known here"),
    ],
)
def test_refuses_by_name_what_cannot_have_a_memory(kind, changed, why):
    with pytest.raises(InvalidWeights, match=why):
        HuggingFaceReader(decoder(kind, **changed), tokenizer(), UNADAPTED)


def test_half_precision_reads_as_the_stock_model_does_to_its_rounding(tmp_path):
    model = decoder("llama").to(torch.bfloat16)
    reader = HuggingFaceReader(model, tokenizer(), UNADAPTED)
    reader.window_blocks = 16  # the whole text
    with MemoryStore.create(tmp_path / "m", reader.signature, selector=reader.keeps) as store:
        document = reader.ingest(TEXT, store, name="text")
        ids = store.tokens("text").ids.tolist()
        question, _ = reader.turn_ids("How many bells?", first=True)
        whole = len(ids) // 64
        with reader.session(store, retrieve=False, top_k=whole, margin=0) as session:
            session.read([Chosen(document.id, block, 0.0) for block in range(whole)])
            with torch.no_grad():
                ours = session.logits(session.feed(question))
    text = torch.tensor([[*reader.prefix_ids, *ids[: whole * 64], *question]])
    with torch.no_grad():
        exact = model.float()(text).logits[0, -len(question) :]
        stock = model.bfloat16()(text).logits[0, -len(question) :].float()
    allowed = 3 * float((stock - exact).abs().max())  # no further off than the model itself is
    assert float((ours - exact).abs().max()) <= allowed
