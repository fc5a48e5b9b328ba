"""Documents of passages of equal size, without a model: what they are found by follows from
(text, token) and (text, block).
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memstore.block import BlockKey
from memstore.disk.format.document import Document, IngestSettings
from memstore.disk.format.index_spec import IndexSpec
from memstore.disk.format.signature import Signature
from memstore.disk.format.text_parts import Passage
from memstore.errors import MissingBlock
from memstore.store.memory_store import MemoryStore
from support.synthetic_documents import BLOCK, CHUNK, SIGNATURE, blocks

PASSAGES = replace(
    SIGNATURE, num_layers=1, memory_layers=(0,), num_kv_heads=1, head_dim=32
)  # a passage is one record
FORM = IndexSpec("test", "ab" * 16, width=8, words=True)
OTHER = IndexSpec("other", "cd" * 16, width=16, words=True)
SETTINGS = IngestSettings(passage_tokens=BLOCK)
QUESTION = torch.linspace(-1, 1, 24).view(3, 8)


def create(
    path: Path, form: IndexSpec = FORM, signature: Signature = PASSAGES, **options: object
) -> MemoryStore:
    options = {"host_budget": 1 << 22, **options}  # tiny blocks: a GiB would be millions of slots
    return MemoryStore.create(path, signature, selector=form, **options)


def landmarks(text: int, first: int, end: int, form: IndexSpec = FORM) -> Tensor:
    """Landmarks of tokens first .. end."""
    token = np.arange(first, end, dtype=np.int64)[:, None]
    number = np.arange(form.width, dtype=np.int64)[None, :]
    values = (token * 7919 + number * 104_729 + text * 1_299_709) % 251 - 125
    return torch.from_numpy(values).to(torch.int8)


def words(text: int, first: int, end: int) -> list[list[tuple[int, int]]]:
    """Words of blocks first .. end: one that is everywhere, and rarer ones; every tenth block has
    none.
    """
    return [
        []
        if block % 10 == 9
        else [(7, 1 + block % 3), (1000 + (block * 31 + text) % 40, 2), (1 << 31 | block, 1)]
        for block in range(first, end)
    ]


def ingest(
    store: MemoryStore,
    name: str,
    tokens: int,
    *,
    text: int = 1,
    mode: str = "new",
    commit_bytes: int = 1,
    after_chunk: Callable[[int], None] = lambda tokens: None,
) -> Document:
    """Read the first `tokens` tokens of a text, from where the document's writer says."""
    form = store.selector
    assert form is not None
    writer = store.write_document(
        name,
        source_hash=f"{text}:{tokens}",
        settings=SETTINGS,
        mode=mode,
        commit_bytes=commit_bytes,
    )
    if writer is None:
        return store.document(name)
    with writer:
        for first in range(writer.tokens, tokens, CHUNK):
            end = min(first + CHUNK, tokens)
            writer.add_passages(**given(text, first, end, form))
            after_chunk(end)
        return writer.finish()


def given(text: int, first: int, end: int, form: IndexSpec = FORM) -> dict[str, Any]:
    """What a writer is given of tokens first .. end, where first begins a passage."""
    at, stop = first // BLOCK, -(-end // BLOCK)
    k, v, _ = blocks(text, 0, at, end - first, shape=PASSAGES)
    lengths = [len(one.ids) for one in passages(text, first, end)]
    return {
        "passages": passages(text, first, end),
        "kv": [(k[n, 0, :rows], v[n, 0, :rows]) for n, rows in enumerate(lengths)],
        "landmarks": landmarks(text, first, end, form) if form.width else None,
        "words": words(text, at, stop) if form.words else None,
    }


def passages(text: int, first: int, end: int) -> list[Passage]:
    """Tokens first .. end as passages of a block each; no two have the same tokens."""
    return [
        Passage(np.arange(at, min(at + BLOCK, end)) + 100_000 * text, 0, "", 3 * at, 3 * BLOCK)
        for at in range(first, end, BLOCK)
    ]


def check_content(store: MemoryStore, document: Document, text: int) -> None:
    """Blocks, and what they are found by, are those of the text."""
    form = store.selector
    assert form is not None
    k, v, _ = blocks(text, 0, 0, document.tokens, shape=PASSAGES)
    for block in range(0, document.blocks, 5):
        (place,) = store.retrieval.stored_at([(document.id, block)])
        if place is None:
            raise MissingBlock(f"passage {block} is not stored")
        with store.lease([BlockKey(place[0], 0, place[1], 0)]) as lease:
            assert torch.equal(lease.k[lease.slots], k[block])
            assert torch.equal(lease.v[lease.slots], v[block])
    if document.state != "ready":
        return
    scope = [(document.id, 0, document.blocks)]
    q = torch.linspace(-1, 1, 3 * form.width).view(3, form.width)
    products = q.double() @ landmarks(text, 0, document.tokens, form).double().T / 127
    expected = torch.stack([part.amax(-1) for part in products.split(BLOCK, dim=1)], dim=1)
    found = store.retrieval.token_maxima(q, scope)
    # torch.testing would be imported anew in every forked child
    assert torch.allclose(found.double(), expected, atol=1e-5, rtol=1e-5)
    scores = store.retrieval.word_scores({7: 1.0, 1000: 1.0}, scope)
    there = [{word for word, _ in block} for block in words(text, 0, document.blocks)]
    assert (scores > 0).tolist() == [bool(block & {7, 1000}) for block in there]


def selected(path: Path) -> dict[str, object]:
    """All that a memory's documents are found by, as its tables hold it."""
    from memstore.disk.tables.catalog import Catalog

    catalog = Catalog.open(path, read_only=True)
    try:
        with catalog.database.read() as txn:
            return {
                "form": catalog.index_spec,
                "landmarks": {key: bytes(value) for key, value in txn.scan("landmarks")},
            }
    finally:
        catalog.close()
