"""Speculative prefetch: what the next lookup will read is on its way before it asks.

Layer n's state without its memory, taken through the rest of layer n and the projections of layer
n + 1, gives nearly the queries that layer n + 1 will search with (measured on the first weights
that shipped: of the units that layers 2 and 3 read, .74 to .90 were predicted, and .70 to .92 of
the predicted were read; with layer n's plain input instead of its local attention, as prefetchers
of experts do, .45 to .66). A prediction never changes a result: it only tells the tiers what to
fetch.
"""

from contextlib import suppress

from torch import Tensor

from memstore.errors import MemstoreError
from memstore.kernels.api import LocalAttention
from memstore.model.landmark.attention.memory_attention import MemoryAttention
from memstore.model.landmark.landmark_protocol import LandmarkAdapter
from memstore.store.memory_store import MemoryStore

# steps in which nothing was missed or predicted to be, after which predicting pauses until a miss
_PATIENCE = 2


class SpeculativePrefetch:
    """Predicts for one session; its methods are called from within a step, in the order of
    layers.
    """

    def __init__(
        self, reader: LandmarkAdapter, attention: MemoryAttention, store: MemoryStore
    ) -> None:
        self._reader, self._attention, self._store = reader, attention, store
        self._memory_layers = frozenset(attention.shape.memory_layers)
        self._states: Tensor | None = None
        self._quiet = 0  # steps since the last miss, had or foreseen

    def enter(self, layer: int, states: Tensor) -> None:
        """A layer begins with the states [1, T, hidden_size]."""
        if layer == 0:
            self._quiet += 1
        self._states = states

    def attended(self, layer: int, local: LocalAttention) -> None:
        """The layer has attended to its chunk and will read memory next."""
        if self._quiet > _PATIENCE or layer + 1 not in self._memory_layers:
            return
        assert self._states is not None
        following = self._reader.next_projections(layer, self._states, local.output)
        if following is None:
            return
        # Where predicting fails (a document was forgotten), the lookup itself says so, if there is
        # to be one.
        with suppress(MemstoreError):
            if self._store.retrieval.expect(
                self._attention.predicted_blocks(layer + 1, *following)
            ):
                self._quiet = 0

    def missed(self) -> None:
        """The step had to wait for a unit: predicting goes on."""
        self._quiet = 0
