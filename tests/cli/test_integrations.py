"""Other people's programs find and ask in a memory through memstore.integrations: LangChain's own
tests of a retriever, LlamaIndex in a query, and the `llm` command as a process.

They need those programs: `make test-services`.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from memstore.errors import DocumentNotFound, InvalidInput
from memstore.model.landmark.landmark_model import LandmarkModel, load_model
from memstore.model.passages.selector import Gate
from memstore.store.memory_store import MemoryStore
from support.diary import ANSWER, DIARY, LETTER, QUESTION, write_diary
from support.imported import imported
from support.paths import ROOT
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
    def _memory(self, diary: Path, reader: LandmarkModel) -> None:
        self.diary, self.reader = diary, reader

    @property
    def retriever_constructor(self) -> Any:
        from memstore.integrations.langchain import MemstoreRetriever

        return MemstoreRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"store": self.diary, "reader": self.reader}

    @property
    def retriever_query_example(self) -> str:
        return "the ferry will not cross"


def test_langchain_gets_the_passage_and_where_it_stands(diary: Path) -> None:
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

    model = word_reader(gate=Gate(1.0))
    with MemoryStore.create(tmp_path / "m", model.signature, selector=model.keeps) as store:
        model.ingest(DIARY, store, name="diary")
        for query, answered in (("Why do whales sing?", False), ("price of the mare", True)):
            documents = langchain.MemstoreRetriever(store=store, reader=model).invoke(query)
            nodes = llama_index.MemstoreRetriever(store, model).retrieve(query)
            found = [one.metadata for one in [*documents, *nodes]]
            assert found and all(one["answered"] is answered for one in found)


def test_llama_index_answers_a_query_from_its_passages(diary: Path, reader: LandmarkModel) -> None:
    from llama_index.core.llms import MockLLM
    from llama_index.core.query_engine import RetrieverQueryEngine

    from memstore.integrations.llama_index import MemstoreRetriever

    with MemoryStore.open(diary, reader.signature, read_only=True) as store:
        retriever = MemstoreRetriever(store, reader, similarity_top_k=2)
        engine = RetrieverQueryEngine.from_args(retriever, llm=MockLLM())
        response = engine.query("the name of the new foal")
        assert "Clover" in str(response)  # it repeats its prompt, with the passages in it
        best = response.source_nodes[0]
        first, end = best.metadata["span"]
        assert best.metadata["document"] == "letter" and LETTER[first:end] == best.text
        assert "The name of the new foal is Clover." in best.text
        assert 0 < best.score <= 1


def llm(*arguments: str, home: Path, status: int = 0, **environment: str) -> str:
    """What the `llm` command prints on stdout, or on stderr where it fails. It loads no plug-in but
    ours and the echo: that of `make models` has no llama_cpp, and `llm` would not start.
    """
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    settings = {"PYTHONPATH": paths, "LLM_USER_PATH": str(home)}
    settings["LLM_LOAD_PLUGINS"] = "memstore-lm,llm-echo"
    done = subprocess.run(
        [sys.executable, "-m", "llm", *arguments],
        env=os.environ | settings | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout


def test_llm_answers_from_a_memory_and_goes_on_with_the_conversation(
    diary: Path, tmp_path: Path
) -> None:
    said = llm("-m", "memstore", "-o", "store", str(diary), QUESTION, home=tmp_path)
    assert said.strip() == ANSWER
    going_on = ("-c", "What is the price of the brown mare?")
    assert "310" in llm(*going_on, home=tmp_path, MEMSTORE_STORE=str(diary))


def test_llm_says_in_one_line_what_is_wrong(diary: Path, tmp_path: Path) -> None:
    from llm import ModelError

    from memstore.integrations.llm import MemstoreModel

    error = llm("-m", "memstore", "-o", "store", "none", QUESTION, home=tmp_path, status=1)
    assert error.startswith("Error: ") and "none" in error and error.count("\n") == 1
    model = MemstoreModel()
    for wrong, named in (
        ({"store": str(diary), "documents": "nowhere"}, "'nowhere'"),
        ({"store": str(diary), "system": "be brief"}, "system prompt"),
        ({"store": str(diary), "max_tokens": 0}, "max_new_tokens"),
    ):
        with pytest.raises(ModelError, match=named):
            model.prompt(QUESTION, **wrong).text()


def test_llm_keeps_the_session_of_a_conversation_warm(diary: Path) -> None:
    from memstore.integrations.llm import MemstoreModel

    model = MemstoreModel()
    conversation = model.conversation()
    first = conversation.prompt(QUESTION, store=str(diary), documents="diary")
    assert first.text() == ANSWER
    shown = first.response_json["sources"][0]["text"]
    assert "The combination of the lime barn is 4467." in shown
    chat = model._chat
    second = conversation.prompt(
        "The price of the brown mare is", store=str(diary), documents="diary"
    )
    assert second.text() == "310" and model._chat is chat
    model.prompt(QUESTION, store=str(diary)).text()
    assert model._chat is not chat


def test_llm_says_an_answer_while_it_is_made_and_forgets_one_that_is_left(diary: Path) -> None:
    from memstore.integrations.llm import MemstoreModel

    model = MemstoreModel()
    conversation = model.conversation()
    pieces = list(conversation.prompt(QUESTION, store=str(diary)))
    assert len(pieces) > 2 and "".join(pieces) == ANSWER  # the full stop behind it is no part
    left = iter(conversation.prompt("The price of the brown mare is", store=str(diary)))
    assert next(left) == "3"
    left.close()
    chat = model._chat
    again = conversation.prompt("The price of the brown mare is", store=str(diary))
    assert again.text() == "310" and model._chat is not chat


def test_llm_gives_documents_passages_and_tools_to_other_models(
    diary: Path, tmp_path: Path
) -> None:
    calls = {"tool_calls": [{"name": "Memstore_ask", "arguments": {"question": QUESTION}}]}
    fragments = ("-f", "memstore:letter", "-f", "memstore-search:the brown mare")
    memory = {"MEMSTORE_STORE": str(diary)}
    echoed = json.loads(llm("-m", "echo", *fragments, "sum up", home=tmp_path, **memory))
    assert LETTER.strip() in echoed["prompt"] and "310" in echoed["prompt"]
    tools = ("-T", f"Memstore({json.dumps(str(diary))})", json.dumps(calls))
    called = llm("-m", "echo", *tools, home=tmp_path)
    assert ANSWER in called[called.index("tool_results") :]


def test_the_plug_in_loads_no_torch_for_an_llm_that_uses_another_model() -> None:
    assert imported("import memstore.integrations.llm") == []
