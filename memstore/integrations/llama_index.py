"""A memory as a LlamaIndex retriever: pip install llama-index-core."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from memstore.integrations.opened import Opened, label, metadata

if TYPE_CHECKING:
    from memstore.memory import Memory


class MemstoreRetriever(BaseRetriever):
    """The passages of a memory most like a query, best first.

    A node's score is that likeness; its metadata are "document", "span" (its characters), "place"
    (page or headings, or None), "block" and "answered": False where the memory's gate would refuse
    the query, since no passage seems to answer it.
    """

    def __init__(
        self,
        store: "Memory | Path | str",
        *,
        documents: Sequence[str] | None = None,
        similarity_top_k: int = 4,
        **base: Any,
    ) -> None:
        """store: the memory's directory or URL, or an open Memory. documents: names of those to
        search; None for all. base: passed to BaseRetriever.
        """
        super().__init__(**base)
        self._opened = Opened(store)
        self._documents, self.similarity_top_k = documents, similarity_top_k

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = self._opened.search(query_bundle.query_str, self._documents, self.similarity_top_k)
        return [
            NodeWithScore(
                node=TextNode(
                    id_=label(source), text=source.text, metadata=metadata(source, found)
                ),
                score=source.weight,
            )
            for source in found
        ]
