"""How many passages does an edit change, and how full are they?

A sentence at a random place of a random book is deleted, replaced by a sentence of another book, or
has one put in front of it. Counted are the passages of the edited text that the text before did not
have: those that are read anew. The text is cut from --around characters before the edit to as many
behind it; one edit in --whole is made in the whole book as well, which should change as many.
Beside it another way of cutting: sentences are filled up to the size one after the other from the
beginning of the book (greedy), and an edit moves what follows until two ways happen to meet.

    python -m benchmarks.real.passage_edits --text books-test.jsonl.zst --model smollm2/
"""

import argparse
import math
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.common.options import add, plain_parser
from benchmarks.common.results import write
from benchmarks.common.tables import rate, table
from benchmarks.real.prompting import tokenizer_of
from memstore.model.adapter import TextTokenizer
from memstore.model.passages.passage_cutting import Measure, Passages
from memstore.model.texts.sentences import Unit, split
from memstore.training.corpus import read_documents

KINDS = ("delete", "insert", "replace")
SHORTEST, LONGEST = 20, 400  # characters of a sentence
MANY = 4  # passages; how often more change is told


@dataclass
class Cutting:
    """How texts are cut."""

    tokenizer: TextTokenizer
    size: int
    most: int

    def passages(self, text: str) -> list[bytes]:
        """The ids of each passage."""
        cut = Passages(self.tokenizer, [text], size=self.size, most=self.most)
        return [one.ids.tobytes() for one in cut]


class Book:
    """A text with its sentences, and where greedy filling ends passages."""

    def __init__(self, text: str, cutting: Cutting) -> None:
        self.text, self.cutting, self.size = text, cutting, cutting.size
        self.units = list(split(text))
        self.counts = Measure(cutting.tokenizer, cutting.most).count(text, self.units)
        self.greedy = greedy(self.counts, self.size)
        self._begins = [first for first, _ in self.greedy]
        self.passages: list[bytes] | None = None  # once the whole of it was cut

    def sentences(self, character: int, around: int) -> list[int]:
        """The numbers of those that begin within so many characters of one, but for the last."""
        first, end = self.number(character - around) + 1, self.number(character + around)
        return [number for number in range(first, end) if self.is_sentence(self.units[number])]

    def text_of(self, number: int) -> str:
        """A sentence in one line."""
        unit = self.units[number]
        return " ".join(self.text[unit.start : unit.end].split())

    def sentence(self, rng: Random) -> int:
        """The number of a random one, each character alike."""
        while True:
            number = self.number(rng.randrange(len(self.text)))
            if self.is_sentence(self.units[number]):
                return number

    def number(self, character: int) -> int:
        """Of the unit that begins last at or before a character, the first where there is none."""
        return max(0, bisect_right(self.units, character, key=lambda unit: unit.start) - 1)

    def is_sentence(self, unit: Unit) -> bool:
        own = self.text[unit.start : unit.end]
        prose = SHORTEST <= len(own) <= LONGEST and own[-1] in ".!?\"'\u201d\u2019"
        return prose and not unit.heading

    def greedily(self, kind: str, number: int, tokens: int) -> int:
        """How many passages an edit changes where passages are filled greedily."""
        at = max(0, bisect_right(self._begins, number) - 2)  # the passage before may take it in
        first = self._begins[at]
        rest = self.counts[first:]
        own = number - first
        rest[own : own + (kind != "insert")] = [] if kind == "delete" else [tokens]
        moved = {"delete": -1, "insert": 1, "replace": 0}[kind]
        before = {(begin, end) for begin, end in self.greedy[at : at + 2] if end <= number}
        behind = {
            (begin + moved, end + moved)
            for begin, end in self.greedy[at:]
            if begin >= number + (kind != "insert")
        }
        changed = 0
        for begin, end in greedy(rest, self.size):
            place = first + begin, first + end
            if place in behind:
                break  # from here on they are the same
            changed += place not in before
        return changed


def greedy(counts: Sequence[int], size: int) -> list[tuple[int, int]]:
    """Units [first, end) of each passage: as many as fit, one after the other."""
    ends, total = [0], 0
    for number, count in enumerate(counts):
        if total and total + count > size:
            ends.append(number)
            total = 0
        total += count
    return list(pairwise([*ends, len(counts)]))


def edited(text: str, unit: Unit, following: int, kind: str, sentence: str) -> str:
    """A text after an edit of one of its units; following: where the next one begins."""
    if kind == "delete":
        return text[: unit.start] + text[following:]
    if kind == "insert":
        return f"{text[: unit.start]}{sentence} {text[unit.start :]}"
    return text[: unit.start] + sentence + text[unit.end :]


