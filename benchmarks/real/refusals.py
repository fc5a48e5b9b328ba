"""How often is a question refused that a passage answers, and answered that none does?

63 questions that people might ask (refusals.jsonl), about 40,000 characters each of seven books of
books-val, written by somebody who had not seen an answer. Each is asked of its own excerpt, of
another one, of all seven, and of all but its own; printed is the share that is answered, by the
caution of the memory (LookupSettings.caution), and how many answers hold an accepted string. The
default caution was chosen by these; real.everyday asks about another book.

    python -m benchmarks.real.refusals --text books-val.jsonl.zst --model smollm2/
"""

import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common.options import add, prepare
from benchmarks.common.results import write
from benchmarks.common.tables import table
from benchmarks.real.passage_model import parser, passage_model
from memstore.model.passages.passage_session import PassageSession
from memstore.model.texts.source_text import Text
from memstore.store.memory_store import MemoryStore
from memstore.training.corpus import read_documents

QUESTIONS = Path(__file__).with_suffix(".jsonl")
EXCERPT = slice(2_000, 42_000)  # characters of a book
SCOPES = ("its own", "another", "all", "all but its own")


def main() -> None:
    options = parser(__doc__)
    add(options, "--cautions", [0.0, 0.8, 0.85, 0.9, 1.0], "of the memory")
    given = options.parse_args()
    prepare(given.threads)
    reader = passage_model(given.model, given.dtype)
    asked = [json.loads(line) for line in QUESTIONS.read_text("utf-8").splitlines()]
    books = sorted({one["book"] for one in asked})
    texts = list(read_documents(given.text))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = stack.enter_context(
            MemoryStore.create(
                folder / "memory", reader.signature, codec=reader.codec, selector=reader.keeps
            )
        )
        for book in books:
            reader.ingest(Text(texts[book][EXCERPT], str(book)), store)
        rows = [ask(reader, store, one, at, books) for at, one in enumerate(asked)]
    print(shares(reader, rows, given.cautions))
    write(given, {"rows": rows})


def ask(
    reader: Any, store: MemoryStore, one: dict[str, Any], at: int, books: Sequence[int]
) -> dict[str, Any]:
    """Of each scope the best score, among how many passages, and whether an answer that nothing
    refuses is right; at: the question's number, which says which other book is asked.
    """
    others = [book for book in books if book != one["book"]]
    scopes = ([one["book"]], [others[at % len(others)]], books, others)
    row: dict[str, Any] = {"question": one["question"]}
    for scope, chosen in zip(SCOPES, scopes, strict=True):
        with reader.session(store, [str(book) for book in chosen], caution=0.0) as session:
            assert isinstance(session, PassageSession)
            state = session.ask(one["question"], lambda: None)
            said = reader.tokenizer.decode(list(session.generate(state, 64)))
            assert session.candidates is not None
            scores = session.candidates.scores
        right = any(answer.lower() in said.lower() for answer in one["answers"])
        row[scope] = {"best": float(scores.max()), "passages": len(scores), "right": right}
    return row


def shares(reader: Any, rows: Sequence[dict[str, Any]], cautions: Sequence[float]) -> str:
    """The share that is answered of each scope, and how many are right, by caution."""
    lines = []
    for caution in cautions:
        line: list[object] = [caution]
        for scope in SCOPES:
            seen = [row[scope] for row in rows]
            answered = [
                one
                for one in seen
                if one["best"] >= reader.gate.threshold(one["passages"], caution)
            ]
            share = f"{len(answered) / len(seen):.2f}"
            right = sum(one["right"] for one in answered)
            line.append(share if "other" in scope or "but" in scope else f"{share}, {right} right")
        lines.append(line)
    return table(["caution", *(f"of {scope}" for scope in SCOPES)], lines)


if __name__ == "__main__":
    main()
