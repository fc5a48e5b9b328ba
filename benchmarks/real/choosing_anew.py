"""Does it help to choose blocks anew while a real model generates?

Questions of two facts, asked of documents of --length tokens with some forty facts, generated
freely: "both" (a number of one thing and of another), "two hops" (who keeps a thing, and a number
of that person). Right is the share of the two parts that the first 48 tokens have.

"language": books go on for ten segments of 64 tokens behind a memory of what came before; cross
entropy in nats a token, paired with choosing once before the first (the gate is off there, and the
first segment, which has one choice either way, is left out).

Methods: how many tokens to generate between choices; 0: once. A run goes on where it was killed,
with --work; intervals are 95%.

    python -m benchmarks.real.choosing_anew --text books-test.jsonl.zst --model DIR --work real/
"""

import argparse
import tempfile
from pathlib import Path
from random import Random

import torch
from torch.nn.functional import cross_entropy

from benchmarks.common.intervals import mean_interval
from benchmarks.common.options import add, plain_parser, prepare
from benchmarks.common.results import write
from benchmarks.common.tables import table, tokens_number
from benchmarks.real.hay import Hay, Needle
from benchmarks.real.plan import Question
from benchmarks.real.prompting import DTYPES, counting
from benchmarks.real.results import Results, Row
from memstore import MemoryStore
from memstore.hf.load import load_reader
from memstore.training.corpus import read_documents
from memstore.training.selector_questions import Facts

TASKS = ("both", "two hops", "language")
SEGMENTS, SEGMENT, WINDOW = 10, 64, 512  # of language, in tokens
PER_DOCUMENT, MOST = 10, 48  # questions of a task; tokens generated


def main() -> None:
    options = plain_parser(__doc__)
    options.add_argument("--text", nargs="+", required=True, help="books: .jsonl.zst or .txt")
    options.add_argument("--model", required=True, help="a directory of Hugging Face's make")
    add(options, "--dtype", "float32", "of the weights", choices=DTYPES)
    options.add_argument("--work", type=Path, help="keep results here")
    add(options, "--length", "8K", "tokens of a document", type=tokens_number)
    add(options, "--documents", 8, f"documents, of {PER_DOCUMENT} questions a task")
    add(options, "--split", "held-out", "of words and forms", choices=("held-out", "validation"))
    add(options, "--every", [0, 8, 64], "tokens between choices")
    add(options, "--tasks", list(TASKS), choices=TASKS, metavar="TASK")
    given = options.parse_args()
    prepare(given.threads)
    with tempfile.TemporaryDirectory() as temporary:
        name = f"anew-{given.dtype}-{given.length}-{given.split}-{given.seed}.jsonl"
        results = Results((given.work or Path(temporary)) / name)
        measured = Anew(given, results)
        for number in range(given.documents):
            if "language" in given.tasks:
                measured.go_on(number)
            measured.ask(number)
        rows = [row for row in results if row["task"] in given.tasks]
    print(tables(rows, given))
    write(given, {"rows": rows})


