"""/v1/vector_stores/{id}/search: the passages of a vector store that are most like a phrase."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from sqlite3 import Row
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, StringConstraints
from starlette.concurrency import run_in_threadpool

from memstore.errors import DocumentNotFound
from memstore.model.answer import Matches, Source
from memstore.model.model_api import ModelAPI
from memstore.serve.answering.worker import Worker
from memstore.serve.api_errors import unsupported
from memstore.serve.api_keys import Access
from memstore.serve.http.authorization import Reads, owner
from memstore.serve.http.openai.filters import Filters, holds
from memstore.serve.state.vector_tables import VectorStores
from memstore.serve.strict import Strict, entries
from memstore.store.memory_store import MemoryStore

Phrase = Annotated[str, StringConstraints(min_length=1, max_length=8192, pattern=r"\S")]


class Ranking(Strict):
    """score_threshold: how like the phrase a passage must be."""

    ranker: Literal["none", "auto", "default-2024-11-15"] | None = None
    score_threshold: Annotated[float, Field(ge=0, le=1)] | None = None


class Search(Strict):
    """What is looked for: a phrase, or several of which any may be found."""

    query: Phrase | Annotated[list[Phrase], entries(16, least=1)]
    filters: Filters | None = None
    max_num_results: Annotated[int, Field(ge=1, le=50)] = 10
    ranking_options: Ranking | None = None
    rewrite_query: bool | None = None


def router(stores: VectorStores, reader: ModelAPI, store: MemoryStore, worker: Worker) -> APIRouter:
    """The route. reader, store: of what is searched, by the worker."""
    routes = APIRouter()

    @routes.post("/v1/vector_stores/{store_id}/search")
    async def search(
        request: Request, store_id: str, access: Reads, asked: Search
    ) -> dict[str, Any]:
        if asked.rewrite_query:
            raise unsupported("rewrite_query")
        phrases = [asked.query] if isinstance(asked.query, str) else asked.query
        links = await run_in_threadpool(_files, stores, store_id, access, asked)
        sources = Matches[Source]()
        if links:
            work = _searching(reader, store, phrases, list(links), asked.max_num_results)
            async with aclosing(worker.steps(owner(request), work)) as steps:
                async for best in steps:
                    sources = best  # the last are those of all phrases
        scored = zip(sources, scores(sources, shares=reader.keeps is None))
        least = (asked.ranking_options or Ranking()).score_threshold or 0.0
        return {
            "object": "vector_store.search_results.page",
            "search_query": phrases,
            "data": [
                search_result(links[source.document], source, score)
                for source, score in scored
                if score >= least
            ],
            "has_more": False,
            "next_page": None,
            "memstore": {"absent": list(sources.absent)},
        }

    return routes


def scores(sources: Sequence[Source], *, shares: bool) -> list[float]:
    """How well each of a search's sources fits, best first, in 0..1.

    shares: their weights say how like the phrase they are, in 0..1; otherwise, of a reader that
    chooses once for a question, scores of its selector: exp(weight - that of the best).
    """
    if shares:
        return [source.weight for source in sources]
    return [round(math.exp(source.weight - sources[0].weight), 4) for source in sources]


def search_result(link: Row, source: Source, score: float) -> dict[str, Any]:
    """OpenAI's object of a search's result; `memstore`: where in the document it is."""
    return {
        "file_id": link["id"],
        "filename": link["filename"],
        "score": score,
        "attributes": json.loads(link["attributes"]),
        "content": [{"type": "text", "text": source.text}],
        "memstore": {**location(source), "weight": source.weight},
    }


def location(source: Source) -> dict[str, Any]:
    """Where a source stands: its document, its block there, its characters, and on which page or
    under which headings they are.
    """
    where = {"document": source.document, "block": source.block, "span": list(source.span)}
    return where | {"place": source.place}


def _files(stores: VectorStores, id_: str, access: Access, asked: Search) -> dict[str, Row]:
    """The files of a store that are searched, by document."""
    return {
        link["document"]: link
        for link in stores.links(stores.used(id_, access), access)
        if link["status"] == "completed" and holds(asked.filters, link["attributes"])
    }


def _searching(
    reader: ModelAPI,
    store: MemoryStore,
    phrases: Sequence[str],
    documents: Sequence[str],
    most: int,
) -> Iterator[Matches[Source]]:
    """The passages most like a phrase, best first, each once: after each of the phrases,
    a step on the model's thread.
    """
    best: dict[tuple[str, int], Source] = {}
    absent: dict[str, None] = {}
    for phrase in phrases:
        matches = _search(reader, store, phrase, documents, most)
        absent.update(dict.fromkeys(matches.absent))
        for source in matches:
            at = source.document, source.block
            if at not in best or source.weight > best[at].weight:
                best[at] = source
        ranked = sorted(best.values(), key=lambda source: -source.weight)
        yield Matches(ranked[:most], list(absent))


def _search(
    reader: ModelAPI, store: MemoryStore, phrase: str, documents: Sequence[str], most: int
) -> Matches[Source]:
    """As ModelAPI.search, of those documents that are still there."""
    while there := [name for name in documents if store.has(name)]:
        try:
            return reader.search(phrase, store, documents=there, top_k=most)
        except DocumentNotFound:
            if there == [name for name in there if store.has(name)]:
                raise  # it is there, and was another meanwhile
    return Matches()
