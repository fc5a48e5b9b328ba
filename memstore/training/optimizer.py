"""Muon for the matrices of the layers, AdamW for everything else."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

_MOMENTUM, _DECAY = 0.95, 0.01


def orthogonalise(gradient: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrix to `gradient` [m, n], approximately, by a quintic
    Newton-Schulz iteration.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = gradient / (gradient.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised, for 2-d parameters (K. Jordan, "Muon", 2024);
    Nesterov, decoupled decay.

    On a CUDA device the iteration runs in bfloat16, as it was published: float32 does not use the
    tensor cores. `torch.optim.Muon` runs it in bfloat16 everywhere, which takes 25 times as long on
    a CPU without instructions for it (1.06 s a step instead of 0.04 at a million parameters) and
    gains a tenth on one with them; losses are alike.
    """

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                buffer = state["momentum"].lerp_(p.grad, 1 - _MOMENTUM)
                gradient = p.grad.lerp(buffer, _MOMENTUM)
                update = orthogonalise(gradient.bfloat16() if gradient.is_cuda else gradient)
                p.mul_(1 - group["lr"] * _DECAY)
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def make_optimizers(model: nn.Module, lr: float, muon_lr: float) -> list[torch.optim.Optimizer]:
    """AdamW at `lr` for embeddings and gains, Muon at `muon_lr` for the matrices of the layers."""
    named = list(model.named_parameters())
    matrices = {name for name, p in named if p.dim() == 2 and "embedding" not in name}
    others = [p for name, p in named if name not in matrices]
    return [
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
        Muon([p for name, p in named if name in matrices], lr=muon_lr),
    ]
