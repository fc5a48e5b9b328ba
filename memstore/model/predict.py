"""Predicting what the next lookups will read, so that it is on its way before they ask.

Two predictors. `previous`: what a layer read for the last step, it probably reads again.
`speculative`: layer n's state without its memory, taken through the rest of layer n and the
projections of layer n + 1, gives nearly the queries that layer n + 1 will search with (measured on
the first weights that shipped: of the units that layers 2 and 3 read, .74 to .90 were predicted,
and .70 to .92 of the predicted were read; with layer n's plain input instead of its local
attention, as prefetchers of experts do, .45 to .66). A prediction never changes a result: it only
tells the tiers what to fetch.
"""

from contextlib import suppress

from torch import Tensor

from memstore.block import BlockKey
from memstore.errors import MemstoreError
from memstore.kernels.api import LocalAttention
from memstore.model.attention import MemoryAttention
from memstore.model.transformer import DecoderLayer, Transformer
from memstore.store.memory_store import MemoryStore

# steps in which nothing was missed or predicted to be, after which predicting pauses until a miss
_PATIENCE = 2


class Lookahead:
    """Predicts for one session; its methods are called from within a step, in the order of
    layers.
    """

    def __init__(self, model: Transformer, attention: MemoryAttention, store: MemoryStore) -> None:
        self._model, self._attention, self._store = model, attention, store
        self._previous = store.predictor in ("previous", "both")
        self._speculative = store.predictor in ("speculative", "both")
        self._memory_layers = frozenset(attention.config.memory_layers or ())
        self._last: dict[int, list[BlockKey]] = {}  # what each layer read in the last step
        self._entered = False  # has this layer read nothing yet?
        self._x: Tensor | None = None
        self._quiet = 0  # steps since the last miss, had or foreseen

    def enter(self, layer: int, x: Tensor) -> None:
        """A layer begins with the states x [1, T, hidden]."""
        if layer == 0:
            self._quiet += 1
            if self._previous and self._quiet <= _PATIENCE:
                for units in self._last.values():
                    self._expect(units)
        self._x, self._entered = x, True

    def attended(self, layer: int, local: LocalAttention) -> None:
        """The layer has attended to its chunk and will read memory next."""
        if not self._speculative or self._quiet > _PATIENCE or layer + 1 not in self._memory_layers:
            return
        block, following = self._model.blocks[layer], self._model.blocks[layer + 1]
        assert (
            isinstance(block, DecoderLayer)
            and isinstance(following, DecoderLayer)
            and self._x is not None
        )
        x = block.mlp(self._x + block.o_proj(local.output.transpose(1, 2).flatten(2)))
        # Where guessing fails (a document was forgotten), the lookup itself says so, if there is to
        # be one.
        with suppress(MemstoreError):
            self._expect(self._attention.guess(layer + 1, *following.project(x)))

    def _expect(self, units: list[BlockKey]) -> None:
        if self._store.expect(units):
            self._quiet = 0

    def read(self, layer: int, units: list[BlockKey], missed: bool) -> None:
        """A layer leased these units; did any of them have to be fetched?"""
        if self._previous:  # a step that exceeds the budget reads several times
            self._last[layer] = units if self._entered else self._last[layer] + units
            self._entered = False
        if missed:
            self._quiet = 0
