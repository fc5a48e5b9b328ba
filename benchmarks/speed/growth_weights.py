"""Models that `growth` measures, and what of their weights is read."""

from typing import Any

import torch
from torch import nn

from memstore import LandmarkModel
from memstore.compute import Compute
from memstore.hf.load import load_stock
from memstore.hf.models_by_name import reader_named
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.model.model_api import ModelAPI

DTYPES = {"books-1m": "float32"}  # another: bfloat16
SHAPES = {  # hidden, layers, heads, KV heads, inner: the middle two are SmolLM2's
    "30M": (384, 6, 6, 2, 1024),
    "135M": (576, 30, 9, 3, 1536),
    "360M": (960, 32, 15, 5, 2560),
    "1B": (2048, 16, 32, 8, 8192),
}


def loaded(name: str) -> ModelAPI:
    """A model by its name, that looks up whatever it is asked."""
    dtype = DTYPES.get(name, "bfloat16")
    reader = reader_named(name, compute=Compute(dtype=dtype), own_process=False)
    if isinstance(reader, HuggingFacePassageModel):
        reader.gate = None
    return reader


def random_model(shape: str, weights: Any, seed: int) -> HuggingFacePassageModel:
    """A decoder of random weights in bfloat16, with SmolLM2's tokenizer; its blocks are chosen by
    words. weights: that tokens are generated with.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    _, tokenizer, _ = load_stock("smollm2")
    hidden, layers, heads, kv_heads, inner = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        model: Any = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    digest = f"{seed:02x}" * 20  # of weights that nobody stores
    reader = HuggingFacePassageModel(model, tokenizer, weights=digest, generating=weights)
    reader.gate = None
    return reader


class Weights:
    """What of a model's weights reading in and generating go through."""

    def __init__(self, reader: Any) -> None:
        if isinstance(reader, LandmarkModel):
            whole: Any = reader.transformer
            embedding = whole.embedding.weight
            config: Any = reader.config
            self.width, self.inner = config.hidden_size, config.mlp_size
            self.generating = sum(one.nbytes for one in whole.parameters())
        else:
            whole = reader.model
            embedding = whole.get_input_embeddings().weight
            config = reader.model.config
            self.width, self.inner = config.hidden_size, config.intermediate_size
            linear = [part for part in whole.modules() if isinstance(part, nn.Linear)]
            self.generating = round(sum(map(bytes_read, linear)))
        self.all = sum(one.numel() for one in whole.parameters())
        self.layers = self.all - embedding.numel()
        self.dtype = embedding.dtype


def bytes_read(linear: Any) -> float:
    """Bytes of a linear layer's weights, as a generated token reads them."""
    few, share = getattr(linear, "few", None), 1.0
    if few is None:
        return float(linear.weight.nbytes)
    if hasattr(few, "whole"):  # its rows of what several layers have in one
        share, few = linear.out_features / sum(_rows(few.whole)), few.whole
    return share * sum(value.nbytes for value in vars(few).values())


def _rows(whole: Any) -> list[int]:
    """Rows of quantized weights, by either of their forms."""
    return [whole.scales.numel() if hasattr(whole, "scales") else whole.grids.shape[1]]
