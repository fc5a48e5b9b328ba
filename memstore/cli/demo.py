"""The demonstration: a model reads chapters of a book once, then a new process answers everyday
questions about them; alongside, the same model gets the best passage as text.

The book is Joshua Slocum's "Sailing Alone Around the World" (1900), in the public domain, after
Project Gutenberg's transcription. The author of the questions had not seen any of the answers.
"""

import json
import re
import subprocess
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from memstore.child import python_command
from memstore.cli import console
from memstore.cli.command import command
from memstore.cli.options import Json, ModelOptions, new_model_name, option
from memstore.errors import InvalidInput, MemstoreError

if TYPE_CHECKING:
    from memstore.memory import Memory
    from memstore.model.passages.passage_session import PassageAPI

TITLE = "Sailing Alone Around the World, by Joshua Slocum (1900; public domain)"
TEXT, QUESTIONS = (Path(__file__).with_name(f"sailing_alone.{end}") for end in ("txt", "jsonl"))
_CHAPTER = re.compile(r"^(CHAPTER [IVX]+)$", re.MULTILINE)


@command("demo", "memstore demo", "memstore demo --questions 30")
def demo(
    *,
    model_options: ModelOptions,
    questions: Annotated[
        int, option("--questions", "N", "Number of questions, 1 to 30.", min=1, max=30)
    ] = 15,
    as_json: Json = False,
) -> None:
    """Read a book once, and ask a new process about it.

    The answers are shown with their sources and seconds, next to those of the same model with the
    best passage as text.
    """
    from memstore.hf.models_by_name import reader_named
    from memstore.model.passages.passage_session import PassageAPI

    with TemporaryDirectory(prefix="memstore-demo-", ignore_cleanup_errors=True) as place:
        store = Path(place) / "memory"
        name = new_model_name(store, model_options.model)
        model = reader_named(name, compute=model_options.compute)
        if not isinstance(model, PassageAPI):
            raise InvalidInput(
                "the demo needs a language model: run `make models`, or name one with --model"
            )
        result = _run_book(model, model_options, store, questions)
    if as_json:
        console.emit(result)
    else:
        print_book(result)


# The book


class Question(NamedTuple):
    """A question about the book. answers: a right answer contains one of these, in any case.
    passage: the sentences that answer it, word for word.
    """

    question: str
    answers: list[str]
    passage: str
    chapter: str

    def is_right(self, answer: str) -> bool:
        """Does this answer the question?"""
        return any(right.lower() in answer.lower() for right in self.answers)


def chapters() -> list[tuple[str, str]]:
    """The book's chapters: (name, text)."""
    _, *parts = _CHAPTER.split(TEXT.read_text("utf-8"))
    return [(name, text.strip()) for name, text in zip(parts[::2], parts[1::2], strict=True)]


def book_questions() -> list[Question]:
    """The questions about the book, in its order."""
    lines = QUESTIONS.read_text("utf-8").splitlines()
    return [Question(**json.loads(line)) for line in lines]


def choose_questions(names: Sequence[str], most: int) -> list[Question]:
    """At most `most` questions, equally many for each chapter, in the order of the book."""
    every = book_questions()
    of_chapters = [[one for one in every if one.chapter == name] for name in names]
    in_turns = [one for turn in zip_longest(*of_chapters) for one in turn if one is not None]
    return [one for one in every if one in in_turns[:most]]


