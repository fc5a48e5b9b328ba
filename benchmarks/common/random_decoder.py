"""Hugging Face decoders of random weights in the shapes of Llama 3, and texts for them: how long a
model of a size takes can be measured without its weights.
"""

from contextlib import nullcontext
from random import Random
from typing import Any

import torch

from memstore.model.landmark.landmark_model import SHIPPED

_LLAMA = {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
SHAPES: dict[str, dict[str, Any]] = {
    "1B": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 128_256, "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 2100,
    },
}  # fmt: skip


def random_decoder(
    shape: dict[str, Any], tokens: int, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> tuple[Any, Any]:
    """A random decoder, on its device, and a tokenizer for its ids.

    shape: as in SHAPES. tokens: the longest text it must read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    config = AutoConfig.for_model(
        "llama",
        max_position_embeddings=tokens,
        **shape | _LLAMA,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    with device if torch.cuda.is_available() else nullcontext():  # large ones are made there
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(SHIPPED / "tokenizer.json"))
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    return model.to(device).eval(), tokenizer


def made_up_words(count: int, seed: int) -> str:
    """A text of `count` made-up words in sentences of twelve."""
    rng = Random(seed)
    syllables = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u")]
    words = ["".join(rng.choices(syllables, k=rng.randint(2, 4))) for _ in range(count)]
    return " ".join(f"{' '.join(words[at : at + 12])}." for at in range(0, count, 12))
