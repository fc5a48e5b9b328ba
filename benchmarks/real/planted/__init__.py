"""The questions of the results tables: sentences planted in books, and what is asked about them.

`books-test.jsonl.zst` and `books-val.jsonl.zst` (in this folder) hold what is ours: the sentences,
where each was planted, the questions and the accepted answers. The books are read at run time, and
are not part of the repository. A file has three kinds of lines:

- a header: the corpus, the seed and the number of questions a kind at each length that the file was
  drawn with, and of each book its author, title, year and digest;
- a document: its book, the characters [start, stop) of the book that it takes (its excerpt), the
  digests of excerpt and document, and the planted sentences, each with its offset in the excerpt;
- a question (`plan.Question`); `stated` names a sentence by its document and its number there, and
  gives characters of it.

All offsets count characters of a book as flowing text (`flowing`).
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from benchmarks.real.plan import Plan, Question, Stated

CORPORA = ("books-test", "books-val")
TASKS = {
    "natural": "everyday questions, nothing primed",
    "pronoun": "its value told of he, she or it",
    "heading": "its subject in a heading",
    "table": "a row of a table",
    "neighbours": "in two neighbouring passages",
    "german": "in German",
    "french": "in French",
    "passkey": "pass key, the paper's words",
    "fact": "one fact, a number",
    "of_20": "one of 20 facts of the same form",
    "reworded": "a fact asked for in other words",
    "synonyms": "the same, its subject by synonyms",
    "updated": "a fact stated twice, the later counts",
    "absent": "no fact answers, literal",
    "absent_reworded": "no fact answers, in other words",
}
TUNED = Path(__file__).parent / "tuned.json"  # K and thresholds of the published tables
_FOLDER = Path(__file__).parent
_SENTENCE_END = re.compile(r"(?<=[a-z][.!?])[\"”’']?(?=\s)")


@dataclass(frozen=True)
class _Document:
    """A rebuilt document: its text, and where each planted sentence begins in it."""

    text: str
    starts: list[int]


def load(corpus: str, texts: Sequence[str], lengths: Sequence[int]) -> Plan:
    """The planted documents of these lengths (tokens) and their questions.

    texts: books. The books of the corpus give the documents of the published tables, character for
    character. In other books the same sentences are planted in excerpts of the same size, each at
    the next end of a sentence. Raises ValueError if no file is there for a corpus or a length, and
    if a document does not have its digest.
    """
    header, *lines = _lines(corpus)
    if missing := [n for n in lengths if str(n) not in header["trials"]]:
        known = ", ".join(header["trials"])
        raise ValueError(f"no questions at {missing[0]} tokens in {corpus}; lengths: {known}")
    books = [flowing(text) for text in texts]
    same = [digest(book) for book in books] == [known for _, known in header["books"]]
    if not same:
        print(f"these are not the books of {corpus}: numbers differ from the published ones")
    documents: dict[str, _Document] = {}
    rows = {line["document"]: line for line in lines if "document" in line}
    questions = []
    for line in lines:
        if "question" not in line or line["length"] not in lengths:
            continue
        for name in line["documents"]:
            if name not in documents:
                documents[name] = _rebuilt(rows[name], books, same)
        questions.append(_question(line, documents))
    return Plan({name: document.text for name, document in documents.items()}, questions)


def flowing(text: str) -> str:
    """A book as flowing text: no carriage returns, emphasis or hard line ends."""
    text = text.replace("\r", "").replace("_", "").replace("*", "")
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", text)
    return re.sub(r"[ \t]+", " ", re.sub(r"\n{2,}", "\n\n", text))


def next_sentence_end(text: str, start: int) -> int:
    """The end of the first sentence that ends at `start` or later; `start` if none does."""
    found = _SENTENCE_END.search(text, start)
    return found.end() if found else start


def digest(text: str) -> str:
    """BLAKE2b of a text, 8 bytes in hexadecimal digits."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _lines(corpus: str) -> Iterator[dict[str, Any]]:
    if corpus not in CORPORA:
        raise ValueError(f"no corpus {corpus!r}; choose one of {', '.join(CORPORA)}")
    content = (_FOLDER / f"{corpus}.jsonl.zst").read_bytes()
    yield from map(json.loads, zstandard.decompress(content).decode().splitlines())


def _rebuilt(row: dict[str, Any], books: Sequence[str], same: bool) -> _Document:
    """A document out of its book, or out of another book of some length."""
    if same:
        excerpt = books[row["book"]][row["start"] : row["stop"]]
        if digest(excerpt) != row["excerpt"]:
            raise ValueError(f"the excerpt of {row['document']!r} is not the one planted in")
        document = _plant(excerpt, row["planted"])
        if digest(document.text) != row["digest"]:
            raise ValueError(f"document {row['document']!r} differs from the one measured")
        return document
    size = row["stop"] - row["start"]
    fitting = [book for book in books if len(book) >= size]
    if not fitting:
        raise ValueError(f"no book has {size:,} characters; give longer texts")
    book = fitting[row["book"] % len(fitting)]
    begin = next_sentence_end(book, row["start"] % (len(book) - size + 1))
    begin = min(begin, len(book) - size)
    excerpt = book[begin : begin + size]
    return _plant(excerpt, [(next_sentence_end(excerpt, at), text) for at, text in row["planted"]])


def _plant(excerpt: str, planted: Sequence[tuple[int, str]]) -> _Document:
    """The excerpt with texts inserted at ascending offsets of it; a paragraph of its own takes the
    place of the space after it.
    """
    pieces: list[str] = []
    starts: list[int] = []
    length = before = 0
    for at, text in planted:
        untouched = excerpt[before:at]
        pieces += [untouched, text]
        starts.append(length + len(untouched))
        length += len(untouched) + len(text)
        takes_space = text.endswith("\n\n") and excerpt[at : at + 1] == " "
        before = max(before, at + takes_space)
    return _Document("".join([*pieces, excerpt[before:]]), starts)


def _question(line: dict[str, Any], documents: dict[str, _Document]) -> Question:
    stated = []
    for name, number, first, stop, _ in line["stated"]:
        start = documents[name].starts[number]
        stated.append(Stated(name, start + first, start + stop))
    return Question(
        line["question"],
        line["task"],
        line["length"],
        tuple(line["documents"]),
        line["text"],
        line["primed"],
        tuple(line["answers"]),
        line["rule"],
        tuple(stated),
    )
