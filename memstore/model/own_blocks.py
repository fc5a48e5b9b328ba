"""The blocks of a session's own text: in main memory, pinned there until the session is closed."""

from collections.abc import Mapping

from torch import Tensor

from memstore.model.choosing_ingest import blocks_of, words_of
from memstore.model.compact import KeysValues
from memstore.model.reader import ChoosingReader
from memstore.model.session_blocks import SessionBlocks
from memstore.store.memory_store import MemoryStore


class OwnBlocks:
    """Own blocks of a session beside attached documents: half of the host tier's budget at most;
    beyond that the oldest are let go, and length is never an error.
    """

    def __init__(
        self, store: MemoryStore, documents: list[tuple[int, int]], per_block: int, least: int = 0
    ) -> None:
        """documents: attached ones, as (id, blocks). per_block: units of a block; least: blocks
        that are held whatever the budget says.
        """
        self.scratch = store.scratch()
        self.blocks = SessionBlocks(documents, own_document=self.scratch.document)
        self.most = max(least, store.own_capacity // (2 * per_block))

    def make_room(self, count: int) -> None:
        """Let the oldest go, for so many more."""
        surplus = self.blocks.own + count - self.most
        if surplus > 0:
            self.blocks.own_first += surplus
            self.scratch.trim(self.blocks.own_first)

    def close(self) -> None:
        """Let them all go."""
        self.scratch.close()


class FoundBlocks(OwnBlocks):
    """Own blocks that a reader's selector finds, beside those of documents."""

    def add(
        self,
        reader: ChoosingReader,
        ids: list[int],
        layers: Mapping[int, KeysValues],
        landmarks: Tensor | None,
    ) -> None:
        """Add the next blocks: whole ones of these ids, their keys and values by layer [Hkv, T, D]
        and their landmarks [T, heads, width]. Where the budget holds fewer, they are forgotten.
        """
        count = len(ids) // reader.shape.block_size
        if count > self.most:
            return
        self.make_room(count)
        first = self.blocks.own_end
        for layer in reader.shape.memory_layers:
            k, v = (blocks_of(reader, half) for half in layers[layer])
            self.scratch.add(layer, k, v)
        words = words_of(reader, ids)
        self.scratch.add_selected(first, len(ids), landmarks=landmarks, words=words)
        self.blocks.own_end += count
