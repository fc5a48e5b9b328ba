"""Reading a document into a memory: text to tokens to chunks to committed blocks, resumable and in
constant memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from memstore.disk.document import Document, IngestSettings
from memstore.model.reader import TextTokenizer
from memstore.model.text import Text
from memstore.store.admission import Mode
from memstore.store.memory_store import MemoryStore
from memstore.store.writer import DocumentWriter


@dataclass(frozen=True)
class IngestProgress:
    """How far an ingest is: characters read of all, tokens committed or staged, and where it went
    on from.
    """

    characters: int
    total_characters: int
    tokens: int
    resumed_tokens: int


OnProgress = Callable[[IngestProgress], None]


class ChunkReader(Protocol):
    """Reads a document's chunks, in order, and gives their blocks to its writer."""

    chunk_tokens: int  # of a whole chunk

    def chunk(self, ids: list[int], characters: int) -> None:
        """Read and stage one chunk, before which the document has so many characters; the last one
        of a document may be shorter.
        """


def ingest(
    store: MemoryStore,
    text: Text,
    tokenizer: TextTokenizer,
    settings: IngestSettings,
    begin: Callable[[DocumentWriter], ChunkReader],
    *,
    mode: Mode = "new",
    progress: OnProgress | None = None,
) -> Document:
    """Read a text into the store under text.name and return the finished document (docs/method.md
    section 6).

    begin: makes what reads chunks, behind what the writer has already. A document already there
    with the same content is returned as it is; one whose ingest was interrupted is resumed. Raises
    InvalidInput for a text that cannot be read, or that changes meanwhile: then the document stays
    unfinished.
    """
    text.check()
    writer = store.write_document(text.name, source_hash=text.digest, settings=settings, mode=mode)
    if writer is None:
        return store.document(text.name)
    with writer:
        reader = begin(writer)
        report = progress or (lambda state: None)
        number, resumed, base = writer.document.id, writer.tokens, writer.base_tokens
        characters = _characters_before(store, tokenizer, number, resumed)
        total = text.characters + _characters_before(store, tokenizer, number, base)

        def read(ids: list[int]) -> None:
            nonlocal characters
            reader.chunk(ids, characters)
            characters += tokenizer.characters(ids)
            report(IngestProgress(characters, total, writer.tokens, resumed))

        # An append reads again what stood behind the last full chunk, then the new text; a resumed
        # ingest skips what it has.
        pending = writer.replaced_tokens().ids.tolist()
        skip = max(0, resumed - base)
        for ids in tokenizer.encode_stream(text.pieces()):
            dropped = min(skip, len(ids))
            skip -= dropped
            pending.extend(ids[dropped:])
            done = 0
            while len(pending) - done > reader.chunk_tokens:
                read(pending[done : done + reader.chunk_tokens])
                done += reader.chunk_tokens
            del pending[:done]
        if pending:
            read(pending)
        return writer.finish()


def _characters_before(
    store: MemoryStore, tokenizer: TextTokenizer, document: int, token: int
) -> int:
    """Characters of a document before one of its tokens (or before its end)."""
    if token == 0:
        return 0
    span = store.tokens(document, token - 1, token)
    return span.char_start + tokenizer.characters([*span.before.tolist(), *span.ids.tolist()])
