"""The context miss token's values, measured on text: what a skipped lookup would have given.

A row whose gate is below the cutoff gives a small share g of its attention to memory and does not
look it up. The share is known and what it would have read is not; but most of that is the same
for all such rows of a head (docs/appendix/method.md section 3), and a value v of the head stands
for it: the row takes g v. The best v is the mean of what rows with a low gate read, weighed by g
squared.
"""

from collections.abc import Callable, Iterator, Sequence
from random import Random

import torch
from torch import Tensor

from memstore.errors import InvalidInput
from memstore.kernels.api import LocalAttention
from memstore.model.landmark.landmark_session import LandmarkAPI, LandmarkSession
from memstore.store.memory_store import MemoryStore

_BELOW = 0.3  # the gate of rows that are measured
_BEFORE = 16  # chunks of text in memory; then one is measured
_CHARACTERS = 12  # of a token, more than any text has on average
_TRIES = 50  # places that may lie too near the end of a text


def measure_cmt_values(
    model: LandmarkAPI,
    texts: Sequence[str],
    *,
    places: int,
    seed: int,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[Tensor, Tensor]:
    """By layer and head: values [L, H, D], and the share [L, H] of what rows with a low gate read
    that is lost with the values; 1 is lost without.

    Each of `places` places of the texts, drawn at random, long texts more often, is read as a
    session reads on from its own memory of the text before it, every row looking up. Raises
    InvalidInput for a model without a gate, and for texts of which none is long enough.
    """
    if model.cmt_keys is None:
        raise InvalidInput("the model has no context miss token, and skips no lookup")
    chunk = model.lookup.chunk_blocks * model.shape.block_size
    passages = _passages(model, texts, (_BEFORE + 1) * chunk, seed)
    sums = _Sums(model)
    for done in range(1, places + 1):
        ids = next(passages)
        with (
            MemoryStore.in_memory(model.signature) as store,
            model.session(store, [], retrieve=False) as session,
        ):
            session.feed(ids[:-chunk])
            session.end_chunk()
            sums.read(session, ids[-chunk:])
        if done % 20 == 0 or done == places:
            report(f"{done} of {places} places read")
    return sums.values(), sums.lost()


def _passages(
    model: LandmarkAPI, texts: Sequence[str], tokens: int, seed: int
) -> Iterator[list[int]]:
    """Token ids of places with enough text after them; of the beginning of a text where none is
    found soon.
    """
    encode, characters, rng = model.tokenizer.encode, tokens * _CHARACTERS, Random(seed)
    texts = [text for text in texts if len(encode(text[:characters])) >= tokens]
    if not texts:
        raise InvalidInput(f"no text has {tokens:,} tokens, which a place of it is long")
    lengths = [len(text) for text in texts]
    while True:
        for left in range(_TRIES, 0, -1):
            (text,) = rng.choices(texts, lengths)
            at = rng.randrange(len(text)) if left > 1 else 0
            ids = encode(text[at : at + characters])
            if len(ids) >= tokens:
                break
        yield ids[:tokens]


class _Sums:
    """Of rows with a low gate, by layer and head: what they took from memory, and how much."""

    def __init__(self, model: LandmarkAPI) -> None:
        shape = model.shape
        heads = (shape.num_layers, shape.num_heads)
        self._model = model
        self._weight = torch.zeros(heads, dtype=torch.float64)
        self._taken = torch.zeros(*heads, shape.head_dim, dtype=torch.float64)
        self._squares = torch.zeros(heads, dtype=torch.float64)
        self._local: LocalAttention | None = None

    def attended(self, layer: int, local: LocalAttention) -> None:
        """As an Observer: the chunk's part of what follows."""
        self._local = local

    def missed(self) -> None:
        """As an Observer."""

    @torch.no_grad()
    def read(self, session: LandmarkSession, ids: Sequence[int]) -> None:
        """Add a chunk that the session reads from its memory."""
        attention = session.attention
        attention.retrieve, attention.observer = True, self
        attention.lookup.settings = attention.lookup.settings.changed(cmt_cutoff=0.0)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            output = session.attend(layer, q, k, v)
            local = self._local
            assert local is not None
            self._add(
                layer, local.gate[0].cpu().double(), (output - local.output)[0].cpu().double()
            )
            return output

        size, landmark = self._model.shape.block_size, self._model.landmark_id
        sequence = [
            token for at in range(0, len(ids), size) for token in (*ids[at : at + size], landmark)
        ]
        self._model.hidden(torch.tensor([sequence], device=self._model.device), attend)

    def _add(self, layer: int, gate: Tensor, taken: Tensor) -> None:
        """gate [H, T], taken [H, T, D]: gate times what was read."""
        low = (gate < _BELOW).double()
        self._weight[layer] += (low * gate**2).sum(1)
        self._taken[layer] += (low[..., None] * gate[..., None] * taken).sum(1)
        self._squares[layer] += (low[..., None] * taken**2).sum((1, 2))

    def values(self) -> Tensor:
        """[L, H, D], zeros where no row had a low gate."""
        return (self._taken / self._weight.clamp(min=1e-12)[..., None]).float()

    def lost(self) -> Tensor:
        """[L, H]."""
        kept = (self._taken**2).sum(-1) / self._weight.clamp(min=1e-12)
        return (1 - kept / self._squares.clamp(min=1e-12)).float()
