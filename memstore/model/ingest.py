"""Reading a document into a memory: text to tokens to chunks to committed blocks, resumable and in
constant memory.
"""

import codecs
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from memstore.disk.document import Document, IngestSettings
from memstore.errors import InvalidInput
from memstore.model.attention import Blocks, Memory
from memstore.model.config import ModelConfig
from memstore.model.session import Session
from memstore.model.tokenizer import Tokenizer
from memstore.model.transformer import Transformer
from memstore.store.admission import Mode
from memstore.store.memory_store import MemoryStore
from memstore.store.writer import DocumentWriter

_PIECE = 1 << 20


@dataclass(frozen=True)
class Text:
    """A text to read, from a file or a string, checked and hashed without holding it in memory."""

    source: Path | str
    name: str

    @classmethod
    def of(cls, source: Path | str, name: str | None = None) -> "Text":
        """Raises InvalidInput for a path that cannot be read as a text, and for a string without a
        name.
        """
        if isinstance(source, str):
            if not name:
                raise InvalidInput("a text given as a string needs a name")
            return cls(source, name)
        if not source.exists():
            raise InvalidInput(f"{source} does not exist")
        if source.is_dir():
            raise InvalidInput(f"{source} is a directory; name the files in it")
        return cls(source, name or source.stem)

    def pieces(self) -> Iterator[str]:
        """The text piece by piece. Raises InvalidInput for bytes that are not UTF-8 and for NUL
        bytes.
        """
        if isinstance(self.source, str):
            for start in range(0, len(self.source), _PIECE):
                yield self.source[start : start + _PIECE]
            return
        decoder = codecs.getincrementaldecoder("utf-8")()
        offset = 0
        try:
            with self.source.open("rb") as file:
                while raw := file.read(_PIECE):
                    if b"\0" in raw:
                        raise InvalidInput(
                            f"{self.source} is binary (a NUL byte at {offset + raw.index(0)}); "
                            "only text can be read"
                        )
                    yield decoder.decode(raw)
                    offset += len(raw)
                decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise InvalidInput(
                f"{self.source} is not UTF-8 text (near byte {offset + error.start})"
            ) from None
        except OSError as error:
            raise InvalidInput(f"cannot read {self.source}: {error.strerror}") from None

    def check(self) -> tuple[str, int]:
        """(BLAKE2 hash, characters) of the whole text; raises what `pieces` raises, and
        InvalidInput if there is nothing in it.
        """
        digest, characters, blank = hashlib.blake2b(digest_size=20), 0, True
        for piece in self.pieces():
            digest.update(piece.encode("utf-8", "surrogatepass"))
            characters += len(piece)
            blank = blank and not piece.strip()
        if blank:
            raise InvalidInput(
                f"{self.source if isinstance(self.source, Path) else self.name} is empty; there is "
                "nothing to read"
            )
        return digest.hexdigest(), characters


@dataclass(frozen=True)
class IngestProgress:
    """How far an ingest is: characters read of all, tokens committed or staged, and where it went
    on from.
    """

    characters: int
    total_characters: int
    tokens: int
    resumed_tokens: int


def ingest(
    model: Transformer,
    tokenizer: Tokenizer,
    config: ModelConfig,
    store: MemoryStore,
    text: Text,
    *,
    cmt_keys: Any,
    mode: Mode = "new",
    retrieve: bool = False,
    progress: Callable[[IngestProgress], None] | None = None,
) -> Document:
    """Read a text into the store under text.name and return the finished document (docs/method.md
    section 6).

    A document already there with the same content is returned as it is; one whose ingest was
    interrupted is resumed.
    """
    source_hash, characters = text.check()
    settings = IngestSettings(config.chunk_blocks, config.top_k, config.cmt_cutoff, retrieve)
    if retrieve:
        settings = replace(
            settings,
            granularity=config.granularity,
            score_range=config.score_range,
            recency=config.recency,
        )
    writer = store.write_document(text.name, source_hash=source_hash, settings=settings, mode=mode)
    if writer is None:
        return store.document(text.name)
    with writer:
        reader = _Reader(model, tokenizer, config, store, writer, cmt_keys, retrieve)
        report = progress or (lambda state: None)
        resumed, base = writer.tokens, writer.base_tokens
        total = characters + _characters_before(store, tokenizer, writer.document.id, base)
        # An append reads again what stood behind the last full chunk, then the new text; a resumed
        # ingest skips what it has.
        pending = writer.replaced_tokens().ids.tolist()
        skip = max(0, resumed - base)
        for ids in tokenizer.encode_stream(text.pieces()):
            dropped = min(skip, len(ids))
            skip -= dropped
            pending.extend(ids[dropped:])
            done = 0
            while len(pending) - done > reader.session.chunk_tokens:
                reader.chunk(pending[done : done + reader.session.chunk_tokens])
                done += reader.session.chunk_tokens
                report(IngestProgress(reader.characters, total, reader.tokens, resumed))
            del pending[:done]
        if pending:
            reader.chunk(pending)
        report(IngestProgress(reader.characters, total, reader.tokens, resumed))
        return writer.finish()


def _characters_before(store: MemoryStore, tokenizer: Tokenizer, document: int, token: int) -> int:
    """Characters of a document before one of its tokens (or before its end)."""
    if token == 0:
        return 0
    span = store.tokens(document, token - 1, token)
    return span.char_start + int(
        tokenizer.character_counts[np.concatenate([span.before, span.ids])].sum()
    )


class _Reader:
    """A session whose own blocks are the document's, committed by the writer at chunk ends."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        config: ModelConfig,
        store: MemoryStore,
        writer: DocumentWriter,
        cmt_keys: Any,
        retrieve: bool,
    ) -> None:
        self.store, self.writer, self.tokenizer = store, writer, tokenizer
        self.tokens = writer.tokens
        self.characters = _characters_before(store, tokenizer, writer.document.id, writer.tokens)
        memory = Memory(own_document=writer.document.id, own_end=writer.blocks)
        self._chunk: list[int] = []
        self._last_length: int | None = None
        self.session = Session(
            model, replace(config), store, memory, self._keep, cmt_keys=cmt_keys, retrieve=retrieve
        )
        if writer.blocks:
            for layer in range(config.num_layers):
                self.session.attention.remember(layer, writer.recent(layer, config.top_k)[2])
            self.session.attention.start_chunk()

    def chunk(self, ids: list[int]) -> None:
        """Read one chunk and stage its blocks; the last chunk of a document may be shorter and is
        closed by a landmark.
        """
        self._chunk = ids
        self.session.feed(ids)
        self._last_length = self.session.close_block() or None
        self.session.end_chunk()
        self.tokens += len(ids)
        self.characters += int(self.tokenizer.character_counts[ids].sum())

    def _keep(self, blocks: Blocks) -> None:
        self.writer.add_chunk(
            self._chunk, self.characters, blocks, length_of_last=self._last_length
        )
