"""Random decoders of real architectures, small enough for a test, and a tokenizer for them."""

from typing import Any

import pytest
import torch

from memstore.model.landmark.checkpoint import SHIPPED

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


def tokenizer(chat: bool = True) -> Any:
    """Byte-level, with a chat template or none."""
    transformers = pytest.importorskip("transformers")
    made = transformers.PreTrainedTokenizerFast(tokenizer_file=str(SHIPPED / "tokenizer.json"))
    special = ["<|user|>", "<|assistant|>", "<|end|>"]
    made.add_special_tokens({"eos_token": "<|end|>", "additional_special_tokens": special[:2]})
    if chat:
        made.chat_template = CHAT
    return made


def decoder(kind: str, **changed: Any) -> Any:
    """A model of this model type with random weights, the same ones every time."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    vocabulary = len(tokenizer())
    config = transformers.AutoConfig.for_model(
        kind, **{**_SIZES, "vocab_size": vocabulary, **changed}
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # drawn small, they would attend to everything alike
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    return model
