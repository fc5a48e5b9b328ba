"""The report of a traced answer as JSON values: the `memstore` field of the reply.

It has each source with its text and place; the candidates and scores of a model that chooses once
for a question; the sources of each token; and the costs.
"""

from collections.abc import Callable, Sequence
from typing import Any

from memstore.errors import DocumentNotFound
from memstore.model.adapter import ModelAdapter
from memstore.model.answer import BlockId, Source, TokenRead, Trace
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
    reader = trace.reader
    source_of = _shown(reader, session.store, may_read)
    ranked = [(block_id, source_of(block_id, mass)) for block_id, mass in trace.ranked(most)]
    shown = [(block_id, source) for block_id, source in ranked if source is not None]
    number = {block_id: index for index, (block_id, _) in enumerate(shown)}
    tokens = _tokens_of(text, trace)
    return {
        "reader": "landmarks" if reader.keeps is None else "choosing",
        "answered": session.answered,
        "sources": [
            source.citation | {"tiers": sorted(trace.blocks[block_id])}
            for block_id, source in shown
        ],
        "choice": _choice(session, source_of),
        "tokens": [
            {
                "text": piece,
                "sources": [
                    [number[block_id], round(mass, 4)]
                    for block_id, mass in read.blocks
                    if block_id in number
                ],
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


def _shown(
    reader: ModelAdapter, store: MemoryStore, may_read: MayRead
) -> Callable[[BlockId, float], Source | None]:
    """Gives a block with its text; None where it may not be shown, or is gone."""
    documents = {number: one for number, one in store.readable().items() if may_read(one.name)}

    def source(block_id: BlockId, weight: float) -> Source | None:
        document, block = documents.get(block_id[0]), block_id[1]
        if document is None:
            return None
        try:
            return Source.of(reader, store, document, block, weight)
        except DocumentNotFound:  # deleted since
            return None

    return source


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


def _choice(
    session: AskSession, source_of: Callable[[BlockId, float], Source | None]
) -> dict[str, Any] | None:
    """The last choice of a session that chooses once for a question: its best candidates and those
    chosen, by score.
    """
    if not isinstance(session, PassageSession) or session.candidates is None:
        return None
    candidates, gate = session.candidates, session.reader.gate
    chosen = {(block.document, block.block): block for block in session.chosen}
    best = {(block.document, block.block): block for block in candidates.best(CANDIDATES)}
    ranked = sorted({**best, **chosen}.items(), key=lambda item: (-item[1].score, item[0]))
    rows = []
    for block_id, block in ranked:
        source = source_of(block_id, block.score)
        if source is None:  # a block of the conversation, or of a document not shown
            continue
        rows.append(source.citation | {"score": source.weight, "chosen": block_id in chosen})
    scores, caution = candidates.scores, session.settings.caution
    return {
        "blocks": candidates.blocks,
        "confidence": round(float(scores.max()), 4) if len(scores) else None,
        "threshold": None if gate is None else round(gate.threshold(candidates.blocks, caution), 4),
        "candidates": rows,
    }
