"""LangChain's own retriever tests, and a LlamaIndex query, over a memory.

Both frameworks are installed by `make test-services`.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from memstore.errors import DocumentNotFound, InvalidInput
from memstore.memory import Memory
from memstore.model.landmark.landmark_model import LandmarkModel, load_model
from memstore.model.passages.selector import Gate
from memstore.store.memory_store import MemoryStore
from support.diary import DIARY, LETTER, write_diary
from support.tiny_decoder import word_reader

pytestmark = [pytest.mark.services, pytest.mark.anyio]

if find_spec("langchain_tests") is None or find_spec("llama_index") is None:
    pytest.skip("run `make test-services`, which installs the programs", allow_module_level=True)

from langchain_tests.integration_tests import RetrieversIntegrationTests  # noqa: E402


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def reader() -> LandmarkModel:
    return load_model()


@pytest.fixture(scope="module")
def diary(tmp_path_factory: pytest.TempPathFactory, reader: LandmarkModel) -> Path:
    return write_diary(tmp_path_factory.mktemp("memory") / "m", reader)


class TestLangChain(RetrieversIntegrationTests):
    """LangChain's standard tests."""

    @pytest.fixture(autouse=True)
    def _memory(self, diary: Path) -> None:
        self.diary = diary

    @property
    def retriever_constructor(self) -> Any:
        from memstore.integrations.langchain import MemstoreRetriever

        return MemstoreRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"store": self.diary}

    @property
    def retriever_query_example(self) -> str:
        return "the ferry will not cross"


def test_langchain_retriever_returns_passages_with_document_and_span(diary: Path) -> None:
    from memstore.integrations.langchain import MemstoreRetriever

    retriever = MemstoreRetriever(store=str(diary), documents=["diary"], k=2)
    best, second = retriever.invoke("the ferry will not cross")
    assert "that the ferry would\nnot cross before the water fell." in best.page_content
    first, end = best.metadata["span"]
    assert DIARY[first:end] == best.page_content
    assert best.id == f"diary[{first}-{end}]"
    assert best.metadata["weight"] > second.metadata["weight"]
    with pytest.raises(DocumentNotFound):
        MemstoreRetriever(store=diary, documents=["no such"]).invoke("ferry")
    with pytest.raises(InvalidInput):
        retriever.invoke("ferry", k=0)


def test_retrievers_say_where_the_memory_would_refuse(tmp_path: Path) -> None:
    from memstore.integrations import langchain, llama_index

    model = word_reader(gate=Gate((0.5,) * 5))
    with MemoryStore.create(tmp_path / "m", model.signature, selector=model.keeps) as store:
        model.ingest(DIARY, store, name="diary")
        for query, answered in (("Why do whales sing?", False), ("price of the mare", True)):
            memory = Memory(model, store)
            documents = langchain.MemstoreRetriever(store=memory).invoke(query)
            nodes = llama_index.MemstoreRetriever(memory).retrieve(query)
            found = [one.metadata for one in [*documents, *nodes]]
            assert found and all(one["answered"] is answered for one in found)


def test_llama_index_query_engine_answers_from_retrieved_passages(
    diary: Path, reader: LandmarkModel
) -> None:
    from llama_index.core.llms import MockLLM
    from llama_index.core.query_engine import RetrieverQueryEngine

    from memstore.integrations.llama_index import MemstoreRetriever

    with MemoryStore.open(diary, reader.signature, read_only=True) as store:
        retriever = MemstoreRetriever(Memory(reader, store), similarity_top_k=2)
        engine = RetrieverQueryEngine.from_args(retriever, llm=MockLLM())
        response = engine.query("the name of the new foal")
        assert "Clover" in str(response)  # it repeats its prompt, with the passages in it
        best = response.source_nodes[0]
        first, end = best.metadata["span"]
        assert best.metadata["document"] == "letter" and LETTER[first:end] == best.text
        assert "The name of the new foal is Clover." in best.text
        assert 0 < best.score <= 1
