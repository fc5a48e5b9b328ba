"""Answer questions from the files of a folder, with sources.

    pip install '.[hf,documents]'
    python examples/folder_to_answers.py FOLDER "How much is the monthly rent?"

The memory is stored in ./memory: a second run reads new and changed files only. The model is
SmolLM2, or the one that MEMSTORE_MODEL names.
"""

import sys

import memstore


def main(folder: str, questions: list[str]) -> None:
    """Read the folder and print an answer and its sources for each question."""
    with memstore.open("memory") as memory:
        documents = memory.add(folder)
        print(f"{len(documents)} documents, {sum(one.tokens for one in documents):,} tokens")
        for question in questions:
            answer = memory.ask(question, max_sources=3)
            print(f"\n{question}\n{answer}")  # a refusal prints the closest passages
            for source in answer.sources if answer.answered else ():
                place = f", {source.place}" if source.place else ""
                print(f"- {source.document}{place}: {source.sentence}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
