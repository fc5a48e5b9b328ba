"""Grouped-softmax flash attention in Triton against torch: on a GPU if there is one, else in
Triton's interpreter.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from memstore.kernels.api import grouped_softmax_attention
from support import triton_interpreter  # noqa: F401 (before anything imports Triton)
from support.paths import DATA

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


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
        output = grouped_softmax_attention(
            leaves["q"],
            leaves["k"],
            leaves["v"],
            self.block_size,
            k_cmt=leaves.get("k_cmt"),
            controlled=self.controlled,
            triton=triton,
        )
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


@pytest.fixture
def poisoned() -> Iterator[None]:
    """New tensors that nothing has been written into are full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


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
    window = Window.draw(
        size,
        length,
        dim,
        *heads,
        1 if heads[0] == 2 else 2,
        cmt=cmt,
        controlled=controlled,
        seed=seed,
    )
    check(window, tiny=True)


@pytest.mark.parametrize("controlled", [False, True])
def test_what_nothing_was_written_into_is_never_returned(controlled: bool, poisoned: None) -> None:
    window = Window.draw(4, 29, 40, 1, 1, 2, controlled=controlled)
    assert all(x.isfinite().all() for x in window.attend(torch.float32, triton=True).values())


def test_every_run_gives_the_same_bits() -> None:
    window = Window.draw(5, 33, 16, 2, 1, 1)
    first, second = (window.attend(torch.float32, triton=True) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("case", ["full_blocks", "partial_tail", "single_block"])
def test_grouped_softmax_equals_the_published_implementation(case: str) -> None:
    with np.load(DATA / "a_softmax.npz") as file:
        q, k, v, is_mem, out = (
            torch.from_numpy(file[f"lmb_{case}_{x}"]) for x in ("q", "k", "v", "is_mem", "out")
        )
    size = int(is_mem[0].nonzero()[0]) if is_mem.any() else q.shape[2]
    q, k, v = (x.float().to(DEVICE) for x in (q * q.shape[-1] ** -0.5, k, v))
    found = grouped_softmax_attention(q, k, v, size, triton=True)
    torch.testing.assert_close(found.cpu().double(), out, rtol=0, atol=2e-6)


@pytest.mark.parametrize("controlled", ["half", "memo", "none", "all"])
def test_context_miss_token_equals_the_published_implementation(controlled: str) -> None:
    with np.load(DATA / "c_cmt.npz") as file:
        data = {key: torch.from_numpy(file[key]) for key in file.files}
    size = int(data["is_mem"][0].nonzero()[0])
    blocks = data[f"cmt_{controlled}_ctrl"][:, size :: size + 1].to(DEVICE)
    q, k, k_cmt = (
        x.float().to(DEVICE)
        for x in (data["q"] * data["q"].shape[-1] ** -0.5, data["k"], data["k_cmt"])
    )
    length, dim = q.shape[2:]
    ones = torch.nn.functional.pad(torch.eye(length, device=DEVICE), (0, -length % dim)).expand(
        *k.shape[:2], -1, -1
    )
    columns = [  # values that are unit vectors: the output is the weights
        grouped_softmax_attention(
            q, k, v, size, k_cmt=k_cmt[0, :, 0], controlled=blocks, triton=True
        )
        for v in ones.split(dim, -1)
    ]
    found = torch.cat(columns, -1)[..., :length].cpu().double()
    torch.testing.assert_close(found, data[f"cmt_{controlled}_None_w"], rtol=0, atol=2e-6)


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


def test_it_compiles_into_one_graph() -> None:
    window = Window.draw(4, 12, 16, 2, 1, 1, cmt=True)
    q, k, v, k_cmt = (x.float().requires_grad_() for x in window.leaves.values())

    def loss(q: Tensor, k: Tensor, v: Tensor, k_cmt: Tensor) -> Tensor:
        output = grouped_softmax_attention(
            q, k, v, 4, k_cmt=k_cmt, controlled=window.controlled, triton=True
        )
        return (output * window.do).sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    results = [torch.autograd.grad(f(q, k, v, k_cmt), (q, k, v, k_cmt)) for f in (compiled, loss)]
    for x, y in zip(*results):
        torch.testing.assert_close(x, y)


@pytest.mark.skipif(not CUDA, reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "size, dim", [(63, 128), (50, 128), (50, 64), (32, 64), (32, 32), (63, 256), (127, 96)]
)
def test_real_shapes_on_a_gpu(size: int, dim: int, dtype: torch.dtype, poisoned: None) -> None:
    check(Window.draw(size, 2_000, dim, 4, 2), dtype)


@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_memory_grows_with_the_length() -> None:
    def peak(length: int) -> int:
        options = {"device": DEVICE, "dtype": torch.bfloat16, "requires_grad": True}
        q, k, v = (torch.randn(1, 4, length, 64, **options) for _ in range(3))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grouped_softmax_attention(q, k, v, 63, triton=True).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    assert peak(32_768) <= 4.5 * peak(8_192)
