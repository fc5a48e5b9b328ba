"""A model and its memory on another device: all tensors are there, and the numbers are the same."""

from pathlib import Path

import pytest
import torch

from memstore.errors import InvalidConfig
from memstore.model.landmark.landmark_model import LandmarkModel, load_model
from memstore.store.memory_store import MemoryStore
from support.fake_device import FakeDevice
from support.tiny_model import save_tiny_model, text


def use(model: LandmarkModel, memory: Path, device: str | None, granularity: str) -> list[object]:
    """Read a text, ask, search, sample, with own blocks and old ones; everything that comes out."""
    found: list[object] = []
    with MemoryStore.create(memory, model.signature, device=device) as store:
        model.ingest(text(60), store, name="a")
        model.ingest(text(25, seed=1), store, name="b")
        answer = model.ask(
            "the captain of the river", store, max_new_tokens=2, temperature=0.7, seed=5
        )
        found += [answer.tokens, [source.weight for source in answer.sources]]
        found += [[hit.weight for hit in model.search("the lantern", store)]]
        with model.session(store, granularity=granularity, chunk_blocks=1) as session:
            ids = model.tokenizer.encode(text(16, seed=2))
            found += [
                session.feed(ids).tolist(),
                session.logits(session.feed(ids[:8])).log_softmax(-1).tolist(),
                session.close_block(),
            ]
    return found


# Reading and asking choose per token and head, as the model does; the session at the end chooses as
# the case says.
@pytest.mark.parametrize(
    "granularity,positions,dtype",
    [("shared", "fixed", torch.float32), ("per_head", "stingy", torch.bfloat16)],
)
def test_a_model_on_another_device_answers_as_on_the_cpu(
    tmp_path: Path, granularity: str, positions: str, dtype: torch.dtype
) -> None:
    directory = save_tiny_model(tmp_path / "model", cmt_cutoff=0.0, old_block_position=positions)
    expected = use(load_model(directory, dtype=dtype), tmp_path / "here", None, granularity)
    with FakeDevice():
        there = load_model(directory, device="cuda", dtype=dtype)
        assert {p.device.type for p in there.transformer.parameters()} == {"cuda"}
        assert use(there, tmp_path / "there", "cuda", granularity) == expected


def test_a_memory_on_another_device_than_the_model_is_refused_with_advice(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path / "model")
    with FakeDevice():
        there = load_model(directory, device="cuda")
        with (
            MemoryStore.in_memory(there.signature) as store,
            pytest.raises(InvalidConfig, match="device='cuda:0'"),
        ):
            there.session(store, [])
