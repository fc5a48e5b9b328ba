"""Every architecture gives the stock model's logits for a stored document that is read whole, or is
refused by name.
"""

from dataclasses import replace

import pytest
import torch

from memstore.errors import InvalidWeights
from memstore.store.memory_store import MemoryStore
from support.tiny_decoder import KINDS, decoder, of_kind, tokenizer

pytest.importorskip("transformers")

from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.model.passages.adaptation import UNADAPTED
from memstore.model.passages.selector import Chosen

TEXT = " ".join(
    f"The keeper of lighthouse {number} counts {number * 7} bells, and none of them is his own."
    for number in range(12)
)
SEPARATOR = replace(UNADAPTED, separator="\n\nQuestion: ")
TOLERANCE = 2e-4  # of the largest logit: float32, in another order


def prompted(reader, store, blocks, question):
    """Logits of a question that reads passages, and the ids of the prompt that means the same."""
    document = store.document("text")
    chosen = [Chosen(document.id, block) for block in blocks]
    with reader.session(store, retrieve=False, top_k=len(blocks)) as session:
        session.read(chosen)
        with torch.no_grad():
            ours = session.logits(session.feed(question))
    read = [token for block in blocks for token in store.passages("text")[block].ids.tolist()]
    return ours, [*reader.prefix_ids, *read, *reader.separator_ids, *question]


def stored(reader, directory, keep="kv"):
    store = MemoryStore.create(
        directory / "m", reader.signature, selector=reader.keeps, codec="zstd"
    )
    reader.ingest(TEXT, store, name="text", keep=keep)
    return store


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_passage_gives_the_logits_of_the_same_text_in_the_prompt(kind, tmp_path):
    model = of_kind(kind)
    reader = HuggingFacePassageModel(model, tokenizer(), SEPARATOR, kv_dtype=torch.float32)
    question, _ = reader.turn_ids("How many bells?", first=True)
    for keep, blocks in (("kv", [1]), ("text", [0, 2])):
        with stored(reader, tmp_path / keep, keep) as store:
            assert store.document("text").blocks >= 3
            found, ids = prompted(reader, store, blocks, question)
        with torch.no_grad():
            stock = model(torch.tensor([ids])).logits[0, -len(question) :].float()
        torch.testing.assert_close(found, stock, rtol=0, atol=TOLERANCE * float(stock.abs().max()))


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 256}
LONG |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("kind", "changed", "why"),
    [
        ("opt", {"word_embed_proj_dim": 64, "ffn_dim": 96}, "no rotary positions"),
        ("llama4_text", {}, "rotary positions in its own way"),
        ("gemma4_text", {"vocab_size_per_layer_input": 4096}, "different shapes"),
        ("gpt_oss", {"num_local_experts": 4}, "s_aux"),
        ("doge", {}, "attends with attention_mask"),
        ("llama", {"rope_parameters": DYNAMIC}, "dynamic RoPE"),
        ("phi3", {"rope_parameters": LONG}, "LongRoPE"),
        ("deepseek_v3", {}, "is not supported"),
    ],
)
def test_unsupported_architectures_are_refused_by_name(kind, changed, why):
    with pytest.raises(InvalidWeights, match=why):
        HuggingFacePassageModel(decoder(kind, **changed), tokenizer(), UNADAPTED)


@pytest.mark.parametrize("kind", ["llama", "olmo2"])  # OLMo 2 rotates in float32
def test_half_precision_equals_the_stock_model_to_rounding(kind, tmp_path):
    model = decoder(kind).to(torch.bfloat16)
    reader = HuggingFacePassageModel(model, tokenizer(), SEPARATOR)
    question, _ = reader.turn_ids("How many bells?", first=True)
    with stored(reader, tmp_path) as store:
        ours, prompt = prompted(reader, store, [1], question)
    with torch.no_grad():
        exact = model.float()(torch.tensor([prompt])).logits[0, -len(question) :]
        stock = model.bfloat16()(torch.tensor([prompt])).logits[0, -len(question) :].float()
    allowed = 3 * float((stock - exact).abs().max())  # no further off than the model itself is
    assert float((ours - exact).abs().max()) <= allowed
