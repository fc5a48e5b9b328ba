"""Weights of 8 and 4 bits: which layers use them, how little they change an answer, and that stored
keys and values are computed without them.
"""

import threading
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from memstore.compute import Compute
from memstore.errors import InvalidConfig
from memstore.hf import quantized_weights
from memstore.hf.attention_seam import ForwardCache, active
from memstore.hf.load import wrap
from memstore.hf.models_by_name import reader_named
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.hf.quantized_weights import (
    MOST_ROWS,
    QuantizedWeights,
    quantized,
    stored_in_4_bits,
    weights_named,
)
from memstore.model.passages.adaptation import UNADAPTED, Adaptation
from memstore.model.passages.selector import Selector
from memstore.store.memory_store import MemoryStore
from support.passage_reader import keys_and_values
from support.tiny_decoder import decoder, of_kind, tokenizer

OUT, IN = 48, 96


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """A CPU that multiplies by quantized weights faster."""
    monkeypatch.setattr(quantized_weights, "has_fast_products", lambda: True)


def drawn(seed: int = 0) -> Tensor:
    return torch.randn(OUT, IN, generator=torch.manual_seed(seed))


def in_4_bits(top: int, seed: int = 0) -> Tensor:
    """Weights on 4-bit grids of 32 numbers, whose largest is at level `top` of 15. Q4_0 often
    leaves the last level unused.
    """
    draw = torch.manual_seed(seed)
    codes = torch.randint(0, top + 1, (OUT, IN // 32, 32), generator=draw).float()
    codes[..., 0], codes[..., 1] = 0, top
    scale = torch.rand(OUT, IN // 32, 1, generator=draw) + 0.1
    return (scale * (codes - 8) + 0.3 * scale).flatten(1)


@pytest.mark.parametrize("top", [15, 14, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_stored_in_4_bits_lose_no_further_precision(top, dtype):
    weight = in_4_bits(top).to(dtype)
    assert stored_in_4_bits(weight)
    x = torch.randn(3, IN, generator=torch.manual_seed(1)).to(torch.bfloat16)
    product = quantized(weight, "auto")(x).float()
    exact = x.float() @ weight.float().T
    # as far from it as weights, scales and products in bfloat16 are; 8 bits are some .01
    assert (product - exact).norm() < 0.005 * exact.norm()


def test_weights_get_8_bits_unless_4_are_asked_for():
    weight, x = drawn(), torch.randn(2, IN, generator=torch.manual_seed(1))
    assert not stored_in_4_bits(weight)
    exact = x @ weight.T
    wrong = {
        name: float((quantized(weight, name)(x.to(torch.bfloat16)).float() - exact).norm())
        for name in ("auto", "int8", "int4")
    }
    assert wrong["auto"] == wrong["int8"] < 0.02 * float(exact.norm())
    assert 2 * wrong["int8"] < wrong["int4"] < 0.2 * float(exact.norm())


def test_a_cpu_that_is_slower_with_quantized_weights_uses_the_loaded_weights(monkeypatch):
    monkeypatch.setattr(quantized_weights, "has_fast_products", lambda: False)
    assert quantized(in_4_bits(15), "auto") is quantized(drawn(), "auto") is None
    assert quantized(drawn(), "int8") is not None


@pytest.mark.parametrize("shape", [(7, 96), (1, 32), (48, 20), (5, 9), (1, 1), (24, 33)])
@pytest.mark.parametrize("weights", ["auto", "int4", "int8"])
def test_a_layer_of_any_shape_is_multiplied(shape, weights):
    torch.manual_seed(2)
    stack, x = nn.Sequential(nn.Linear(shape[1], shape[0])), torch.randn(3, shape[1])
    with active(few(QuantizedWeights(stack, nn.Identity(), weights))):
        product = stack(x)
    torch.testing.assert_close(product, stack(x), atol=0.02, rtol=0.02)


def few(weights: QuantizedWeights) -> ForwardCache:
    """Of a pass that multiplies by them."""
    return ForwardCache(lambda layer, q, k, v: q, quantized=weights.ready())


def layers(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(IN, OUT, bias=bias), nn.Tanh(), nn.Linear(OUT, 32, bias=bias))


def test_quantized_weights_apply_only_to_marked_passes_of_this_thread():
    stack, head = layers(), nn.Linear(32, 64)
    x = torch.randn(MOST_ROWS + 1, IN)
    full, logits = stack(x), head(stack(x))
    weights = QuantizedWeights(stack, head, "int8")
    elsewhere = []
    weights.head(full[:1])  # the first token of a process does not wait for the layers' weights
    assert not any(hasattr(part, "few") for part in stack)
    with active(few(weights)):
        rounded = stack(x[:MOST_ROWS])
        other = threading.Thread(target=lambda: elsewhere.append(stack(x[:2])))
        other.start()
        other.join()
    torch.testing.assert_close(elsewhere[0], full[:2])
    torch.testing.assert_close(stack(x[:2]), full[:2])
    assert not torch.equal(rounded, full[:MOST_ROWS])
    torch.testing.assert_close(rounded, full[:MOST_ROWS], atol=0.03, rtol=0.03)
    torch.testing.assert_close(weights.head(full), logits, atol=0, rtol=0)
    found = weights.head(full[:MOST_ROWS])
    assert not torch.equal(found, logits[:MOST_ROWS])
    torch.testing.assert_close(found, logits[:MOST_ROWS], atol=0.03, rtol=0.03)


def test_quantized_weights_are_refused_by_unknown_names_and_on_a_gpu():
    cpu, other = torch.device("cpu"), torch.device("meta")
    assert [weights_named(name, cpu) for name in ("auto", "full", "int8", "int4")]
    assert weights_named("auto", other) == "auto"
    for name, device in (("int8", other), ("int4", other), ("int3", cpu), ("", cpu)):
        with pytest.raises(InvalidConfig, match="auto"):
            weights_named(name, device)


def test_a_landmark_model_refuses_quantized_weights():
    for weights, advice in (("int8", "auto or full"), ("int3", "auto, full, int8, int4")):
        with pytest.raises(InvalidConfig, match=advice):
            reader_named("books-1m", compute=Compute(weights=weights))
    assert reader_named("books-1m", compute=Compute(weights="full")).signature


TEXT = "".join(f"The lantern of the mill has the number {number}. " for number in range(18))


@contextmanager
def generating(weights, directory):
    """A reader that generates with these weights, and an empty memory."""
    adaptation = Adaptation(Selector(), top_k=1)
    reader = wrap(decoder("llama"), tokenizer(True), adaptation, weights=weights)
    path = directory / weights
    with MemoryStore.create(path, reader.signature, selector=reader.keeps) as store:
        yield reader, store


def test_stored_keys_and_values_are_not_computed_with_quantized_weights(tmp_path):
    stored = {}
    for weights in ("full", "int4"):
        with generating(weights, tmp_path) as (reader, store):
            reader.ingest("The inn is closed.", store, name="first", keep="kv")
            reader.ask("Is the inn closed?", store, max_new_tokens=6)  # makes them
            reader.ingest(TEXT, store, name="inventory", keep="kv")
            stored[weights] = keys_and_values(store, "inventory")
    for block, halves in stored["full"].items():
        assert all(map(torch.equal, halves, stored["int4"][block]))


@pytest.mark.parametrize(  # kinds whose linear layers differ: with biases, joined, of experts
    ("kind", "weights"),
    [("llama", "int4"), *((kind, "int8") for kind in ("llama", "qwen2", "mixtral", "gemma2"))]
    + [(kind, "int8") for kind in ("phi3", "gpt_neox", "glm", "cohere")],
)
def test_every_architecture_generates_with_quantized_weights(kind, weights):
    model = HuggingFacePassageModel(of_kind(kind), tokenizer(), UNADAPTED, generating=weights)
    ids = torch.tensor([[7], [11]])

    def attend(layer, q, k, v):
        return v.repeat_interleave(q.shape[1] // k.shape[1], 1)

    with torch.no_grad():
        full, few = (model.hidden(ids, attend, quantized=which) for which in (False, True))
        logits = [model.logits(full[:, -1], quantized=which) for which in (False, True)]
    apart = [float((a - b).norm() / a.norm()) for a, b in ((full, few), logits)]
    assert 0 < apart[0] < (0.1 if weights == "int8" else 0.8) and apart[1] < 0.03
