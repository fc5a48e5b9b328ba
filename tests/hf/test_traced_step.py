"""Traced graphs of the layers give a generated token the states that the modules give."""

import threading

import pytest
import torch

pytest.importorskip("transformers")

from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from memstore.hf import traced_step
from memstore.hf.attention_seam import ForwardCache, attach, run_layers
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.model.passages.adaptation import UNADAPTED
from support.tiny_decoder import KINDS, decoder, of_kind, tokenizer

UNTRACED = {"mixtral", "jetmoe", "afmoe"}  # which experts compute depends on the token


def attend(layer, q, k, v):
    """An attention that shows q, k, v, and the layer."""
    return q + (k - 2 * v).repeat_interleave(q.shape[1] // k.shape[1], 1) * (1 + layer)


def attached(model):
    return HuggingFacePassageModel(model, tokenizer(), UNADAPTED, generating="full")


def by_modules(model: HuggingFacePassageModel, given, enter=None):
    with torch.no_grad():
        return run_layers(attach(model.model), given, ForwardCache(attend, enter=enter))


@pytest.mark.parametrize(
    ("kind", "rows"),
    # exaone4 rotates right after a norm; scaled positions are no part of a layer
    [(kind, 1) for kind in [*KINDS, "exaone4"] if "," not in kind]
    + [("llama", 3), ("gemma2", 3), ("mixtral", 3)],
)
def test_a_token_goes_through_graphs_as_through_modules(kind, rows, monkeypatch):
    """One row as on a GPU, whose norms are one operation."""
    monkeypatch.setattr(traced_step, "_has_norms", lambda device: rows == 1)
    model = attached(of_kind(kind) if kind in KINDS else decoder(kind, sliding_window=50))
    ids = torch.arange(rows)[:, None] + 7
    with torch.no_grad():
        states = model._step(ids, ForwardCache(attend))
    assert (states is None) == (kind in UNTRACED)
    if states is not None:
        torch.testing.assert_close(states, by_modules(model, ids), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        hidden = model.hidden(ids, attend, quantized=True)
    torch.testing.assert_close(hidden, by_modules(model, ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_an_rms_norm_becomes_one_operation_for_a_gpu(dtype):
    norms = torch.nn.Sequential(LlamaRMSNorm(16), Gemma2RMSNorm(16)).to(dtype)
    for norm in norms:
        norm.weight.data.uniform_(0.5, 2)
    x, operations = torch.randn(1, 3, 16, dtype=dtype), []
    with torch.no_grad():
        expected = [norm(x) for norm in norms]
        traced_step.fuse_norms(norms)
        for norm, plain in zip(norms, expected):
            graph = traced_step.compiled(traced_step.traced(norm, x))
            operations.append({str(node.target) for node in graph.__self__.graph.nodes})
            torch.testing.assert_close(graph(x), plain)
    assert "aten.rms_norm.default" in operations[0] and "rsqrt" not in operations[0]
    assert "rsqrt" in operations[1]


def test_layers_are_entered_in_order_with_the_states_of_modules():
    model = attached(decoder("llama"))
    given = torch.tensor([[9], [4]])
    entered, expected = [], []
    with torch.no_grad():
        states = model.hidden(given, attend, enter=lambda *e: entered.append(e), quantized=True)
    found = by_modules(model, given, enter=lambda *e: expected.append(e))
    torch.testing.assert_close(states, found, rtol=1e-5, atol=1e-5)
    assert [layer for layer, _ in entered] == [layer for layer, _ in expected] == [0, 1, 2, 3]
    for (_, ours), (_, theirs) in zip(entered, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_question_is_read_while_another_thread_traces_the_model():
    model = attached(decoder("llama"))
    question, found, traced = torch.arange(40)[None] + 3, [], threading.Event()
    expected = by_modules(model, question)

    def read() -> None:
        while not traced.is_set():
            found.append(by_modules(model, question))

    thread = threading.Thread(target=read)
    thread.start()
    with torch.no_grad():
        assert model._step(torch.full((4, 1), 11), ForwardCache(attend)) is not None
    traced.set()
    thread.join()
    assert found and not thread.is_alive()
    for states in found:
        torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)
