"""The demonstration with a real model: some chapters of a book are read once, and a new process is
asked everyday questions about them, beside the same model that is given BM25's best passage as
text.

The book is Joshua Slocum's "Sailing Alone Around the World" (1900), which is in the public domain,
after Project Gutenberg's transcription; the questions were written by somebody who had not seen an
answer of the system.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from memstore.cli.demo.new_process import ask_in_new_process
from memstore.cli.options.model_options import ModelOptions
from memstore.cli.terminal import console
from memstore.disk.format.block_words import BlockWords
from memstore.index.text_words import count, split
from memstore.index.word_index import WordIndex
from memstore.model.document_ingest import IngestProgress
from memstore.model.model_api import ModelAPI
from memstore.model.passages.adaptation import SEPARATOR
from memstore.model.passages.passage_api import PassageAPI
from memstore.model.passages.passage_cutting import Passages
from memstore.model.texts.source_text import Text
from memstore.store.memory_store import MemoryStore
from memstore.store.open_options import on_device

TITLE = "Sailing Alone Around the World, by Joshua Slocum (1900; public domain)"
TEXT, QUESTIONS = (Path(__file__).with_name(f"sailing_alone.{end}") for end in ("txt", "jsonl"))
TOKENS = 20_000  # that are read at most
ASKED = 15  # questions, unless more are wanted
SECONDS = 75.0  # of reading, after which no further chapter is begun
_CHAPTER = re.compile(r"^(CHAPTER [IVX]+)$", re.MULTILINE)


class Question(msgspec.Struct):
    """A question about the book. answers: strings of which a right answer holds one, whatever its
    case. passage: where the answer stands, word for word.
    """

    question: str
    answers: list[str]
    passage: str
    chapter: str

    def is_right(self, said: str) -> bool:
        """Does what was said answer it?"""
        return any(answer.lower() in said.lower() for answer in self.answers)


def chapters() -> list[tuple[str, str]]:
    """The book's chapters, each with its name."""
    _, *parts = _CHAPTER.split(TEXT.read_text("utf-8"))
    return [(name, text.strip()) for name, text in zip(parts[::2], parts[1::2], strict=True)]


def questions() -> list[Question]:
    """The questions about them."""
    lines = QUESTIONS.read_text("utf-8").splitlines()
    return [msgspec.json.decode(line, type=Question) for line in lines]


class Rival:
    """The same model that reads the passage which BM25 finds best as text in its prompt."""

    def __init__(self, reader: PassageAPI, texts: Sequence[str]) -> None:
        self._reader = reader
        passages = [
            reader.tokenizer.decode(one.ids.tolist())
            for text in texts
            for one in Passages(
                reader.tokenizer,
                [text],
                size=reader.passage_tokens,
                most=reader.shape.block_size,
                context=reader.context,
            )
        ]
        self._passages, self._words = passages, WordIndex()
        self._words.add(1, 0, BlockWords.of([count(passage) for passage in passages]))

    def ask(self, question: str) -> tuple[str, float]:
        """The answer, and the seconds that it took: choosing and reading included."""
        began = time.perf_counter()
        scores = self._words.scores(Counter(split(question)), [(1, 0, len(self._passages))])
        prompt = self._passages[int(scores.argmax())].strip() + SEPARATOR + question
        nothing = MemoryStore.in_memory(self._reader.signature, selector=self._reader.keeps)
        with nothing as store, self._reader.chat(store, []) as chat:
            answer = chat.ask(prompt)
        return answer.text.strip(), time.perf_counter() - began


class Read(NamedTuple):
    """What was read of the book."""

    chapters: list[tuple[str, str]]
    tokens: int
    bytes: int
    seconds: float


