"""Documents of many passages with landmarks and words but without keys and values. Landmarks lie
around common directions, as those of texts do.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from memstore.disk.format.document import Document, IngestSettings
from memstore.disk.format.signature import Signature
from memstore.disk.tables.runs import IndexSpec
from memstore.disk.tables.texts import Passage
from memstore.index.block_rows import Scope
from memstore.store.memory_store import MemoryStore
from memstore.store.retrieve import first_stage

TOKENS, WIDTH = 12, 32  # of a passage, of a landmark
SIGNATURE = Signature("random", "random", {}, "float16", 1, (0,), 1, 8, block_size=16)
SPEC = IndexSpec("many", "9a" * 16, width=WIDTH, words=True)


def create(path: Path, spec: IndexSpec = SPEC) -> MemoryStore:
    return MemoryStore.create(path, SIGNATURE, selector=spec, host_budget=1 << 22)


def landmarks(text: int, passages: int) -> np.ndarray:
    """Landmarks int8 [passages, TOKENS, WIDTH] of a text."""
    rng = np.random.default_rng(text)
    directions = np.random.default_rng(0).standard_normal((200, WIDTH))
    vectors = directions[rng.integers(0, 200, (passages, TOKENS))]
    vectors = vectors + 0.5 * rng.standard_normal(vectors.shape)
    units = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return (127 * units).round().astype(np.int8)


def words(text: int, passages: int) -> list[list[tuple[int, int]]]:
    """A word that is nearly everywhere, one that is now and then, one of this passage alone."""
    return [
        [(7, 1 + at % 3), (1000 + at % 50, 1), (1 << 31 | text << 20 | at, 2)]
        for at in range(passages)
    ]


def add(
    store: MemoryStore,
    name: str,
    text: int,
    passages: int,
    mode: str = "new",
    alike: int | None = None,
) -> Document:
    """Add a document of the passages of a text. alike: how many landmarks differ at most."""
    writer = store.write_document(
        name,
        source_hash=f"{text}:{passages}",
        settings=IngestSettings(passage_tokens=TOKENS),
        mode=mode,
    )
    with writer:
        first = writer.tokens // TOKENS
        some = [
            Passage(np.arange(TOKENS) + 1000 * at + (text << 22), 0, "", 10 * at, 10)
            for at in range(first, passages)
        ]
        flat = torch.from_numpy(landmarks(text, passages)[first:]).view(-1, WIDTH)
        if alike is not None:
            flat = flat[torch.arange(len(flat)) % alike]
        writer.add_passages(some, [], given=[], landmarks=flat, words=words(text, passages)[first:])
        return writer.finish()


def question(text: int, passage: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [5, WIDTH] near some tokens of a passage, and their weights."""
    rng = np.random.default_rng(seed)
    rows = landmarks(text, passage + 1)[passage, rng.permutation(TOKENS)[:5]] / 127
    rows = rows + 0.05 * rng.standard_normal(rows.shape)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    weights = torch.tensor([0.4, 0.3, 0.2, 0.09, 0.01])
    return torch.from_numpy(rows.astype(np.float32)), weights


def everything(store: MemoryStore) -> Scope:
    return [(document.id, 0, document.blocks) for document in store.documents()]


# Lists of small memories: two stages from the first token on, with few passages proposed

PROPOSED = 60


def search_by_lists(patch: pytest.MonkeyPatch) -> None:
    """Search in two stages whatever the size."""
    patch.setattr(first_stage, "PAYING", 1)
    patch.setattr(first_stage, "PROPOSED", (PROPOSED, PROPOSED))
