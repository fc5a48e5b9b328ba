"""Which selector finds the passage that answers, and which questions does its gate let through?

The planted questions of real.recall at 32K tokens. Several documents make one haystack: is the
passage of a question among the best 1, 4, 8 and 16? And how many questions of each kind score
higher than all but a given share of the unanswerable ones? Compared are the selector that is
installed for the model ("as shipped"), those of --selectors, and BM25. Passages are read alone
after the model's prefix, as an ingest does, through the layers that the selectors look at.

    python -m benchmarks.real.selectors --text books-val.jsonl.zst --selectors mine.safetensors
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.common.options import add, plain_parser, prepare
from benchmarks.common.results import write
from benchmarks.common.tables import table
from benchmarks.common.timing import timed
from benchmarks.real.baselines import Chooser, Words
from benchmarks.real.blocks import Blocks, passages
from benchmarks.real.methods import standing
from benchmarks.real.passage_model import passage_model
from benchmarks.real.plan import Question
from benchmarks.real.planted import CORPORA, TASKS, load
from benchmarks.real.prompting import DTYPES
from benchmarks.real.recall_tables import finds
from benchmarks.real.results import Row
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.model.passages.adaptation import Adaptation, load_selector
from memstore.model.passages.passage_choice import Candidates
from memstore.model.passages.passage_ingest import passages_of
from memstore.model.passages.selector import (
    GATE_TOGETHER,
    Captured,
    Captures,
    Gate,
    Query,
    Selector,
    confidence,
)
from memstore.training.corpus import read_documents
from memstore.training.selectors.make_selector import Haystack
from memstore.training.selectors.states import captured

LENGTH = 32_768  # tokens of a document
SHARES = (0.05, 0.1, 0.17, 0.25, 0.4)  # of the questions that nothing answers, let through
ABSENT = ("absent", "absent_reworded")


class Through(NamedTuple):
    """Which shares of questions get through: of those that nothing answers, and of others by
    kind.
    """

    name: str
    false: float
    shares: dict[str, float]


class Read:
    """Documents and questions, each read once for all selectors."""

    def __init__(
        self,
        reader: HuggingFacePassageModel,
        blocks: Blocks,
        captures: Captures,
        questions: Sequence[str],
    ) -> None:
        self.reader, self.blocks, self.captures = reader, blocks, captures
        self._passages: dict[str, list[Captured]] = {}
        asked = [reader.turn_ids(question, first=True) for question in questions]
        shown = captured(reader, [ids for ids, _ in asked], captures, asked=True)
        self._questions = {
            question: Query(one.part(words), question)
            for question, one, (_, words) in zip(questions, shown, asked, strict=True)
        }

    def passages(self, document: str) -> list[Captured]:
        if document not in self._passages:
            text = self.blocks.documents[document]
            ids = [one.ids.tolist() for one in passages_of(self.reader, [text])]
            seconds, found = timed(lambda: captured(self.reader, ids, self.captures, asked=False))
            tokens = sum(map(len, ids))
            print(f"{document}: {len(ids)} passages, {tokens / seconds:.0f} tokens/s", flush=True)
            self._passages[document] = found
        return self._passages[document]

    def question(self, text: str) -> Query:
        return self._questions[text]


class Chosen:
    """A selector over documents that were read."""

    def __init__(self, selector: Selector, read: Read) -> None:
        self.selector, self.read = selector, read
        self._haystacks: dict[tuple[str, ...], Haystack] = {}

    def scores(self, question: Question) -> np.ndarray:
        haystack, query = self._haystack(question.documents), self.read.question(question.text)
        return self.selector.scores(query, haystack, haystack.scope).numpy()

    def together(self, question: Question, scores: np.ndarray) -> float | None:
        """What the best passages cover together, for the gate."""
        haystack, query = self._haystack(question.documents), self.read.question(question.text)
        adds = partial(self.selector.adds, query, haystack)
        given = torch.from_numpy(scores), haystack.scope, GATE_TOGETHER
        return Candidates(*given, adds, lambda *place: place).together

    def _haystack(self, documents: tuple[str, ...]) -> Haystack:
        if documents not in self._haystacks:
            haystack = self._haystacks[documents] = Haystack(self.selector.spec)
            for document in documents:
                shown = self.read.passages(document)
                haystack.add_passages(self.selector, self.read.reader.tokenizer, shown)
        return self._haystacks[documents]


def main() -> None:
    options = plain_parser(__doc__)
    options.add_argument("--text", nargs="+", required=True, help="books: .jsonl.zst or .txt")
    add(options, "--planted", CORPORA[1], "the corpus whose questions are asked", choices=CORPORA)
    add(options, "--model", "smollm2", "whose selector is measured")
    add(options, "--selectors", [], "files of other selectors for it", nargs="*", type=Path)
    add(options, "--questions", 64, "of each task")
    add(options, "--together", 4, "documents that are searched at once")
    add(options, "--dtype", "bfloat16", "to compute in", choices=tuple(DTYPES))
    given = options.parse_args()
    prepare(given.threads)
    torch.set_grad_enabled(False)
    rows = run(given)
    for by in ("near", "rank"):
        print("\n" + finds(rows, by))
    through = let_through(rows)
    print("\n" + curve(through))
    passages = sorted({row["passages"] for row in rows})
    found = {"among_best": found_among(rows), "let_through": [one._asdict() for one in through]}
    write(given, {"passages": passages} | found)


def run(given: argparse.Namespace) -> list[Row]:
    """The place of the right passage of each question, for every way of choosing."""
    reader = passage_model(given.model, given.dtype)
    plan = load(given.planted, list(read_documents(given.text)), [LENGTH])
    asked = plan.of(TASKS, [LENGTH], given.questions)
    blocks = Blocks(passages(reader.tokenizer, reader.passage_tokens), plan.documents)
    known: dict[str, Adaptation] = {"as shipped": reader.adaptation}
    for path in given.selectors:
        known[path.stem] = load_selector(path, reader.made_for)
    layers = {at for adaptation in known.values() for at in adaptation.selector.captures.states}
    read = Read(
        reader, blocks, Captures(tuple(sorted(layers))), [question.text for question in asked]
    )
    choosers: dict[str, Chooser] = {"bm25": Words(blocks)}
    choosers |= {name: Chosen(of.selector, read) for name, of in known.items()}
    rows = []
    for question in searched(asked, given.together):
        for name, chooser in choosers.items():
            gate = known[name].gate if name in known else None
            rows.append(ask(question, name, chooser, blocks, gate) | {"length": LENGTH})
    return rows


def searched(questions: Sequence[Question], together: int) -> list[Question]:
    """The questions, each about a group of so many documents; without the pass keys, each of which
    is in a passage of its own that no other question may see.
    """
    asked = [question for question in questions if question.task != "passkey"]
    books = list(dict.fromkeys(question.documents[0] for question in asked))
    groups = [tuple(books[at : at + together]) for at in range(0, len(books), together)]
    group_of = {name: group for group in groups for name in group}
    return [replace(question, documents=group_of[question.documents[0]]) for question in asked]


def ask(question: Question, name: str, chooser: Chooser, blocks: Blocks, gate: Gate | None) -> Row:
    """The place of the right passage, the number searched, the best score, and whether the
    selector's own gate lets the question through.
    """
    scores = chooser.scores(question)
    row: Row = {"question": question.name, "task": question.task, "method": name}
    row |= {"passages": len(scores)}
    row |= standing(scores, blocks.scope(question.documents), blocks, question)
    if isinstance(chooser, Chosen) and gate is not None:
        whole = torch.from_numpy(scores)
        assert confidence(whole) == row["best"]
        open_together = gate.answer_together(whole, chooser.together(question, scores))
        row["answered"] = gate.answers(whole) or open_together
    return row


def found_among(rows: Sequence[Row], best: Sequence[int] = (1, 4, 8, 16)) -> dict[str, Any]:
    """By way of choosing and kind, the shares of questions whose passage of the value is among the
    best.
    """
    found: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        if row["rank"] is not None:
            ranks = found.setdefault(row["method"], {}).setdefault(row["task"], [])
            ranks.append(row["rank"])
    return {
        name: {
            task: [round(float(np.mean([rank < k for rank in ranks])), 3) for k in best]
            for task, ranks in tasks.items()
        }
        for name, tasks in found.items()
    }


def let_through(rows: Sequence[Row]) -> list[Through]:
    """What passes of each kind of question by a threshold that so many of those that nothing
    answers pass, literal ones and reworded ones together; and by the selector's own gate.
    """
    found = []
    for name in dict.fromkeys(row["method"] for row in rows):
        those = [row for row in rows if row["method"] == name]
        absent = sorted((row["best"] for row in those if row["task"] in ABSENT), reverse=True)
        for share in SHARES:
            threshold = absent[int(share * len(absent))]
            found.append(_through(name, those, [row["best"] > threshold for row in those]))
        if "answered" in those[0]:
            own = [row["answered"] for row in those]
            found.append(_through(f"{name}, its gate", those, own))
    return found


def _through(name: str, rows: Sequence[Row], passed: Sequence[bool]) -> Through:
    kinds: dict[str, list[bool]] = {}
    for row, one in zip(rows, passed, strict=True):
        kinds.setdefault("absent" if row["task"] in ABSENT else row["task"], []).append(one)
    shares = {task: round(float(np.mean(those)), 3) for task, those in kinds.items()}
    return Through(name, shares.pop("absent"), shares)


def curve(found: Sequence[Through]) -> str:
    """The table of `let_through`."""
    kinds = [task for task in TASKS if task in found[0].shares]
    lines = [
        [one.name, f"{one.false:.2f}", *(f"{one.shares[kind]:.2f}" for kind in kinds)]
        for one in found
    ]
    return table(["let through", "nothing answers", *(TASKS[kind] for kind in kinds)], lines)


if __name__ == "__main__":
    main()