def _run_book(model: "PassageAPI", options: ModelOptions, store: Path, most: int) -> dict[str, Any]:
    """Read the book, ask a new process about it, and the model with passages as text; plain
    values. most: questions. Raises what creating a memory, adding and asking raise.
    """
    from memstore.memory import open_memory

    read, began = chapters(), time.monotonic()
    with open_memory(store, model) as memory:
        for name, text in read:
            with console.working(name, "characters") as show:
                memory.add(
                    text=text,
                    name=name,
                    progress=lambda at: show(at.characters, at.total_characters),
                )
        seconds, stats = time.monotonic() - began, memory.store.stats()
        console.note(f"read {stats['tokens']:,} tokens in {seconds:.1f} s; asking in a new process")
    asked = choose_questions([name for name, _ in read], most)
    replies = _ask_in_new_process(store, options, [one.question for one in asked])
    console.note("the same questions to the model with the best passage as text")
    rows = []
    with open_memory(store, model) as memory:
        for one, reply in zip(asked, replies["answers"], strict=True):
            answer, took = _ask_with_text(memory, one.question)
            rows.append(
                {
                    "question": one.question,
                    "expected": one.answers[0],
                    "answer": reply["text"].strip(),
                    "right": one.is_right(reply["text"]),
                    "sources": reply["sources"],
                    "seconds": reply["seconds"],
                    "as_text": {"answer": answer, "right": one.is_right(answer), "seconds": took},
                }
            )
    return {
        "text": TITLE,
        "chapters": len(read),
        "tokens": stats["tokens"],
        "bytes": stats["file_bytes"],
        "reading_seconds": round(seconds, 3),
        "open_seconds": replies["open_seconds"],
        "questions": rows,
        "of": len(rows),
        **_totals(rows),
        "as_text": _totals([row["as_text"] for row in rows]),
    }


def _totals(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    seconds = sum(row["seconds"] for row in rows) / len(rows)
    return {"right": sum(row["right"] for row in rows), "seconds_per_question": round(seconds, 4)}


def _ask_in_new_process(
    store: Path, options: ModelOptions, questions: Sequence[str]
) -> dict[str, Any]:
    """The output of `memstore ask - --json` about these questions. Raises MemstoreError."""
    words = ["--device", options.device, "--dtype", options.dtype, "--weights", options.weights]
    words += ["--model", options.model] if options.model else []
    done = subprocess.run(
        python_command("memstore", "ask", "-", "--store", str(store), "--json", *words),
        input="\n".join(questions),
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        check=False,
    )
    if done.returncode:
        raise MemstoreError(f"the process that asks ended with status {done.returncode}")
    replies: dict[str, Any] = json.loads(done.stdout)
    return replies


def _ask_with_text(memory: "Memory", question: str) -> tuple[str, float]:
    """The answer of the same model with the best passage as text in its prompt, and the seconds for
    choosing the passage, reading it and answering.
    """
    from memstore.model.passages.adaptation import SEPARATOR
    from memstore.store.memory_store import MemoryStore

    began, model = time.perf_counter(), memory.reader
    passage = memory.search(question, top_k=1)[0].text.strip()
    empty = MemoryStore.in_memory(model.signature, selector=model.keeps)
    with empty as nothing, model.chat(nothing, []) as chat:
        answer = chat.ask(passage + SEPARATOR + question)
    return answer.text.strip(), time.perf_counter() - began


def print_book(result: dict[str, Any]) -> None:
    """The table of questions and their cost; the last line is `right: N of M`."""
    rows: list[tuple[object, ...]] = [
        ("question", "from memory", "", "chapter", "s", "with the passage as text", "", "s")
    ]
    for row in result["questions"]:
        documents = sorted({source["document"] for source in row["sources"]})
        rows.append(
            (
                console.shorten(row["question"], 58),
                *_answer_cells(row),
                ", ".join(documents) or "-",
                f"{row['seconds']:.2f}",
                *_answer_cells(row["as_text"]),
                f"{row['as_text']['seconds']:.2f}",
            )
        )
    as_text = result["as_text"]
    console.say(
        f"{console.columns(rows)}\n\n"
        f"text: {result['text']}; {result['chapters']} chapters, {result['tokens']:,} tokens\n"
        f"best passage as text: {as_text['right']} of {result['of']} right, "
        f"{as_text['seconds_per_question']:.2f} s a question\n"
        f"memory: {console.size(result['bytes'])} on disk; {result['reading_seconds']:.1f} s to "
        f"read the text once; {result['open_seconds']:.1f} s for a new process to open it; "
        f"{result['seconds_per_question']:.2f} s a question\n"
        f"right: {result['right']} of {result['of']}"
    )


def _answer_cells(row: dict[str, Any]) -> tuple[str, str]:
    answer = console.shorten(row["answer"] or "(not sure)", 30)
    return answer, "ok" if row["right"] else "-"


COMMANDS = (demo,)
