"""Does a chat with a real model remember what was said long before, and what does a turn cost?

Three facts are told in the first three turns, of words, forms and relations that no selector was
trained with; passages of books are talked about for --length tokens; then the facts are asked for.
Beside what was said, a document of 2K tokens is attached. An answer is right if greedy decoding
begins with it, after the words that begin the answer.

Methods: remembers (local text beyond the window becomes blocks of the session's own), whole (all of
the chat is local text), window (what leaves the window is forgotten).
A run goes on where it was killed, with --work; intervals are Wilson's, 95%.

    python -m benchmarks.real.long_chat --text books-test.jsonl.zst --model smollm2/ --work real/
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.common.options import add, prepare
from benchmarks.common.results import write
from benchmarks.common.tables import rate, table, tokens_number
from benchmarks.common.timing import timed
from benchmarks.real.hay import Hay
from benchmarks.real.memory import answer
from benchmarks.real.passage_model import parser, passage_model
from benchmarks.real.plan import Question
from benchmarks.real.prompting import counting
from benchmarks.real.questions import words_of
from benchmarks.real.results import Results, Row
from memstore import MemoryStore
from memstore.training.corpus import read_documents
from memstore.training.selectors.questions import Fact, Facts

METHODS: dict[str, dict[str, Any]] = {
    "remembers": {},
    "whole": {"local_tokens": 1 << 20},
    "window": {"retrieve": False},
}
PASSAGE, DOCUMENT = 320, 2048  # tokens
TOLD, TALKED = "I will remember that.", "It is well told, and I would like to read on."


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--work", type=Path, help="keep results here")
    add(options, "--length", "6K", "tokens of the chat", type=tokens_number)
    add(options, "--chats", 20, "chats, of three questions each")
    add(options, "--split", "held-out", "of words and forms", choices=("held-out", "validation"))
    add(options, "--methods", list(METHODS), choices=METHODS, metavar="METHOD")
    given = options.parse_args()
    prepare(given.threads)
    with tempfile.TemporaryDirectory() as temporary:
        name = f"long-chat-{given.dtype}-{given.length}-{given.split}-{given.seed}.jsonl"
        results = Results((given.work or Path(temporary)) / name)
        chats = Chats(given)
        for number in range(given.chats):
            for method in given.methods:
                if (f"{number} 0", method) not in results:
                    for row in chats.talk(number, method):
                        results.add(row)
        rows = [row for row in results if row["method"] in given.methods]
    print(answers(rows, given.methods))
    print("\n" + seconds(rows, given.methods))
    write(given, {"rows": rows})


class Chats:
    """A reader, texts to talk about, and facts to tell."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.reader = passage_model(options.model, options.dtype)
        self.texts = list(read_documents(options.text))
        self.offsets = counting(options.model)

    def talk(self, number: int, method: str) -> list[Row]:
        """A chat, and the three questions at its end."""
        rng = Random(f"chat {self.options.seed} {number}")
        hay, facts = Hay(self.offsets, self.texts, rng), Facts(self.options.split, rng)
        told = [facts.literal() for _ in range(3)]
        document = hay.prose(DOCUMENT)
        reader, settings = self.reader, dict(METHODS[method])
        with tempfile.TemporaryDirectory() as directory:
            store = MemoryStore.create(
                Path(directory) / "m", reader.signature, selector=reader.keeps
            )
            with store:
                reader.ingest(document, store, name="book")
                with reader.session(store, **settings) as session:
                    seconds = [
                        self.turn(session, f"Please remember this: {fact.sentence}", TOLD)
                        for fact in told
                    ]
                    said = 0
                    while said < self.options.length:
                        passage = hay.prose(PASSAGE)
                        asked = f"Here is a page.\n\n{passage}\n\nHow do you like it?"
                        seconds.append(self.turn(session, asked, TALKED))
                        said += PASSAGE + 40
                    return [
                        {
                            "question": f"{number} {place}",
                            "method": method,
                            "seconds": seconds if place == 0 else [],
                            **self.ask(session, fact),
                        }
                        for place, fact in enumerate(told)
                    ]

    def turn(self, session: Any, asked: str, answered: str) -> float:
        """Say something and have it answered so; seconds until the answer could begin."""
        seconds, _ = timed(lambda: session.ask(asked, lambda: None))
        session.feed(self.reader.tokenizer.encode(answered))
        return seconds

    def ask(self, session: Any, fact: Fact) -> Row:
        """Ask for a fact that was told."""
        text, primed, answers = words_of(fact)
        if answers[0][0].isdigit():
            primed += " "
        question = Question("", "told", self.options.length, (), text, primed, answers, "forced")
        right, _ = answer(self.reader, session, question)
        own = sum(block.document < 0 for block in session.chosen)
        return {"right": right, "answered": session.answered, "own": own}


def answers(rows: list[Row], methods: list[str]) -> str:
    """How often an answer is right."""
    found = []
    for method in methods:
        mine = [row for row in rows if row["method"] == method]
        right, own = (sum(bool(row[what]) for row in mine) for what in ("right", "own"))
        found.append((method, len(mine), rate(right, len(mine)), own))
    return table(("method", "questions", "right", "read blocks of the chat"), found)


def seconds(rows: list[Row], methods: list[str]) -> str:
    """Seconds of turns, by their number; the median over chats."""
    each: dict[str, list[list[float]]] = {method: [] for method in methods}
    for row in rows:
        if row["seconds"]:
            each[row["method"]].append(row["seconds"])
    turns = min(len(one) for chats in each.values() for one in chats)
    numbers = [n for n in (1, 4, 8, 12, 16, 20) if n < turns]
    return table(
        ("seconds of turn", *numbers),
        [
            (m, *(f"{statistics.median(one[n - 1] for one in each[m]):.2f}" for n in numbers))
            for m in methods
        ],
    )


if __name__ == "__main__":
    main()
