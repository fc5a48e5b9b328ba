"""The memory of a Memorizing Transformer in a MemoryStore: every token is a block of one, its key
the landmark key, so that it is searched by the same index, cached by the same tiers and kept on the
same disk as landmark memories are.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from memstore.disk.document import Document, IngestSettings
from memstore.disk.signature import Signature
from memstore.errors import BudgetExceeded, InvalidConfig
from memstore.kernels.api import LocalAttention, memory_attention
from memstore.model.checkpoint import signature_of
from memstore.model.ingest import OnProgress, finish, ingest
from memstore.model.session_blocks import SessionBlocks
from memstore.model.text import Text
from memstore.model.tokenizer import Tokenizer
from memstore.model.units import Wanted, lease_units
from memstore.rivals.memorizing import TokenMemory
from memstore.rivals.transformer import RivalTransformer
from memstore.store.admission import Mode
from memstore.store.memory_store import MemoryStore
from memstore.store.writer import DocumentWriter

_LAYER = 0  # the one that is stored, whichever it is of the decoder


def token_signature(model: RivalTransformer, tokenizer: Tokenizer) -> Signature:
    """What ties a memory of tokens to this model. Raises InvalidConfig for a model without one."""
    if model.memory_config.kind != "memorizing":
        raise InvalidConfig(
            f"a {model.memory_config.kind} model keeps no tokens in a store; only a memorizing one "
            "does"
        )
    of_model = signature_of(model, tokenizer)
    return replace(
        of_model,
        architecture=of_model.architecture | {"memory": model.memory_config.to_dict()},
        num_layers=1,
        memory_layers=(_LAYER,),
        block_size=1,
    )


class StoredMemory(TokenMemory):
    """Documents of a store, then what is read now; of all of it the latest `tokens`."""

    def __init__(self, model: RivalTransformer, store: MemoryStore, blocks: SessionBlocks) -> None:
        """blocks: attached documents, of one token a block, and those read now."""
        chosen = model.memory_config
        self.top_k, self.tokens = chosen.top_k, chosen.tokens
        self._group = model.config.num_heads // model.config.num_kv_heads
        self._dtype = model.config.shape.kv_dtype
        self._store, self._blocks = store, blocks

    def _scope(self) -> tuple[tuple[int, int, int], ...]:
        """Runs of the latest tokens."""
        runs = self._blocks.runs(self._blocks.count)
        surplus = 0 if self.tokens is None else max(0, self._blocks.count - self.tokens)
        kept = []
        for document, first, end in runs:
            gone = min(surplus, end - first)
            surplus -= gone
            if first + gone < end:
                kept.append((document, first + gone, end))
        return tuple(kept)

    @torch.no_grad()
    def read(self, q: Tensor) -> Tensor:
        scope = self._scope()
        if not scope:
            return torch.zeros_like(q)
        hits = self._store.search_landmarks(_LAYER, q[0], scope, self.top_k)
        return self._attend(q, hits.candidates, hits.scores, scope)

    def _attend(
        self, q: Tensor, candidates: Tensor, scores: Tensor, scope: Sequence[tuple[int, int, int]]
    ) -> Tensor:
        """In halves of the rows where the tiers cannot hold the tokens of all."""

        def locate(candidate: int) -> tuple[int, int]:
            for document, first, end in scope:
                if candidate < end - first:
                    return document, first + candidate
                candidate -= end - first
            raise IndexError(candidate)

        wanted = Wanted(_LAYER, candidates, 0, self._group)
        try:
            lease, slots = lease_units(self._store.lease, wanted, locate)
        except BudgetExceeded:
            rows = q.shape[2]
            if rows == 1:
                raise
            parts = (slice(0, rows // 2), slice(rows // 2, rows))
            return torch.cat(
                [self._attend(q[:, :, p], candidates[:, p], scores[:, p], scope) for p in parts], 2
            )
        with lease:
            nothing = torch.zeros_like(q)
            of_rows = nothing[..., 0]
            return memory_attention(
                q[None],
                lease.k,
                lease.v,
                self._store.slot_lengths,
                slots[None],
                torch.zeros_like(slots[None]),
                scores[None],
                LocalAttention(nothing, torch.ones_like(of_rows), of_rows),
                gated=True,
            )[0]

    def write(self, k: Tensor, v: Tensor) -> None:
        keys, values = (
            x[0].transpose(0, 1)[:, :, None].to("cpu", self._dtype).contiguous() for x in (k, v)
        )
        self._keep(keys, values)
        self._blocks.own_end += len(keys)

    @abstractmethod
    def _keep(self, k: Tensor, v: Tensor) -> None:
        """Store k, v [n, Hkv, 1, D] of what is read now, behind its own blocks."""

    @property
    def retrieved(self) -> int:
        return min(self.top_k, self._readable)

    @property
    def bytes(self) -> int:
        return self._readable * self._store.signature.geometry.record_bytes

    @property
    def _readable(self) -> int:
        return sum(end - first for _, first, end in self._scope())


class SessionMemory(StoredMemory):
    """What is read now lies in main memory and is gone with the session."""

    def __init__(
        self, model: RivalTransformer, store: MemoryStore, documents: Sequence[tuple[int, int]]
    ) -> None:
        """documents: attached ones, as (id, tokens)."""
        self._scratch, self._documents = store.scratch(), list(documents)
        super().__init__(model, store, self._none())

    def _none(self) -> SessionBlocks:
        return SessionBlocks(self._documents, own_document=self._scratch.document)

    def _keep(self, k: Tensor, v: Tensor) -> None:
        self._scratch.add(_LAYER, k, v, k[:, :, 0])
        if self.tokens is not None:
            surplus = self._blocks.own + len(k) - self.tokens
            self._blocks.own_first += max(0, surplus)
            self._scratch.trim(self._blocks.own_first)

    def held(self) -> dict[str, Tensor]:
        own = range(self._blocks.own_first, self._blocks.own_end)
        if not own:
            return {}
        heads = self._store.signature.num_kv_heads
        candidates = torch.tensor(own).expand(heads, 1, -1)
        wanted, document = Wanted(_LAYER, candidates, 0, 1), self._scratch.document
        lease, slots = lease_units(self._store.lease, wanted, lambda block: (document, block))
        with lease:
            of_heads = [half[slots[:, 0], 0][None].clone() for half in (lease.k, lease.v)]
        return dict(zip(("keys", "values"), of_heads))

    def hold(self, held: dict[str, Tensor]) -> None:
        self._scratch.close()
        self._scratch = self._store.scratch()
        self._blocks = self._none()
        if held:
            self.write(held["keys"], held["values"])

    def close(self) -> None:
        self._scratch.close()


class DocumentMemory(StoredMemory):
    """What is read now becomes a document of the store."""

    def __init__(self, model: RivalTransformer, store: MemoryStore, writer: DocumentWriter) -> None:
        """The document's blocks so far are not there yet: they are read again first."""
        super().__init__(model, store, SessionBlocks(own_document=writer.document.id))
        self._writer = writer
        self.chunk: tuple[list[int], int] = [], 0  # tokens to be kept next, and characters before

    def _keep(self, k: Tensor, v: Tensor) -> None:
        if self._blocks.own_end >= self._writer.blocks:
            self._writer.add_chunk(*self.chunk, {_LAYER: (k, v, k[:, :, 0].contiguous())})

    def held(self) -> dict[str, Tensor]:
        return {}  # it is in the store

    def hold(self, held: dict[str, Tensor]) -> None:
        assert not held