def run_real_book(
    reader: PassageAPI, by: ModelOptions, store: Path, most: int = ASKED
) -> dict[str, Any]:
    """Read the book, ask about what was read in a new process, and the rival; return plain values.
    most: questions at most, as many of each chapter.

    Raises what making a memory, ingesting and asking raise.
    """
    read = _read(reader, by, store)
    console.note(f"read {read.tokens:,} tokens in {read.seconds:.1f} s; asking in a new process")
    asked = _some([name for name, _ in read.chapters], most)
    replies = ask_in_new_process(store, by, [one.question for one in asked])
    console.note("the same questions to the model with BM25's best passage as text")
    rival = Rival(reader, [text for _, text in read.chapters])
    rows = []
    for one, reply in zip(asked, replies["answers"], strict=True):
        said, seconds = rival.ask(one.question)
        rows.append(
            {
                "question": one.question,
                "expected": one.answers[0],
                "answer": reply["text"].strip(),
                "right": one.is_right(reply["text"]),
                "sources": reply["sources"],
                "seconds": reply["seconds"],
                "rival": {"answer": said, "right": one.is_right(said), "seconds": seconds},
            }
        )
    count = len(rows)
    return {
        "text": TITLE,
        "chapters": len(read.chapters),
        "tokens": read.tokens,
        "bytes": read.bytes,
        "reading_seconds": round(read.seconds, 3),
        "open_seconds": replies["open_seconds"],
        "questions": rows,
        "of": count,
        "right": sum(row["right"] for row in rows),
        "seconds_per_question": round(sum(row["seconds"] for row in rows) / count, 4),
        "rival": {
            "right": sum(row["rival"]["right"] for row in rows),
            "seconds_per_question": round(sum(r["rival"]["seconds"] for r in rows) / count, 4),
        },
    }


def print_real_book(result: dict[str, Any]) -> None:
    """The table of questions and what they cost, the last line being `right: N of M`."""
    rows: list[tuple[object, ...]] = [
        ("question", "from memory", "", "read in", "s", "with BM25's passage", "", "s")
    ]
    for row in result["questions"]:
        rival, sources = row["rival"], row["sources"]
        rows.append(
            (
                console.shorten(row["question"], 58),
                console.shorten(row["answer"] or "(not in the memory)", 30),
                "ok" if row["right"] else "-",
                ", ".join(sorted({source["document"] for source in sources})) or "-",
                f"{row['seconds']:.2f}",
                console.shorten(rival["answer"], 30),
                "ok" if rival["right"] else "-",
                f"{rival['seconds']:.2f}",
            )
        )
    console.say(console.columns(rows))
    rival = result["rival"]
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
        f"beside it, BM25's best passage as text: {rival['right']} of {result['of']} right, "
        f"{rival['seconds_per_question']:.2f} s a question"
    )
    console.say(f"right: {result['right']} of {result['of']}")


def _some(names: Sequence[str], most: int) -> list[Question]:
    """Questions about these chapters in turn, at most so many, in the order of the book."""
    of = {name: [one for one in questions() if one.chapter == name] for name in names}
    turns = [one for some in zip_longest(*of.values()) for one in some if one is not None]
    chosen = turns[:most]
    return [one for one in questions() if one in chosen]


@contextmanager
def memory_of(store: Path, reader: ModelAPI, by: ModelOptions) -> Iterator[MemoryStore]:
    """A new memory for a demonstration. Raises what MemoryStore.create raises."""
    options = on_device({}, by.device)
    with MemoryStore.create(
        store, reader.signature, codec=reader.codec, selector=reader.keeps, **options
    ) as memory:
        yield memory


def shown(show: console.Show) -> Callable[[IngestProgress], None]:
    """Progress of an ingest for `console.reading`."""
    return lambda state: show(state.characters, state.total_characters, state.tokens)


def _read(reader: PassageAPI, by: ModelOptions, store: Path) -> Read:
    """Read chapter by chapter, until there are no more, or the time is over."""
    told: list[tuple[str, str]] = []
    tokens, began = 0, time.monotonic()
    with memory_of(store, reader, by) as memory:
        for name, text in chapters():
            coming = len(reader.tokenizer.encode(text))
            if told and (tokens + coming > TOKENS or time.monotonic() - began > SECONDS):
                break
            with console.reading(name) as show:
                document = reader.ingest(Text(text, name), memory, progress=shown(show))
            told.append((name, text))
            tokens += document.tokens
        return Read(told, tokens, memory.stats()["file_bytes"], time.monotonic() - began)
