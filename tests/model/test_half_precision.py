"""A model in half precision gives numbers close to those of float32."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from memstore.model.landmark.landmark_model import (
    LandmarkModel,
    load_checkpoint,
    load_model,
    save_checkpoint,
)
from memstore.store.memory_store import MemoryStore
from support.tiny_model import save_tiny_model, text

HALF = [torch.bfloat16, torch.float16]


def halved(directory: Path, dtype: torch.dtype, **changes: object) -> Path:
    """A tiny model whose weights are numbers of that dtype."""
    save_tiny_model(directory, cmt_cutoff=0.0, **changes)
    save_checkpoint(*load_checkpoint(directory), directory, dtype)
    return directory


def log_probabilities(model: LandmarkModel, memory: Path, **lookup: object) -> Tensor:
    """Of a text of several chunks, read with the memory and with blocks of its own."""
    with (
        MemoryStore.open(memory, model.signature) as store,
        model.session(store, chunk_blocks=1, **lookup) as session,
    ):
        states = session.feed(model.tokenizer.encode(text(30, seed=2)))
        assert states.dtype == model.transformer.norm.weight.dtype
        return session.logits(states).log_softmax(-1)[:, : model.config.landmark_id]


@pytest.mark.parametrize(
    "granularity,positions", [("per_token_per_head", "fixed"), ("shared", "stingy")]
)
@pytest.mark.parametrize("dtype", HALF)
def test_a_session_in_half_precision_is_near_the_same_one_in_float32(
    tmp_path: Path, dtype: torch.dtype, granularity: str, positions: str
) -> None:
    directory = halved(
        tmp_path / "model", dtype, old_block_position=positions, granularity=granularity
    )
    whole, half = load_model(directory), load_model(directory, dtype=dtype)
    assert {p.dtype for p in half.transformer.parameters()} == {dtype}
    with MemoryStore.create(tmp_path / "m", whole.signature) as store:
        whole.ingest(text(120), store, name="a")
    exact = log_probabilities(whole, tmp_path / "m")
    found, blind = (
        log_probabilities(half, tmp_path / "m"),
        log_probabilities(whole, tmp_path / "m", cmt_cutoff=1.0),
    )
    error, memory = (float((x - exact).abs().mean()) for x in (found, blind))
    assert found.dtype == torch.float32
    # what the memory makes is far above the rounding
    assert 0 < error < 16 * torch.finfo(dtype).eps * memory


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_weights_are_another_model_only_if_they_lose_digits(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    same = halved(tmp_path / "same", dtype)
    assert load_model(same).signature == load_model(same, dtype=dtype).signature
    finer = save_tiny_model(tmp_path / "finer")
    assert load_model(finer).signature != load_model(finer, dtype=dtype).signature