def ingest_tokens(
    model: RivalTransformer,
    tokenizer: Tokenizer,
    store: MemoryStore,
    text: Text,
    *,
    mode: Mode = "new",
    progress: OnProgress | None = None,
) -> Document:
    """Read a text into a store of this model, as memstore.model.ingest.ingest does.

    What an interrupted run has stored is read again, since the caches before a segment depend on
    all of it, but not written again.
    """
    assert model.memory_config.kind == "memorizing"
    settings = IngestSettings(model.segment, model.memory_config.top_k)
    steps = ingest(
        store,
        text,
        tokenizer,
        settings,
        lambda writer: _TokenReader(model, store, writer),
        mode=mode,
    )
    return finish(steps, progress)


class _TokenReader:
    """Reads segments of a document, each into as many blocks as it has tokens."""

    def __init__(self, model: RivalTransformer, store: MemoryStore, writer: DocumentWriter) -> None:
        self.chunk_tokens, self._model = model.segment, model
        self._memory = DocumentMemory(model, store, writer)
        self._past = model.begin(memory=self._memory)
        if writer.tokens:
            self._read(store.tokens(writer.document.id, 0, writer.tokens).ids.tolist())

    def chunk(self, ids: list[int], characters: int) -> None:
        """As memstore.model.ingest.ChunkReader.chunk."""
        self._memory.chunk = ids, characters
        self._read(ids)
        if self._past.length:
            self._past.end_segment()

    @torch.no_grad()
    def _read(self, ids: list[int]) -> None:
        device = self._model.norm.weight.device
        self._model.read(torch.tensor([ids], device=device), self._past)
