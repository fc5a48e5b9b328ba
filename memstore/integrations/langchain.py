"""A memory as a LangChain retriever: pip install langchain-core."""

from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict, PrivateAttr

from memstore.integrations.opened import Opened, label, metadata


class MemstoreRetriever(BaseRetriever):
    """The passages of a memory most like a query, best first.

    store: the memory's directory or URL, or an open Memory. documents: names of those to search;
    None for all. k: how many passages; `invoke(query, k=..)` overrides it.

    A passage's metadata: "document", "span" (its characters), "place" (page or headings, or None),
    "block", "weight" (likeness to the query: docs/appendix/method.md section 9) and "answered":
    False where the memory's gate would refuse the query, since no passage seems to answer it.
    """

    model_config = ConfigDict(extra="forbid")

    store: Any
    documents: list[str] | None = None
    k: int = 4
    _opened: Opened = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Open the memory at the first query, not here."""
        super().model_post_init(context)
        self._opened = Opened(self.store)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        found = self._opened.search(query, self.documents, self.k if k is None else k)
        return [
            Document(
                id=label(source),
                page_content=source.text,
                metadata={**metadata(source, found), "weight": source.weight},
            )
            for source in found
        ]
