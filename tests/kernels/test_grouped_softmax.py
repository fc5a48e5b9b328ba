"""Grouped-softmax flash attention in Triton compared with torch, on a GPU or in Triton's
interpreter.
"""

from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from memstore.kernels.api import grouped_softmax_attention
from support import triton_interpreter  # noqa: F401 (before anything imports Triton)

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


@dataclass(frozen=True)
class Window:
    """Inputs of one call, in float64, and the gradient of its output."""

    block_size: int
    leaves: dict[str, Tensor]  # q, k, v; k_cmt
    do: Tensor
    controlled: Tensor | None = None

    @classmethod
    def draw(
        cls,
        block_size: int,
        length: int,
        dim: int,
        heads: int = 2,
        kv_heads: int = 1,
        batch: int = 2,
        *,
        cmt: bool = True,
        controlled: bool = True,
        seed: int = 0,
    ) -> "Window":
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator).to(DEVICE)

        def coins(*shape: int) -> Tensor:
            return (torch.rand(*shape, generator=generator) < 0.5).to(DEVICE)

        leaves = {"q": normal(batch, heads, length, dim) * dim**-0.5}
        leaves |= {name: normal(batch, kv_heads, length, dim) for name in ("k", "v")}
        if cmt:
            leaves["k_cmt"] = normal(kv_heads, dim)
        blocks = length // (block_size + 1)
        return cls(
            block_size,
            leaves,
            normal(batch, heads, length, dim),
            coins(batch, blocks) if controlled else None,
        )

    def attend(self, dtype: torch.dtype, *, triton: bool) -> dict[str, Tensor]:
        """The output and the gradient of every leaf."""
        leaves = {name: x.to(dtype).requires_grad_() for name, x in self.leaves.items()}
        given = {"controlled": self.controlled, "triton": triton, "block_size": self.block_size}
        output = grouped_softmax_attention(**leaves, **given)
        gradients = torch.autograd.grad(output, list(leaves.values()), self.do.to(dtype))
        return {"output": output.detach(), **dict(zip(leaves, gradients))}


def check(window: Window, dtype: torch.dtype = torch.float32, *, tiny: bool = False) -> None:
    """No result of the kernels is farther from float64 than twice as far as torch's in that dtype.

    And two roundings of float32, which the row's logsumexp has suffered before weights are computed
    from it again. In tiny windows many rows see one token, and have a gradient of 0 that torch
    finds exactly, but the kernels as the difference of dO.v and delta: there one rounding of these
    is allowed too.
    """
    longest = max(x.norm(dim=-1).max() for x in window.leaves.values())
    cancelled = 1.2e-7 * window.do.norm() * longest**2 if tiny else 0.0
    kernel, torchs = (window.attend(dtype, triton=triton) for triton in (True, False))
    for name, exact in window.attend(torch.float64, triton=False).items():
        error, allowed = ((x[name].double() - exact).norm() for x in (kernel, torchs))
        slack = 2.4e-7 * exact.norm() + (cancelled if name != "output" else 0.0)
        assert error <= 2 * allowed + slack, f"{name}: error {error:.2g}, torch's {allowed:.2g}"
        assert kernel[name].dtype == dtype


@settings(max_examples=9, derandomize=True)
@given(
    size=st.integers(1, 9),
    length=st.integers(1, 34),  # the longest have rows of two tiles
    dim=st.sampled_from([8, 16, 40]),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2)]),
    cmt=st.booleans(),
    controlled=st.booleans(),
    seed=st.integers(0, 999),
)
def test_output_and_gradients_are_as_exact_as_torchs(
    size: int, length: int, dim: int, heads: tuple[int, int], cmt: bool, controlled: bool, seed: int
) -> None:
    options = {"cmt": cmt, "controlled": controlled, "seed": seed}
    batch = 1 if heads[0] == 2 else 2
    check(Window.draw(size, length, dim, *heads, batch, **options), tiny=True)


def test_every_run_gives_the_same_bits() -> None:
    window = Window.draw(5, 33, 16, 2, 1, 1)
    first, second = (window.attend(torch.float32, triton=True) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_inputs_may_be_views_and_the_gradient_of_the_output_too() -> None:
    generator = torch.Generator().manual_seed(3)
    # (B, T, q k v, H, D)
    fused = torch.randn(2, 17, 3, 2, 16, generator=generator).to(DEVICE).requires_grad_()
    results = []
    for triton in (True, False):
        q, k, v = fused.permute(2, 0, 3, 1, 4).unbind()
        output = grouped_softmax_attention(q * 0.25, k, v, 4, triton=triton)
        results.append((output, *torch.autograd.grad(output.sum(), fused)))
    for x, y in zip(*results):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
