"""A tiny random model and a text for tests that need no trained weights."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from memstore.model.adapter import Shape
from memstore.model.landmark.landmark_model import (
    SHIPPED,
    LandmarkModel,
    load_model,
    save_checkpoint,
)
from memstore.model.landmark.transformer import ModelConfig, Transformer
from memstore.model.rotary import Rope
from memstore.model.tokenizer import Tokenizer

WORDS = ["the", "a", "of", "and", "river", "mountain", "station", "letter", "winter", "lantern"]
WORDS += ["captain", "7", "42", "quiet", "blue", "window;", "house.", "garden,", "night"]


def save_tiny_model(directory: Path, seed: int = 0, **changes: object) -> Path:
    """Write a model of two layers with random weights and the shipped tokenizer."""
    tokenizer = Tokenizer.load(SHIPPED / "tokenizer.json")
    shape = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "mlp_size": 48,
        "block_size": 8,
        "chunk_blocks": 4,
        "top_k": 3,
    }
    config = ModelConfig(**{"vocab_size": tokenizer.vocab_size, **shape, **changes})
    model = Transformer(config)
    model.initialise(torch.Generator().manual_seed(seed))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data *= 8
    save_checkpoint(model, tokenizer, directory)
    return directory


def tiny_model(directory: Path, seed: int = 0, **changes: object) -> LandmarkModel:
    """The same, loaded."""
    return load_model(save_tiny_model(directory, seed, **changes))


def text(words: int, seed: int = 0) -> str:
    """Lines of random words; a different one for every seed."""
    rng = random.Random(seed)
    return (
        "".join(rng.choice(WORDS) + rng.choice([" ", " ", " ", " ", "\n"]) for _ in range(words))
        + "end.\n"
    )


def attending(shape: Shape, rope: Rope, cmt_keys: list[Tensor] | None) -> Any:
    """What MemoryAttention takes of a model that computes in float64 on the CPU."""
    return SimpleNamespace(
        shape=shape,
        rope=rope,
        cmt_keys=cmt_keys,
        cmt_values=None,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
