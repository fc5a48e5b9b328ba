"""A memory as a LangChain retriever: pip install langchain-core."""

from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict, PrivateAttr

from memstore.integrations.opened import Opened, label


class MemstoreRetriever(BaseRetriever):
    """The passages of a memory where most of a query is found, best first.

    store: the memory's directory or URL, or an open Memory or MemoryStore. reader: what reads it,
    or its name (None: the model that it was made with). documents: to search; None for all. k: how
    many passages; an `invoke(query, k=..)` may differ. The metadata of a passage are "document",
    "span" (characters of it), "place" (its page or headings, or None), "block" and "weight" (how
    like the query it is: docs/appendix/method.md section 9) and "answered": False where the
    memory's gate would refuse the query, since none of the passages seems to answer it.
    """

    model_config = ConfigDict(extra="forbid")

    store: Any
    reader: Any = None
    documents: list[str] | None = None
    k: int = 4
    _opened: Opened = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Nothing is opened yet."""
        super().model_post_init(context)
        self._opened = Opened(self.store, self.reader)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        found = self._opened.search(query, self.documents, self.k if k is None else k)
        return [
            Document(
                id=label(source),
                page_content=source.text,
                metadata={
                    "document": source.document,
                    "span": list(source.span),
                    "place": source.place,
                    "block": source.block,
                    "weight": source.weight,
                    "answered": found.answered,
                },
            )
            for source in found
        ]