def changed(before: Sequence[bytes], after: Sequence[bytes]) -> int:
    """How many passages were not there before."""
    return (Counter(after) - Counter(before)).total()


def main() -> None:
    options = read_options()
    cutting = Cutting(tokenizer_of(options.model), options.size, options.most)
    rng = Random(options.seed)
    texts = [text for text in read_documents(options.text) if len(text) > 4 * options.around]
    books = [Book(text, cutting) for text in rng.sample(texts, min(options.books, len(texts)))]
    rows: list[dict[str, Any]] = []
    lengths: list[int] = []
    while len(rows) < options.edits:
        book, other = rng.sample(books, 2, counts=[len(book.text) for book in books])
        if book is not other:
            rows += some_edits(book, other, options, rng, lengths)
    full = [sum(book.counts) / len(book.greedy) for book in books]
    found = {
        "characters": sum(len(book.text) for book in books),
        "whole": sum("whole" in row for row in rows),
        "otherwise": sum(row.get("whole", row["changed"]) != row["changed"] for row in rows),
        "passages": summary(rows, "changed", statistics.mean(lengths) / options.size),
        "greedy": summary(rows, "greedy", statistics.mean(full) / options.size),
    }
    show(found)
    write(options, found)


def some_edits(
    book: Book, other: Book, options: argparse.Namespace, rng: Random, lengths: list[int]
) -> list[dict[str, Any]]:
    """--each edits near each other, every one of the text as it was; appends the tokens of the
    passages around them to lengths.
    """
    cutting = book.cutting
    middle = book.units[book.sentence(rng)].start
    begin = max(0, middle - options.around)
    text = book.text[begin : middle + options.around]
    before = cutting.passages(text)
    lengths += [len(ids) // 8 for ids in before[1:-1]]
    rows = []
    for number in rng.sample(book.sentences(middle, options.around // 4), options.each):
        unit, following = book.units[number], book.units[number + 1].start
        sentence = other.text_of(other.sentence(rng))
        kind = rng.choice(KINDS)
        here = Unit(unit.start - begin, unit.end - begin, unit.level)
        after = cutting.passages(edited(text, here, following - begin, kind, sentence))
        tokens = len(cutting.tokenizer.encode(f" {sentence}"))
        rows.append(
            {
                "kind": kind,
                "changed": changed(before, after),
                "greedy": book.greedily(kind, number, tokens),
            }
        )
        if number % options.whole == 0:
            book.passages = book.passages or cutting.passages(book.text)
            there = cutting.passages(edited(book.text, unit, following, kind, sentence))
            rows[-1]["whole"] = changed(book.passages, there)
    return rows


def read_options() -> argparse.Namespace:
    options = plain_parser(__doc__)
    options.add_argument("--text", nargs="+", required=True, help="books: .jsonl.zst or .txt")
    options.add_argument("--model", type=Path, required=True, help="directory with a tokenizer")
    add(options, "--edits", 2400)
    add(options, "--each", 4, "edits near each other")
    add(options, "--books", 30, "at most, drawn from --text")
    add(options, "--around", 16384, "characters on each side of an edit that are cut")
    add(options, "--whole", 50, "one edit of so many is made in the whole book as well")
    add(options, "--size", 64, "tokens that a passage is filled up to")
    add(options, "--most", 128, "tokens that no passage exceeds")
    return options.parse_args()


def summary(rows: Sequence[dict[str, Any]], name: str, fill: float) -> dict[str, Any]:
    """What edits changed, in passages; counts: how many edits changed so many."""
    counts = sorted(row[name] for row in rows)
    beyond = sum(count > MANY for count in counts)
    return {
        "mean": statistics.mean(counts),
        "median": counts[len(counts) // 2],
        "of 99%": counts[math.ceil(0.99 * len(counts)) - 1],
        "most": counts[-1],
        "beyond": beyond,
        "edits": len(counts),
        "fill": fill,
        "counts": dict(Counter(counts)),
        "by kind": {
            kind: statistics.mean(row[name] for row in rows if row["kind"] == kind)
            for kind in KINDS
        },
    }


def show(found: dict[str, Any]) -> None:
    """Print the tables."""
    head = f"cut | passages changed | of 99% | at most | beyond {MANY} | fill"
    print(
        table(
            head,
            [
                f"{name} | {one['mean']:.2f} | {one['of 99%']} | {one['most']} | "
                f"{rate(one['beyond'], one['edits'])} | {one['fill']:.3f}"
                for name in ("passages", "greedy")
                for one in [found[name]]
            ],
        )
    )
    print(
        f"{found['whole']} edits were made in whole books as well, {found['otherwise']} of them "
        "changed another number of passages there"
    )


if __name__ == "__main__":
    main()
