"""The report of a traced answer as JSON values: the `memstore` field of the reply.

It has each source with its text and place; the attention of each head of each memory layer to
memory, and the lookups that the gate skipped; the candidates and scores of a model that chooses
once for a question; the sources of each token; and the costs.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memstore.disk.format.document import Document
from memstore.errors import DocumentNotFound
from memstore.model.adapter import ModelAdapter
from memstore.model.answer import BlockId, BlockRead, Source, TokenRead, Trace
from memstore.model.passages.passage_session import PassageSession
from memstore.model.session import AskSession
from memstore.store.memory_store import MemoryStore

_CUT = 3  # tokens over which a character can be spread after its first
CANDIDATES = 12  # the best of a choice that are reported, besides those chosen

MayRead = Callable[[str], bool]
"""May a document of this name be shown?"""


def report(
    trace: Trace,
    session: AskSession,
    *,
    text: str | None = None,
    most: int = 12,
    may_read: MayRead = lambda name: True,
) -> dict[str, Any]:
    """The report of an answer.

    text: of the answer, where it is a part of what the tokens say (stripped, or cut at a stop
    text); most: sources at most. Documents that may not be shown, or are gone, are left out.
    """
    reader, store, blocks = trace.reader, session.store, trace.blocks
    known = _Known(reader, store, may_read)
    ranked = [
        (block_id, known.source(block_id, block.mass)) for block_id, block in trace.ranked(most)
    ]
    shown = [(block_id, source) for block_id, source in ranked if source is not None]
    number = {block_id: index for index, (block_id, _) in enumerate(shown)}
    tokens = _tokens_of(text, trace)
    return {
        "reader": "choosing" if trace.once else "landmarks",
        "answered": session.answered,
        "sources": [_source(source, blocks[block_id], trace) for block_id, source in shown],
        "attention": _attention(trace, [read for _, read in tokens]),
        "choice": _choice(trace, session, known),
        "tokens": [
            {
                "text": piece,
                "sources": [
                    [number[block_id], round(mass, 4)]
                    for block_id, mass in read.blocks
                    if block_id in number
                ],
                "own": round(read.own, 4),
                "heads": _rows(read.heads, trace),
            }
            for piece, read in tokens
        ],
        "lookups": dict(trace.lookups),
        "tiers": trace.tiers,
        "seconds": round(trace.seconds, 4),
        "model_seconds": round(trace.model_seconds, 4),
        "first_token_seconds": round(trace.first_token_seconds, 4),
    }


def pieces(reader: ModelAdapter, tokens: Sequence[int]) -> list[str]:
    """The text that begins in each token; joined, the text of all tokens."""
    whole = reader.tokenizer.whole_characters
    return [
        whole([token], tokens[number + 1 : number + 1 + _CUT])
        for number, token in enumerate(tokens)
    ]


class _Known:
    """The documents that may be shown, by id."""

    def __init__(self, reader: ModelAdapter, store: MemoryStore, may_read: MayRead) -> None:
        self._reader, self._store = reader, store
        self._documents: dict[int, Document] = {
            number: document
            for number, document in store.readable().items()
            if may_read(document.name)
        }

    def source(self, block_id: BlockId, weight: float) -> Source | None:
        """A block with its text; None where it may not be shown, or is gone."""
        document, block = self._documents.get(block_id[0]), block_id[1]
        if document is None:
            return None
        try:
            return Source.of(self._reader, self._store, document, block, {}, weight)
        except DocumentNotFound:  # deleted since
            return None


def _source(source: Source, block: BlockRead, trace: Trace) -> dict[str, Any]:
    shape = trace.reader.shape  # a unit: the decoded keys and values of one block and KV head
    size = 2 * shape.block_size * shape.head_dim * shape.kv_dtype.itemsize
    return source.citation | {
        "heads": _rows(block.heads, trace),
        "tiers": {
            tier: {"units": units, "bytes": units * size}
            for tier, units in sorted(block.units.items())
        },
    }


def _rows(heads: NDArray[Any], trace: Trace) -> list[list[float | None]]:
    """[layers * heads] to [layers][heads], rounded; None where a lookup was skipped."""
    rounded = [None if math.isnan(mass) else round(mass, 4) for mass in heads.tolist()]
    return [rounded[at : at + trace.num_heads] for at in range(0, len(rounded), trace.num_heads)]


def _tokens_of(text: str | None, trace: Trace) -> list[tuple[str, TokenRead]]:
    """The tokens of a text, which is a part of what all tokens say, and what each read."""
    texts = pieces(trace.reader, [read.token for read in trace.tokens])
    whole = "".join(texts)
    begin = whole.find(text) if text is not None else 0
    if text is None or begin < 0:
        return list(zip(texts, trace.tokens))
    parts, at = [], 0
    for piece, read in zip(texts, trace.tokens):
        part = piece[max(0, begin - at) : max(0, begin + len(text) - at)]
        at += len(piece)
        if part:
            parts.append((part, read))
    return parts


def _attention(trace: Trace, tokens: Sequence[TokenRead]) -> dict[str, Any]:
    """Sums over these tokens, by memory layer and head: mass on memory, and lookups skipped."""
    heads = np.array([read.heads for read in tokens], np.float64)
    heads = heads.reshape(len(tokens), len(trace.layers) * trace.num_heads)
    mass, skipped = np.nansum(heads, 0), np.isnan(heads).sum(0)
    return {
        "layers": list(trace.layers),
        "heads": trace.num_heads,
        "tokens": len(tokens),
        "mass": _rows(mass, trace),
        "skipped": _rows(skipped, trace),
        "own": round(sum(read.own for read in tokens), 4),
    }


def _choice(trace: Trace, session: AskSession, known: _Known) -> dict[str, Any] | None:
    """The last choice of a session that chooses once for a question: its best candidates and those
    chosen, by score, with the mass that each layer put on them.
    """
    if not isinstance(session, PassageSession) or session.candidates is None:
        return None
    candidates, gate = session.candidates, session.reader.gate
    chosen = {(block.document, block.block): block for block in session.chosen}
    best = {(block.document, block.block): block for block in candidates.best(CANDIDATES)}
    ranked = sorted({**best, **chosen}.items(), key=lambda item: (-item[1].score, item[0]))
    rows, blocks = [], trace.blocks
    for block_id, block in ranked:
        source = known.source(block_id, block.score)
        if source is None:  # a block of the conversation, or of a document not shown
            continue
        read = blocks.get(block_id)
        rows.append(
            source.citation
            | {
                "score": source.weight,
                "chosen": block_id in chosen,
                "layers": [
                    round(sum(mass or 0.0 for mass in of_layer), 4)
                    for of_layer in _rows(read.heads, trace)
                ]
                if read is not None
                else None,
            }
        )
    scores, caution = candidates.scores, session.settings.caution
    return {
        "blocks": candidates.blocks,
        "confidence": round(float(scores.max()), 4) if len(scores) else None,
        "threshold": None if gate is None else round(gate.threshold(candidates.blocks, caution), 4),
        "candidates": rows,
    }
