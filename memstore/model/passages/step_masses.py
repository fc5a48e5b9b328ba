"""What the last row of a step read of each passage, gathered from layer to layer."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from memstore.model.reads import OnRead, ReadUnit, StepReads


class StepMasses:
    """Tells of every step once all memory layers have attended."""

    def __init__(self, memory_layers: Sequence[int], on_read: OnRead) -> None:
        self._layers, self._on_read = memory_layers, on_read
        self._units: Sequence[ReadUnit] = ()
        self._reading: Collection[int] = ()
        self._masses: list[Tensor] = []

    def read(self, units: Sequence[ReadUnit], layers: Collection[int]) -> None:
        """From the next step on these units are read, in these layers."""
        self._units, self._reading = units, layers

    def __call__(self, layer_idx: int, masses: Tensor) -> None:
        """masses: [H, passages], of a layer."""
        if layer_idx == self._layers[0]:
            self._masses.clear()  # of a step that failed
        if layer_idx in self._reading:
            self._masses.append(masses)
        if layer_idx == self._layers[-1]:
            read = torch.stack(self._masses).double().flatten()
            self._masses.clear()
            self._on_read(StepReads(self._units, read.cpu().numpy()))
