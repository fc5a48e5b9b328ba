"""Random decoders of real architectures, small enough for a test, and a tokenizer for them."""

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from memstore.model.landmark.landmark_model import SHIPPED

if TYPE_CHECKING:
    from memstore.hf.reading_adapter import Kind, ReadingAdapter

CHAT = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, dict[str, Any]] = {
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
    "jetmoe": {"kv_channels": 16, "num_key_value_heads": 4},
    "afmoe": {"sliding_window": 50, "num_experts": 4, "num_experts_per_tok": 2},
}


def tokenizer(chat: bool = True) -> Any:
    """Byte-level, with a chat template or none."""
    transformers = pytest.importorskip("transformers")
    made = transformers.PreTrainedTokenizerFast(tokenizer_file=str(SHIPPED / "tokenizer.json"))
    special = ["<|user|>", "<|assistant|>", "<|end|>"]
    made.add_special_tokens({"eos_token": "<|end|>", "additional_special_tokens": special[:2]})
    if chat:
        made.chat_template = CHAT
    return made


@cache
def _vocabulary() -> int:
    return len(tokenizer())


def decoder(kind: str, **changed: Any) -> Any:
    """A model of this model type with random weights, the same ones every time."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    vocabulary = _vocabulary()
    config = transformers.AutoConfig.for_model(
        kind, **{**_SIZES, "vocab_size": vocabulary, **changed}
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # drawn small, they would attend to everything alike
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    return model


def saved(path: Path, *, chat: bool = True, **changed: Any) -> Path:
    """The directory of a Llama and its tokenizer."""
    decoder("llama", **changed).save_pretrained(path)
    tokenizer(chat).save_pretrained(path)
    return path


def word_reader(model: Any = None, *, chat: bool = True, **adapted: Any) -> Any:
    """A passage model over one (None: a Llama) whose passages are found by words; adapted: as
    Adaptation takes it.
    """
    model = decoder("llama") if model is None else model
    from memstore.hf.passage_adapter import HuggingFacePassageModel
    from memstore.model.passages.adaptation import Adaptation
    from memstore.model.passages.selector import Selector

    adaptation = Adaptation(Selector(), **{"top_k": 1, **adapted})
    return HuggingFacePassageModel(model, tokenizer(chat), adaptation)


def learned_selector(reader: Any, *, layer: int = 2, word_weight: float = 0.0) -> Any:
    """A selector of a passage model: a random projection of the states of a layer, and words."""
    from memstore.model.passages.selector import Learned, Projection, Selector

    draw, hidden = torch.Generator().manual_seed(0), reader.shape.hidden_size
    zeros = [torch.zeros(hidden) for _ in range(3)]
    ones = [torch.ones(hidden) for _ in range(2)]
    idf = torch.ones(reader.made_for.vocabulary, dtype=torch.float16)
    random = torch.randn(hidden, 16, generator=draw)
    projection = Projection(random, zeros[0], ones[0], zeros[1], ones[1], zeros[2], idf)
    return Selector(Learned(layer, projection), word_weight)


def of_kind(kind: str) -> Any:
    """A model of one of KINDS."""
    return decoder(kind.partition(",")[0], **KINDS[kind])


def saved_gguf(path: Path) -> Path:
    """A GGUF file of the same Llama and tokenizer, in float32."""
    gguf = pytest.importorskip("gguf")
    model, cut = decoder("llama"), tokenizer()
    config, ids = model.config, cut.get_vocab()
    file = gguf.GGUFWriter(path, "llama")
    file.add_block_count(config.num_hidden_layers)
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(config.num_key_value_heads)
    file.add_key_length(config.head_dim)
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_tokenizer_model("gpt2")
    file.add_token_list(sorted(ids, key=ids.__getitem__))
    merges = json.loads(cut.backend_tokenizer.to_str())["model"]["merges"]
    file.add_token_merges([" ".join(pair) for pair in merges])
    file.add_eos_token_id(cut.eos_token_id)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:  # GGUF has rotated pairs next to each other
            halves = weight.view(-1, 2, config.head_dim // 2, weight.shape[-1])
            weight = halves.transpose(1, 2).reshape(weight.shape)
        file.add_tensor(names.get_name(name, (".weight",)), weight.contiguous().numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


def random_adapter(model: Any, kind: "Kind" = "both", seed: int = 0) -> "ReadingAdapter":
    """A reading adapter that changes what a tiny decoder computes."""
    from memstore.hf.reading_adapter import ReadingAdapter

    adapter = ReadingAdapter.untrained(model, 4, seed, kind)
    generator = torch.Generator().manual_seed(seed)
    for name, (a, b) in adapter.pairs.items():
        adapter.pairs[name] = a, 0.05 * torch.randn(b.shape, generator=generator)
    return adapter
