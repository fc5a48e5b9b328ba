"""Imports of crafted files into a memory with a selector."""

from pathlib import Path

import torch

from memstore.errors import MemstoreError
from memstore.store.memory_store import MemoryStore
from support.selected_documents import FORM, QUESTION, selected
from support.synthetic_documents import is_whole, stored


def accepted(store: MemoryStore, file: Path) -> bool:
    """Import it: refused with the memory as it was, or used with every verb and forgotten."""
    assert store.path is not None
    before = stored(store.path), selected(store.path)
    try:
        document = store.import_document(file)
    except MemstoreError:
        assert (stored(store.path), selected(store.path)) == before
        return False
    assert is_whole(store.path)
    scope = [(document.id, 0, document.blocks)]
    for head in range(FORM.heads):
        assert torch.isfinite(store.retrieval.token_maxima(QUESTION, head, scope)).all()
    assert torch.isfinite(store.retrieval.word_scores({7: 1.0, 1001: 2.0}, scope)).all()
    store.export_document(document.name, file.with_name("again"))
    store.forget(document.name)
    assert (stored(store.path), selected(store.path)) == before
    return True
