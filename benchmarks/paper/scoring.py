"""Log probabilities of the tokens of a text that is read from its beginning, by settings of the
session, and what reading it cost.
"""

import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.baselines.past import Attended
from benchmarks.baselines.reading import AnyModel, BaselineModel, Reading
from memstore import LandmarkModel, MemoryStore
from memstore.model.landmark.landmark_session import LandmarkSession

NUMBER = 2  # bytes of a number of the past: what is held in more is counted as if it were not
_AT_ONCE = 1 << 13


@dataclass(frozen=True)
class Way:
    """How a model reads; None = as it was trained. What belongs to other memories is ignored."""

    chunk: int | None = None  # tokens read at once: a chunk of blocks, or a segment
    # landmarks
    top_k: int | None = None
    own_blocks: int | None = None  # how many of the latest blocks of the text are kept
    granularity: str | None = None
    cmt_cutoff: float | None = None
    retrieve: bool = True
    cache: int | None = None  # Transformer-XL, Memorizing: tokens before the segment

    def __str__(self) -> str:
        """What differs from how a model was trained: "top_k 2, own_blocks 16"."""
        chosen = {name: value for name, value in vars(self).items() if value is not None}
        return ", ".join(f"{name} {value}" for name, value in chosen.items() if value is not True)


@dataclass(frozen=True)
class Scored:
    """The scored tokens and their costs.

    Log probabilities [n], tokens that each attended to (the mean over layers and heads), bytes of
    the past at two a number, seconds of the CPU, lookups by (token, head, layer).
    """

    scores: np.ndarray
    attended: float
    state: int
    seconds: float
    done: int = 0
    skipped: int = 0


def score(model: AnyModel, way: Way, ids: np.ndarray, begin: int = 1) -> Scored:
    """Read a text from its beginning in a new session. Scores the tokens from `begin` on."""
    if isinstance(model, BaselineModel):
        return _score_baseline(model, way, ids, begin)
    chunk = way.chunk and way.chunk // model.shape.block_size
    lookup = {
        name: getattr(way, name) for name in ("top_k", "own_blocks", "granularity", "cmt_cutoff")
    }
    geometry = model.signature.geometry
    records = len(ids) // model.shape.block_size * model.shape.num_layers
    room = max(1 << 30, 3 * records * geometry.record_bytes)  # half of it is a session's own
    with (
        MemoryStore.in_memory(model.signature, host_budget=room) as store,
        model.session(store, [], retrieve=way.retrieve, chunk_blocks=chunk, **lookup) as session,
    ):
        _read(session, ids[: begin - 1])
        return _score_landmarks(model, session, ids, begin)


def _score_landmarks(
    model: LandmarkModel, session: LandmarkSession, ids: np.ndarray, begin: int
) -> Scored:
    shape, lookups = model.shape, session.lookups
    first, keys, at = (lookups.done, lookups.skipped), 0.0, begin - 1
    parts, began = [], time.process_time()
    while at < len(ids) - 1:  # chunk by chunk: the blocks that may be chosen are those before it
        room = session.chunk_tokens - session.content % session.chunk_tokens
        piece = ids[at : min(at + room, len(ids) - 1)]
        done = lookups.done
        parts.append(_log_probabilities(session, piece, ids[at + 1 :]))
        blocks = min(session.settings.top_k, session.blocks.count)
        # landmarks look up too: a row of theirs stands for those of tokens
        keys += (lookups.done - done) * blocks * shape.block_size**2 / shape.stride
        seen = session.content - len(piece)  # of the chunk, before the piece
        local = len(piece) * seen + len(piece) * (len(piece) + 1) // 2
        keys += local * shape.num_layers * shape.num_heads
        at += len(piece)
    rows = (len(ids) - begin) * shape.num_layers * shape.num_heads
    recent = min(session.settings.top_k, session.blocks.own)
    searched = len(shape.memory_layers)
    blocks = session.blocks.own * searched + recent * (shape.num_layers - searched)
    numbers = shape.num_kv_heads * shape.head_dim * (2 * shape.block_size + 1)
    return Scored(
        np.concatenate(parts),
        keys / rows,
        blocks * numbers * NUMBER,
        time.process_time() - began,
        lookups.done - first[0],
        lookups.skipped - first[1],
    )


def _score_baseline(model: BaselineModel, way: Way, ids: np.ndarray, begin: int) -> Scored:
    transformer, trained = model.transformer, model.transformer.memory_config
    if way.chunk is not None:
        transformer.memory_config = replace(trained, segment=way.chunk)
    try:
        with model.session(cache=way.cache) as session:
            _read(session, ids[: begin - 1])
            past = session.past
            past.attended = Attended()
            began = time.process_time()
            scores = _log_probabilities(session, ids[begin - 1 : -1], ids[begin:])
            seconds = time.process_time() - began
            state = past.bytes * NUMBER // 4  # held in float32
            return Scored(scores, past.attended.per_token, state, seconds)
    finally:
        transformer.memory_config = trained


def _read(session: LandmarkSession | Reading, ids: np.ndarray) -> None:
    """Feed what is not scored, some chunks at a time: of a million tokens the states are large."""
    for at in range(0, len(ids), _AT_ONCE):
        session.feed(ids[at : at + _AT_ONCE].tolist())


@torch.no_grad()
def _log_probabilities(
    session: LandmarkSession | Reading, ids: np.ndarray, following: np.ndarray
) -> np.ndarray:
    logits = session.logits(session.feed(ids.tolist())).log_softmax(-1)
    targets = torch.tensor(following[: len(ids)], device=logits.device)
    return logits.gather(-1, targets[:, None])[:, 0].double().cpu().numpy()
