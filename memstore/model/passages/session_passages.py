"""Passages of what has left a session's dialogue buffer, pinned in main memory until it ends."""

from collections.abc import Sequence

from memstore.model.passages.passage_encoding import encode
from memstore.model.passages.passage_ingest import passages_of
from memstore.model.passages.passage_protocol import PassageModel
from memstore.model.passages.passage_records import landmarks_of, padded, words_of
from memstore.model.session_blocks import OwnBlocks
from memstore.store.memory_store import MemoryStore


class OwnPassages(OwnBlocks):
    """Own text of a session as passages, each computed alone as those of documents are, which the
    model's selector finds beside these.
    """

    def __init__(
        self,
        reader: PassageModel,
        store: MemoryStore,
        documents: list[tuple[int, int]],
        bound: int | None = None,
    ) -> None:
        """documents, bound: as OwnBlocks takes them."""
        per_block = len(reader.shape.memory_layers) * reader.shape.num_kv_heads
        super().__init__(store, documents, per_block, bound=bound)
        self._reader = reader

    def add(self, ids: Sequence[int]) -> None:
        """Add the text of these ids. Where the budget holds less of it, it is forgotten."""
        reader = self._reader
        passages = list(passages_of(reader, [reader.tokenizer.decode(ids)]))
        count = len(passages)
        if not 0 < count <= self.most:
            return
        self.make_room(count)
        found = list(encode(reader, [one.ids.tolist() for one in passages]))
        lengths = [len(one.ids) for one in passages]
        for layer, (k, v) in padded(reader, found).items():
            self.scratch.add(layer, k, v, lengths=lengths)
        self.scratch.add_selected(
            self.blocks.own_end,
            lengths,
            landmarks=landmarks_of(reader, found),
            words=words_of(reader, passages),
        )
        self.blocks.own_end += count
