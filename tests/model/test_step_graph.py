"""A recorded step, run on a CPU: what it gives is what an ordinary one gives."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.model.passages import step_graph
from memstore.model.passages.repositioned_attention import RepositionedAttention, read_prefix
from memstore.model.passages.step_graph import RecordedStep
from support.tiny_decoder import of_kind, tokenizer

PARTS = [5, 7]


def reading(reader: HuggingFacePassageModel, told: list[Tensor] | None) -> RepositionedAttention:
    """A context that has read something behind two passages. told: takes what is attended."""
    observe = None if told is None else lambda layer, masses: told.append(masses.clone())
    context = RepositionedAttention(reader, read_prefix(reader), observe, PARTS)
    shape = reader.shape
    size = (2, shape.num_kv_heads, sum(PARTS), shape.head_dim)
    for layer in range(shape.num_layers):
        context.remember(layer, *torch.randn(size, generator=torch.Generator().manual_seed(layer)))
    reader.hidden(torch.tensor([[300, 301, 302]]), context.attend)
    return context


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])  # a window; a cap of the scores
@pytest.mark.parametrize("observed", [False, True])
def test_it_gives_what_an_ordinary_step_gives(
    kind: str, observed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_graph, "_ROOM", 20)
    reader = HuggingFacePassageModel(of_kind(kind), tokenizer(), generating="full")
    told: tuple[list[Tensor], list[Tensor]] = ([], [])
    plain, other = (reading(reader, masses if observed else None) for masses in told)
    step = RecordedStep(reader, other)
    recorded = 1
    for number, token in enumerate(range(310, 310 + 90)):
        if number in (20, 23):  # other text is read between two tokens
            for context in (plain, other):
                reader.hidden(torch.tensor([[400, 401]]), context.attend)
        if number == 22:  # another passage is read instead
            for context in (plain, other):
                for layer in range(reader.shape.num_layers):
                    context.remember(layer, *context.nothing)
            assert not step.fits(other)
        if not step.fits(other):
            step, recorded = RecordedStep(reader, other), recorded + 1
        expected = reader.hidden(torch.tensor([[token]]), plain.attend, quantized=True)[0, -1]
        torch.testing.assert_close(step(token), expected, rtol=1e-4, atol=1e-4)
        assert other.local == plain.local
    assert recorded == 3  # at first, for other passages, and when the room is full
    assert len(told[0]) == len(told[1]) > 0 or not observed
    for here, there in zip(*told):
        torch.testing.assert_close(here, there)
    plain.let_go(4), other.let_go(4)
    for here, there in zip(plain.layers.values(), other.layers.values()):
        torch.testing.assert_close(
            here.k[:, :, : here.length], there.k[:, :, : here.length], rtol=1e-3, atol=1e-4
        )
