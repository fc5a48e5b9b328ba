"""The two ends of the comparison: no memory, where a segment sees itself alone, and full attention,
where it sees all that was read.
"""

from torch import Tensor

from benchmarks.baselines.past import Past, causal_attention


class NoPast(Past):
    """A segment sees itself alone."""

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._count(q.shape[2], self._window.size(layer_idx))
        self._window.append(layer_idx, k, v)
        q = self._window.turned(layer_idx, q * q.shape[-1] ** -0.5)
        return causal_attention(q, *self._window.held(layer_idx))


class FullPast(NoPast):
    """Every token sees every one before it, however long ago; gradients reach all of them."""

    def end_segment(self) -> None:
        self.length = 0

    @property
    def bytes(self) -> int:
        layers = range(self.model.config.num_layers)
        held = [x for layer in layers if self._window.size(layer) for x in self._window.held(layer)]
        return sum(x[:, :, : x.shape[2] - self.length].nbytes for x in held)
