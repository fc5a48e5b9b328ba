"""Texts read with other memories than landmarks, and their checkpoints."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks.baselines.config import MEMORIES
from benchmarks.baselines.reading import MEMORY, BaselineModel, load_baseline, save_baseline
from benchmarks.baselines.transformer import BaselineTransformer
from memstore import load_model
from memstore.errors import InvalidConfig, InvalidWeights
from memstore.model.landmark.byte_tokenizer import Tokenizer
from memstore.model.landmark.checkpoint import SHIPPED
from memstore.model.landmark.config import ModelConfig
from support.tiny_model import text, tiny_model

SEGMENT = 32


def baseline(directory: Path, name: str, seed: int = 0, **changes: object) -> BaselineModel:
    tokenizer = Tokenizer.load(SHIPPED / "tokenizer.json")
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        num_layers=3,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_size=48,
        block_size=8,
        chunk_blocks=4,
    )
    model = BaselineTransformer(config, replace(MEMORIES[name], **changes))
    generator = torch.Generator().manual_seed(seed)
    model.initialise(generator)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data *= 8
        elif parameter.std() == 0:
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.3
    save_baseline(model, tokenizer, directory, torch.float64)
    return load_baseline(directory, dtype=torch.float64)


def ids(model: BaselineModel, count: int, seed: int = 0) -> list[int]:
    return model.tokenizer.encode(text(count, seed))[:count]


@pytest.mark.parametrize("name", MEMORIES)
def test_a_text_fed_in_pieces_is_the_text_fed_at_once(tmp_path: Path, name: str) -> None:
    """Pieces that end before, at and behind the ends of segments, and pieces of nothing."""
    model = baseline(tmp_path, name, top_k=5)
    words = ids(model, 5 * SEGMENT + 7)
    with model.session() as whole, model.session() as reading:
        cuts = [0, 0, 1, 31, 32, 32, 33, 64, 95, 96, 97, 129, len(words), len(words)]
        pieces = [reading.feed(words[first:end]) for first, end in pairwise(cuts)]
        assert [len(piece) for piece in pieces] == [end - first for first, end in pairwise(cuts)]
        torch.testing.assert_close(torch.cat(pieces), whole.feed(words))
        assert reading.past.attended == whole.past.attended
        assert model.score(reading, words[:1]).shape == (0,)


def test_a_checkpoint_says_which_memory_it_has(tmp_path: Path) -> None:
    for name, memory in MEMORIES.items():
        found = baseline(tmp_path / name, name)
        assert found.transformer.memory_config == memory.of(found.config)
    for learned in ("memorizing", "infini"):
        with pytest.raises(InvalidWeights, match=r"memory\.\w+ is not part of it"):
            load_model(tmp_path / learned)
    tiny_model(tmp_path / "landmarks")
    with pytest.raises(InvalidWeights, match="no baseline"):
        load_baseline(tmp_path / "landmarks")


@pytest.mark.parametrize("memory", ['{"kind": "hopfield"}', "[]", "{", "7", '{"top_k": 1}'])
def test_a_memory_that_is_unknown_is_one_line(tmp_path: Path, memory: str) -> None:
    baseline(tmp_path, "none")
    (tmp_path / MEMORY).write_text(memory)
    with pytest.raises(InvalidConfig) as refused:
        load_baseline(tmp_path)
    assert "\n" not in str(refused.value)


def test_what_is_no_text_is_never_predicted(tmp_path: Path) -> None:
    model = baseline(tmp_path, "transformer-xl")
    with model.session() as reading:
        likely = reading.logits(reading.feed(ids(model, 40))).softmax(-1)
        assert not likely[:, model.config.landmark_id :].any()
