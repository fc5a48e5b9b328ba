"""A recorded decoding step, run on a CPU, gives the states of an ordinary step."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.model.passages import repositioned_attention, step_graph
from memstore.model.passages.repositioned_attention import RepositionedAttention
from memstore.model.passages.step_graph import RecordedStep, StepGraph
from support.tiny_decoder import of_kind, tokenizer

PARTS = [5, 7]


def reading(reader: HuggingFacePassageModel, told: list[Tensor] | None) -> RepositionedAttention:
    """A context that has read some text after two passages. told: receives the attention masses."""
    observe = None if told is None else lambda layer, masses: told.append(masses.clone())
    context = RepositionedAttention(reader, reader.prefix(), observe)
    context.divide(PARTS, [0.0, -0.7])
    shape = reader.shape
    size = (2, shape.num_kv_heads, sum(PARTS), shape.head_dim)
    for layer in range(shape.num_layers):
        generator = torch.Generator().manual_seed(layer)
        context.remember([layer], *torch.randn(size, generator=generator)[:, None])
    reader.hidden(torch.tensor([[300, 301, 302]]), context.attend)
    return context


def step_of(reader: HuggingFacePassageModel, token: int, context: RepositionedAttention) -> Tensor:
    """The state of an ordinary step."""
    return reader.hidden(torch.tensor([[token]]), context.attend, quantized=True)[0, -1]


def read_text(reader: HuggingFacePassageModel, *contexts: RepositionedAttention) -> None:
    for context in contexts:
        reader.hidden(torch.tensor([[400, 401]]), context.attend)


def read_no_passages(reader: HuggingFacePassageModel, *contexts: RepositionedAttention) -> None:
    none = torch.zeros(2, 1, reader.shape.num_kv_heads, 0, reader.shape.head_dim)
    for context in contexts:
        context.divide([], [])
        for layer in range(reader.shape.num_layers):
            context.remember([layer], *none)


@torch.no_grad()
@pytest.mark.parametrize(  # a window; a cap of the scores
    ("kind", "observed"), [("llama", False), ("llama", True), ("mistral", True), ("gemma2", True)]
)
def test_a_recorded_step_gives_the_states_of_an_ordinary_step(
    kind: str, observed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_graph, "_ROOM", 20)
    monkeypatch.setattr(repositioned_attention, "_SPARE", 1)
    for module in (step_graph, repositioned_attention):
        monkeypatch.setattr(module, "WHOLE", 16)
    reader = HuggingFacePassageModel(of_kind(kind), tokenizer(), generating="full")
    told: tuple[list[Tensor], list[Tensor]] = ([], [])
    plain, other = (reading(reader, masses if observed else None) for masses in told)
    step = RecordedStep(reader, other)
    recorded = 1
    for number, token in enumerate(range(310, 310 + 45)):
        if number in (20, 23):  # other text is read between two tokens
            read_text(reader, plain, other)
        if number == 22:  # other passages are read instead
            read_no_passages(reader, plain, other)
            assert not step.fits()
        if not step.fits():
            step, recorded = RecordedStep(reader, other), recorded + 1
        expected = step_of(reader, token, plain)
        torch.testing.assert_close(step.read(token), expected, rtol=1e-4, atol=1e-4)
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


@torch.no_grad()
def test_the_recorded_step_starts_after_a_few_tokens_and_again_after_other_text() -> None:
    reader = HuggingFacePassageModel(of_kind("llama"), tokenizer(), generating="full")
    plain, other = reading(reader, None), reading(reader, None)
    graph, used = StepGraph(reader, other), []
    for number, token in enumerate(range(310, 330)):
        if number in (3, 12):
            read_text(reader, plain, other)
        if number == 12:  # of other passages
            read_no_passages(reader, plain, other)
        expected, state = step_of(reader, token, plain), graph.read(token)
        used.append(state is not None)
        if state is None:
            state = step_of(reader, token, other)
        torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-4)
    assert used == [False] * 7 + [True] * 5 + [False] * 4 + [True] * 4


@torch.no_grad()
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_a_step_that_fails_has_read_nothing(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = HuggingFacePassageModel(of_kind("llama"), tokenizer(), generating="full")
    plain, other = reading(reader, None), reading(reader, None)
    graph = StepGraph(reader, other)

    def failing(*args: object, **kwargs: object) -> None:
        hidden(*args, **kwargs)
        raise error

    hidden = reader.hidden
    for number, token in enumerate(range(310, 320)):
        expected = step_of(reader, token, plain)
        if number == 7:
            monkeypatch.setattr(reader, "hidden", failing)
        state = graph.read(token)
        monkeypatch.setattr(reader, "hidden", hidden)
        assert (state is not None) == (4 <= number < 7)
        if state is None:
            state = step_of(reader, token, other)
        torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-4)
    # what cannot be recorded is not tried in another session; a lack of memory may be over there
    context = reading(reader, None)
    elsewhere = StepGraph(reader, context)
    for token in range(4):
        assert elsewhere.read(token) is None
        step_of(reader, token, context)
    assert (elsewhere.read(4) is None) == (error is RuntimeError)
