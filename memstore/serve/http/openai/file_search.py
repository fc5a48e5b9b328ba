"""The tool `file_search` of a response: which documents a question is asked of, and what of them
the answer cites.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from sqlite3 import Row
from typing import Annotated, Any, Literal

from pydantic import Field

from memstore.model.answer import Source
from memstore.serve.answering.answers import Outcome
from memstore.serve.api_keys import Access
from memstore.serve.document_access import DocumentAccess
from memstore.serve.http.openai.filters import Filters, holds
from memstore.serve.http.openai.vector_store_search import location
from memstore.serve.http.openai.vector_stores import FileId
from memstore.serve.state.vector_tables import VectorStores
from memstore.serve.strict import Strict, entries


class Ranking(Strict):
    """score_threshold: the least share of what an answer read that a source must have."""

    ranker: Literal["auto", "default-2024-11-15"] | None = None
    score_threshold: Annotated[float, Field(ge=0, le=1)] | None = None


class FileSearchTool(Strict):
    """The tool as a request gives it."""

    type: Literal["file_search"]
    vector_store_ids: Annotated[list[FileId], entries(16, least=1)]
    filters: Filters | None = None
    max_num_results: Annotated[int, Field(ge=1, le=50)] | None = None
    ranking_options: Ranking | None = None


@dataclass(frozen=True)
class Attached:
    """The files of a tool that are read to their end, by their documents."""

    links: Mapping[str, Row]
    most: int  # sources
    least: float  # share

    @property
    def documents(self) -> list[str]:
        """The names of what the question is asked of."""
        return list(self.links)

    def kept(self, outcome: Outcome) -> list[tuple[Source, float]]:
        """The sources that the tool asks for, the most read first, each with its share
        of all that the answer read.
        """
        whole = outcome.read or 1.0
        known = [(source, source.weight / whole) for source in outcome.sources]
        return [
            (source, share)
            for source, share in known
            if source.document in self.links and share >= self.least
        ][: self.most]

    def annotations(self, outcome: Outcome, text: str) -> list[dict[str, Any]]:
        """OpenAI's file_citation of every source, at the end of the answer's text; with the quoted
        text, and where in the document it is.
        """
        return [
            {
                "type": "file_citation",
                "index": len(text),
                "file_id": self.links[source.document]["id"],
                "filename": self.links[source.document]["filename"],
                "quote": source.text,
                "memstore": {**location(source), "weight": source.weight},
            }
            for source, _ in self.kept(outcome)
        ]

    def call(self, queries: Sequence[str], outcome: Outcome | None) -> dict[str, Any]:
        """OpenAI's output item of the search. outcome: of the answer; None for a request that does
        not include the results.
        """
        return {
            "id": f"fs_{secrets.token_hex(12)}",
            "type": "file_search_call",
            "status": "completed",
            "queries": list(queries),
            "results": None if outcome is None else self._results(outcome),
        }

    def _results(self, outcome: Outcome) -> list[dict[str, Any]]:
        return [
            {
                "file_id": self.links[source.document]["id"],
                "filename": self.links[source.document]["filename"],
                "score": round(share, 4),
                "text": source.text,
                "attributes": json.loads(self.links[source.document]["attributes"]),
                "memstore": location(source),
            }
            for source, share in self.kept(outcome)
        ]


def attach(
    stores: VectorStores, documents: DocumentAccess, access: Access, tool: FileSearchTool
) -> Attached:
    """The documents that a tool means, which the asker may read. Waits for the database. Raises
    ApiError for a vector store that is not there, or has expired.
    """
    links: dict[str, Row] = {}
    for id_ in tool.vector_store_ids:
        vector_store = stores.used(id_, access)
        for link in stores.links(vector_store, access):
            meant = link["status"] == "completed" and holds(tool.filters, link["attributes"])
            if meant and documents.visible(access, link["document"]):
                links.setdefault(link["document"], link)
    ranking = tool.ranking_options or Ranking()
    return Attached(links, tool.max_num_results or 20, ranking.score_threshold or 0.0)
