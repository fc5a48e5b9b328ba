"""Disk and main memory by model and tokens: the table of docs/models.md.

What a token takes on disk follows from the model's shape, scaled by what SmolLM2-135M was measured
to store; weights are in bfloat16.
"""

import json
from pathlib import Path
from typing import NamedTuple

from docs_build.markdown import table

ROOT = Path(__file__).parent.parent
LENGTHS = (100_000, 1_000_000, 10_000_000)
_SEARCH_BYTES = 64  # of main memory a token: landmarks of a learned selector
_HOST_TIER = 1 << 30  # bytes, by default
_PROGRAM = 1e9  # bytes of Python, torch and transformers


class Shape(NamedTuple):
    """What a model's memory and weights take: parameters, and the shape of its keys and values."""

    name: str
    parameters: float
    layers: int
    kv_heads: int
    head_dim: int

    @property
    def values(self) -> int:
        """Numbers that a token's keys and values have."""
        return 2 * self.layers * self.kv_heads * self.head_dim


MODELS = (
    Shape("SmolLM2-135M", 0.135e9, 30, 3, 64),
    Shape("Qwen3-0.6B", 0.6e9, 28, 8, 128),
    Shape("Llama 3.2 1B", 1.24e9, 16, 8, 64),
    Shape("Qwen2.5-7B", 7.6e9, 28, 4, 128),
    Shape("Llama 3.1 8B", 8.0e9, 32, 8, 128),
)


def bytes_a_value() -> float:
    """Bytes that a number of keys and values takes in int8, with headers, measured."""
    text = (ROOT / "docs/results/codecs-passages.json").read_text(encoding="utf-8")
    stored = json.loads(text)["figures"]["int8"]
    return float(stored["bytes"] / stored["tokens"] / MODELS[0].values)


def sizes_table() -> str:
    """Markdown: a row a model."""
    scale = bytes_a_value()
    rows = []
    for model in MODELS:
        weights = 2 * model.parameters
        disk = [_size(scale * model.values * tokens) for tokens in LENGTHS]
        main = [
            _size(weights + _PROGRAM + _HOST_TIER + _SEARCH_BYTES * tokens) for tokens in LENGTHS
        ]
        token = _size(scale * model.values)
        rows.append([model.name, _size(weights), token, *disk, ", ".join(main)])
    lengths = [_tokens(tokens) for tokens in LENGTHS]
    head = ["model", "weights", "disk: a token", *(f"{one} tokens" for one in lengths)]
    return table([*head, f"main memory: {', '.join(lengths)} tokens"], rows)


def _tokens(count: int) -> str:
    return f"{count // 1_000_000}M" if count >= 1_000_000 else f"{count // 1000}K"


def _size(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            amount = count / size
            return f"{amount:.0f} {unit}" if amount >= 9.95 else f"{amount:.1f} {unit}"
    return f"{count:.0f} bytes"
