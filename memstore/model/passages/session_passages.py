"""The blocks of a session's own text: in main memory, pinned there until the session is closed."""

from collections.abc import Sequence

from memstore.model.adapter import ChoosingReader
from memstore.model.passages.passage_encoding import encode
from memstore.model.passages.passage_ingest import passages_of
from memstore.model.passages.passage_records import landmarks_of, padded, words_of
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
        self.scratch = store.session_document()
        self.blocks = SessionBlocks(documents, own_document=self.scratch.document)
        self.most = max(least, store.tiers.host.capacity // (2 * per_block))

    @property
    def document(self) -> int:
        """The number under which they are read and searched."""
        return self.scratch.document

    def make_room(self, count: int) -> None:
        """Let the oldest go, for so many more."""
        surplus = self.blocks.own + count - self.most
        if surplus > 0:
            self.blocks.own_first += surplus
            self.scratch.trim(self.blocks.own_first)

    def close(self) -> None:
        """Let them all go."""
        self.scratch.close()


class OwnPassages(OwnBlocks):
    """Own text of a session as passages, each computed alone as those of documents are, which the
    model's selector finds beside these.
    """

    def __init__(
        self,
        reader: ChoosingReader,
        store: MemoryStore,
        documents: list[tuple[int, int]],
        per_block: int,
    ) -> None:
        super().__init__(store, documents, per_block)
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
