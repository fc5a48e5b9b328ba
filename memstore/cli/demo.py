"""The demonstration: a model reads chapters of a book once, then a new process answers everyday
questions about them; alongside, the same model gets BM25's best passage as text.

The book is Joshua Slocum's "Sailing Alone Around the World" (1900), in the public domain, after
Project Gutenberg's transcription. The author of the questions had not seen any of the answers.
"""

import json
import re
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from memstore.child import python_command
from memstore.cli import console
from memstore.cli.command import command
from memstore.cli.opening import new_model
from memstore.cli.options import Json, ModelOptions, option
from memstore.errors import InvalidInput, MemoryExists, MemstoreError

if TYPE_CHECKING:
    from memstore.model.passages.passage_session import PassageAPI

TITLE = "Sailing Alone Around the World, by Joshua Slocum (1900; public domain)"
TEXT, QUESTIONS = (Path(__file__).with_name(f"sailing_alone.{end}") for end in ("txt", "jsonl"))
MOST_TOKENS = 20_000  # of the chapters that are read
MOST_SECONDS = 75.0  # of reading; no chapter is begun after that
QUESTIONS_ASKED = 15  # by default
_CHAPTER = re.compile(r"^(CHAPTER [IVX]+)$", re.MULTILINE)


@command("demo", "memstore demo")
def demo(
    *,
    model_options: ModelOptions,
    questions: Annotated[
        int, option("--questions", "N", "Questions about the book.", min=1, max=30)
    ] = QUESTIONS_ASKED,
    store: Annotated[
        Path | None, option("--store", "DIR", "Keep the memory in this new directory.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Read chapters of a real book once, and ask a new process about them.

    The answers are shown with their sources and seconds, next to those of the same model with
    BM25's best passage as text.
    """
    if store is not None and store.exists() and any(store.iterdir()):
        raise MemoryExists(f"{store} is not empty; name a new directory, or leave --store out")
    with ExitStack() as stack:
        if store is None:
            temporary = TemporaryDirectory(prefix="memstore-demo-", ignore_cleanup_errors=True)
            store = Path(stack.enter_context(temporary)) / "memory"
        model = _passage_model(store, model_options)
        result = run_book(model, model_options, store, questions)
    if as_json:
        console.emit(result)
    else:
        print_book(result)


def _passage_model(store: Path, options: ModelOptions) -> "PassageAPI":
    from memstore.model.passages.passage_session import PassageAPI

    model = new_model(store, options)
    if not isinstance(model, PassageAPI):
        raise InvalidInput(
            "the demonstration asks everyday questions, which takes a language model: `make "
            "models`, or --model"
        )
    return model


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
    """At most `most` questions, as many of each of these chapters, in the order of the book."""
    every = book_questions()
    of_chapter = [[one for one in every if one.chapter == name] for name in names]
    in_turns = [one for turn in zip_longest(*of_chapter) for one in turn if one is not None]
    chosen = in_turns[:most]
    return [one for one in every if one in chosen]


class ReadBook(NamedTuple):
    """The chapters that were read, and what that took."""

    chapters: list[tuple[str, str]]
    tokens: int
    bytes: int
    seconds: float


def run_book(model: "PassageAPI", options: ModelOptions, store: Path, most: int) -> dict[str, Any]:
    """Read the book, ask a new process about it, and the model with BM25's passages; plain values.

    most: questions. Raises what creating a memory, ingesting and asking raise.
    """
    read = _read_book(model, options, store)
    console.note(f"read {read.tokens:,} tokens in {read.seconds:.1f} s; asking in a new process")
    asked = choose_questions([name for name, _ in read.chapters], most)
    replies = _ask_in_new_process(store, options, [one.question for one in asked])
    console.note("the same questions to the model with BM25's best passage as text")
    baseline = Bm25Baseline(model, [text for _, text in read.chapters])
    rows = []
    for one, reply in zip(asked, replies["answers"], strict=True):
        answer, seconds = baseline.ask(one.question)
        rows.append(
            {
                "question": one.question,
                "expected": one.answers[0],
                "answer": reply["text"].strip(),
                "right": one.is_right(reply["text"]),
                "sources": reply["sources"],
                "seconds": reply["seconds"],
                "bm25": {"answer": answer, "right": one.is_right(answer), "seconds": seconds},
            }
        )
    return {
        "text": TITLE,
        "chapters": len(read.chapters),
        "tokens": read.tokens,
        "bytes": read.bytes,
        "reading_seconds": round(read.seconds, 3),
        "open_seconds": replies["open_seconds"],
        "questions": rows,
        "of": len(rows),
        **_totals(rows),
        "bm25": _totals([row["bm25"] for row in rows]),
    }


def _totals(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    seconds = sum(row["seconds"] for row in rows) / len(rows)
    return {"right": sum(row["right"] for row in rows), "seconds_per_question": round(seconds, 4)}


def _read_book(model: "PassageAPI", options: ModelOptions, store: Path) -> ReadBook:
    """Ingest chapter by chapter, until the next would exceed the tokens or the seconds."""
    from memstore.model.source_text import Text
    from memstore.store.memory_store import MemoryStore
    from memstore.store.open_options import on_device

    read: list[tuple[str, str]] = []
    tokens, began = 0, time.monotonic()
    tiers = on_device({}, options.device)
    with MemoryStore.create(
        store, model.signature, codec=model.codec, selector=model.keeps, **tiers
    ) as memory:
        for name, text in chapters():
            coming = len(model.tokenizer.encode(text))
            late = time.monotonic() - began > MOST_SECONDS
            if read and (late or tokens + coming > MOST_TOKENS):
                break
            with console.reading(name) as show:
                document = model.ingest(
                    Text(text, name),
                    memory,
                    progress=lambda state: show(
                        state.characters, state.total_characters, state.tokens
                    ),
                )
            read.append((name, text))
            tokens += document.tokens
        return ReadBook(read, tokens, memory.stats()["file_bytes"], time.monotonic() - began)


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


class Bm25Baseline:
    """The same model with the passage that BM25 ranks first as text in its prompt."""

    def __init__(self, model: "PassageAPI", texts: Sequence[str]) -> None:
        from memstore.disk.format.block_words import BlockWords
        from memstore.index.word_index import WordIndex, count_words
        from memstore.model.passages.passage_ingest import Passages

        self._model = model
        self._passages = [
            model.tokenizer.decode(passage.ids.tolist())
            for text in texts
            for passage in Passages(
                model.tokenizer, [text], size=model.passage_tokens, most=model.shape.block_size
            )
        ]
        self._words = WordIndex()
        self._words.add(1, 0, BlockWords.of([count_words(passage) for passage in self._passages]))

    def ask(self, question: str) -> tuple[str, float]:
        """The answer, and the seconds for choosing the passage, reading it and answering."""
        from memstore.index.word_index import split_words
        from memstore.model.passages.adaptation import SEPARATOR
        from memstore.store.memory_store import MemoryStore

        began = time.perf_counter()
        scores = self._words.scores(Counter(split_words(question)), [(1, 0, len(self._passages))])
        prompt = self._passages[int(scores.argmax())].strip() + SEPARATOR + question
        empty = MemoryStore.in_memory(self._model.signature, selector=self._model.keeps)
        with empty as memory, self._model.chat(memory, []) as chat:
            answer = chat.ask(prompt)
        return answer.text.strip(), time.perf_counter() - began


def print_book(result: dict[str, Any]) -> None:
    """The table of questions and their cost; the last line is `right: N of M`."""
    rows: list[tuple[object, ...]] = [
        ("question", "from memory", "", "chapter", "s", "with BM25's passage", "", "s")
    ]
    for row in result["questions"]:
        documents = sorted({source["document"] for source in row["sources"]})
        rows.append(
            (
                console.shorten(row["question"], 58),
                *_answer_cells(row),
                ", ".join(documents) or "-",
                f"{row['seconds']:.2f}",
                *_answer_cells(row["bm25"]),
                f"{row['bm25']['seconds']:.2f}",
            )
        )
    bm25 = result["bm25"]
    console.say(console.columns(rows))
    console.say("")
    console.say(
        f"text: {result['text']}; {result['chapters']} chapters, {result['tokens']:,} tokens"
    )
    console.say(
        f"memory: {console.size(result['bytes'])} on disk; {result['reading_seconds']:.1f} s to "
        f"read the text once; {result['open_seconds']:.1f} s for a new process to open it; "
        f"{result['seconds_per_question']:.2f} s a question"
    )
    console.say(
        f"BM25's best passage as text: {bm25['right']} of {result['of']} right, "
        f"{bm25['seconds_per_question']:.2f} s a question"
    )
    console.say(f"right: {result['right']} of {result['of']}")


def _answer_cells(row: dict[str, Any]) -> tuple[str, str]:
    answer = console.shorten(row["answer"] or "(not sure)", 30)
    return answer, "ok" if row["right"] else "-"


COMMANDS = (demo,)
