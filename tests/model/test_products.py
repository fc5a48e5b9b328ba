"""Fast linear layers equal torch's to rounding, and are used only inside their context."""

import pytest
import torch
from torch import nn

from memstore.model.passages.passage_encoding import fast_products

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU on which they differ from torch's default."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")


@torch.no_grad()
def test_fast_products_equal_linear_layers_to_rounding():
    torch.manual_seed(0)
    for bias in (True, False):
        layer, x = nn.Linear(576, 192, bias=bias), torch.randn(1, 256, 576)
        usual = layer(x)
        with fast_products(CPU, torch.float32):
            fast = layer(x)
        exact = layer.double()(x.double())
        assert fast.dtype == torch.float32 and fast.layout == torch.strided
        torch.testing.assert_close(fast.double(), exact, rtol=1e-5, atol=1e-5)
        assert torch.equal(layer.float()(x), usual)  # nothing of it stays


@torch.no_grad()
def test_fast_products_leave_half_precision_and_tensor_subclasses_alone():
    class Own(torch.Tensor):
        pass

    layer, x = nn.Linear(16, 8), torch.randn(1, 4, 16)
    with fast_products(CPU, torch.float32):
        assert isinstance(layer(x.as_subclass(Own)), Own)
        half = layer.bfloat16()(x.bfloat16())
    assert torch.equal(half, layer(x.bfloat16()))
