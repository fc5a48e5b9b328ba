"""Ways to read a text that store nothing: what ingesting and asking are compared with."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from memstore import LandmarkModel, MemoryStore
from memstore.devices import fast_dtype
from memstore.model.landmark.landmark_session import LandmarkSession
from memstore.training.objectives import encode_windows


class Forgetful(LandmarkSession):
    """A session that keeps only the blocks that the next chunk attends to: the chunked forward
    pass, with nothing stored.
    """

    def __init__(self, model: LandmarkModel, store: MemoryStore, chunk_blocks: int) -> None:
        settings = model.lookup.changed(chunk_blocks=chunk_blocks)
        super().__init__(model, settings, store, [], retrieve=False)
        self._most = settings.chunk_blocks + settings.top_k


def chunked_forward(model: LandmarkModel, ids: np.ndarray, chunk_blocks: int) -> None:
    """Read ids without storing anything."""
    with (
        MemoryStore.in_memory(model.signature) as store,
        Forgetful(model, store, chunk_blocks) as session,
    ):
        step = chunk_blocks * model.config.block_size
        for start in range(0, len(ids), step):
            session.feed(ids[start : start + step].tolist())


def windows_forward(model: LandmarkModel, ids: np.ndarray, blocks: int, batch: int) -> None:
    """Read ids as windows that attend to nothing outside themselves."""
    size = model.config.block_size
    whole = len(ids) // (blocks * size) * blocks * size
    content = torch.from_numpy(ids[:whole]).view(-1, blocks, size)
    landmarks = torch.full((len(content), blocks, 1), model.config.landmark_id)
    windows = torch.cat([content, landmarks], -1).flatten(1)
    with torch.inference_mode():
        for some in windows.split(batch):
            encode_windows(model.transformer, some)


def forwards(model: LandmarkModel) -> dict[str, Callable[[np.ndarray], None]]:
    """Every storage-free way to read a text."""
    ways: dict[str, Callable[[np.ndarray], None]] = {}
    for blocks in (8, 16):
        ways[f"chunks of {blocks}"] = partial(chunked_forward, model, chunk_blocks=blocks)
    for blocks in (8, 12):
        ways[f"windows of {blocks}"] = partial(windows_forward, model, blocks=blocks, batch=8)

    def in_bfloat16(way: Callable[[np.ndarray], None]) -> Callable[[np.ndarray], None]:
        def run(ids: np.ndarray) -> None:
            with torch.autocast("cpu", torch.bfloat16):
                way(ids)

        return run

    if fast_dtype() != torch.bfloat16:
        return ways  # slower here, and nobody's choice
    windows = {name: way for name, way in ways.items() if name.startswith("windows")}
    return ways | {f"{name}, bfloat16": in_bfloat16(way) for name, way in windows.items()}
