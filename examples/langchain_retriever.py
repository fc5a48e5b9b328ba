"""A memory as the retriever of a LangChain chain.

    pip install '.[hf]' langchain-core langchain-openai
    OPENAI_API_KEY=... python examples/langchain_retriever.py STORE "How much is the rent?"

STORE is the directory of a memory, or the URL of a published one. Without OPENAI_API_KEY the chain
ends with the prompt, which is printed.
"""

import os
import sys

from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough

from memstore.integrations.langchain import MemstoreRetriever

PROMPT = ChatPromptTemplate.from_template(
    "Answer from these passages, and name the document:\n\n{passages}\n\nQuestion: {question}"
)


def joined(found: list[Document]) -> str:
    """The passages as text, each with its document."""
    return "\n\n".join(f"{one.metadata['document']}: {one.page_content}" for one in found)


if __name__ == "__main__":
    store, question = sys.argv[1:]
    retriever = MemstoreRetriever(store=store, k=3)
    chain = {"passages": retriever | joined, "question": RunnablePassthrough()} | PROMPT
    if os.environ.get("OPENAI_API_KEY"):
        from langchain_openai import ChatOpenAI

        print((chain | ChatOpenAI(model="gpt-4o-mini")).invoke(question).content)
    else:
        print(chain.invoke(question).to_string())