class Anew:
    """A reader, books, and what was measured already."""

    def __init__(self, options: argparse.Namespace, results: Results) -> None:
        self.options, self.results = options, results
        self.reader = load_reader(options.model, dtype=DTYPES[options.dtype])
        self.texts, self.offsets = list(read_documents(options.text)), counting(options.model)

    def ask(self, number: int) -> None:
        """Questions of two facts about a document."""
        rng = Random(f"anew {self.options.seed} {number}")
        hay, facts = Hay(self.offsets, self.texts, rng), Facts(self.options.split, rng)
        needles, questions = [], []
        for _ in range(PER_DOCUMENT):
            pair = [self.number(facts, facts.subject("tp").name) for _ in range(2)]
            asked = " and ".join(f"the {attribute} of {of}" for attribute, of, _ in pair)
            questions.append(("both", f"What are {asked}?", tuple(value for *_, value in pair)))
            thing, keeper = facts.subject("tp").name, facts.person()
            hop = self.number(facts, keeper)
            asked = f"Who is the keeper of {thing}, and what is the {hop[0]} of that person?"
            questions.append(("two hops", asked, (keeper, hop[2])))
            needles.append([Needle(f"The keeper of {thing} is {keeper}.", keeper)])
            needles += [
                [Needle(f"The {attribute} of {of} is {value}.", value)]
                for attribute, of, value in (*pair, hop)
            ]
        wanted = [
            (f"{number} {place}", task, asked, parts, every)
            for place, (task, asked, parts) in enumerate(questions)
            for every in self.options.every
            if task in self.options.tasks
            and (f"{number} {place}", f"every {every}") not in self.results
        ]
        text, _ = hay.plant("book", self.options.length, needles)
        if not wanted:
            return
        with tempfile.TemporaryDirectory() as directory, self.memory(directory, text) as store:
            for name, task, asked, parts, every in wanted:
                with self.reader.session(store, choose_every=every) as session:
                    state = session.ask(asked, lambda: None)
                    said = self.reader.tokenizer.decode(list(session.generate(state, MOST)))
                right = Question("", task, 0, (), asked, "", parts, "all").marks(said)
                row = {"question": name, "method": f"every {every}", "task": task, "right": right}
                self.results.add({**row, "last": float(parts[-1] in said)})

    @staticmethod
    def number(facts: Facts, of: str) -> tuple[str, str, str]:
        """An attribute of something, and its value."""
        fact = facts.literal()
        while not fact.value.isdigit():
            fact = facts.literal()
        return fact.key.split("|")[0], of, fact.value

    def memory(self, directory: str, text: str) -> MemoryStore:
        reader = self.reader
        store = MemoryStore.create(Path(directory) / "m", reader.signature, selector=reader.keeps)
        reader.ingest(text, store, name="book")
        return store

    def go_on(self, number: int) -> None:
        """A book goes on behind what is remembered of it."""
        methods = [f"every {every}" for every in self.options.every if every in (0, SEGMENT)]
        if all((f"language {number} 1", method) in self.results for method in methods):
            return
        rng = Random(f"language {self.options.seed} {number}")
        prose = Hay(self.offsets, self.texts, rng).prose(
            self.options.length + WINDOW + SEGMENTS * SEGMENT
        )
        reader, length = self.reader, self.options.length
        ends = self.offsets(prose)
        ids = reader.tokenizer.encode(prose[ends[length - 1][1] :])
        last = ids[WINDOW - SEGMENT : WINDOW]
        asked = reader.gate, reader.separator_ids
        reader.gate, reader.separator_ids = None, []  # a text goes on, nothing is asked
        with (
            tempfile.TemporaryDirectory() as directory,
            self.memory(directory, prose[: ends[length - 1][1]]) as store,
        ):
            for method in methods:
                with reader.session(store) as session:
                    session.feed(ids[: WINDOW - SEGMENT])
                    session.choose(reader.tokenizer.decode(last), last, range(SEGMENT))
                    state = session.feed(last)[-1:]
                    for place in range(1, SEGMENTS + 1):
                        if place > 1 and method != "every 0":
                            session.choose_again()
                        piece = ids[WINDOW + (place - 1) * SEGMENT :][:SEGMENT]
                        states = torch.cat((state, session.feed(piece)))
                        nats = cross_entropy(session.logits(states[:-1]), torch.tensor(piece))
                        state = states[-1:]
                        if place > 1:
                            name = f"language {number} {place - 1}"
                            row = {"question": name, "method": method, "task": "language"}
                            self.results.add({**row, "nats": float(nats)})
        reader.gate, reader.separator_ids = asked


def tables(rows: list[Row], options: argparse.Namespace) -> str:
    """By task and method: what is right, and differences to choosing once."""
    of = {(row["question"], row["method"]): row for row in rows}
    lines = []
    for task in options.tasks:
        what = "nats" if task == "language" else "right"
        for every in options.every:
            mine = [
                row for row in rows if row["task"] == task and row["method"] == f"every {every}"
            ]
            if not mine:
                continue
            apart = [row[what] - of[row["question"], "every 0"][what] for row in mine]
            mean, low, high = mean_interval(apart)
            value = sum(row[what] for row in mine) / len(mine)
            last = "" if what == "nats" else f"{sum(row['last'] for row in mine) / len(mine):.2f}"
            less = "" if every == 0 else f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"
            lines.append((task, every or "once", len(mine), f"{value:.3f}", last, less))
    head = ("task", "chosen every", "n", "right, or nats", "second part", "to once")
    return table(head, lines)


if __name__ == "__main__":
    main()
