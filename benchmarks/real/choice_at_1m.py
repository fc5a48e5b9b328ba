"""Is the right block chosen among those of a million tokens, and how soon?

The choice alone: passages are read up to the layer that the reader's selector captures, as an
ingest does, and only what the selector keeps of them stays (no keys and values). One document of
128K tokens carries the facts of real.recall, others of 128K are books without any; they compete in
one search. A run goes on where it was killed, with --work.

Baselines: BM25 (bm25s) and all-MiniLM-L6-v2 over the same blocks. Seconds are of scoring alone, the
question's own walk to the tap told beside it.

    python -m benchmarks.real.choice_at_1m --text books-test.jsonl.zst --model smollm2/ --work real/
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common.options import add
from benchmarks.common.results import write
from benchmarks.common.tables import table
from benchmarks.common.timing import timed
from benchmarks.real.baselines import Chooser, Sentences, Words, minilm
from benchmarks.real.blocks import Blocks, passages
from benchmarks.real.hay import Hay
from benchmarks.real.methods import standing
from benchmarks.real.passage_model import passage_model
from benchmarks.real.plan import Plan, Question
from benchmarks.real.prompting import counting, tokenizer_of
from benchmarks.real.questions import TASKS, build
from benchmarks.real.recall_tables import finds, refusals
from benchmarks.real.results import Results, Row
from benchmarks.real.running import parser, read
from memstore.disk.format.block_words import BlockWords
from memstore.index.late_interaction import LANDMARK_DTYPES, TokenIndex
from memstore.index.word_index import WordIndex
from memstore.model.passages.activation_capture import capture
from memstore.model.passages.passage_encoding import encode, landmarks_of
from memstore.model.passages.passage_ingest import passages_of
from memstore.model.passages.selector import confidence
from memstore.training.corpus import read_documents

DOCUMENT = 128 * 1024  # tokens


class Found:
    """What a selector asks of a memory, of documents by number."""

    def __init__(self, form: Any) -> None:
        self.tokens = TokenIndex(form.heads, form.width, LANDMARK_DTYPES[form.dtype])
        self.words = WordIndex()

    def token_maxima(self, q: Tensor, head: int, scope: Any) -> Tensor:
        return self.tokens.maxima(q, head, scope)

    def word_scores(self, words: Any, scope: Any) -> Tensor:
        return self.words.scores(words, scope)


class Chosen:
    """The reader's selector over documents that were read up to its tap."""

    def __init__(self, reader: Any, blocks: Blocks, work: Path, name: str) -> None:
        self.reader, self.blocks, self.work, self.name = reader, blocks, work, name
        self.found = Found(reader.selector.spec)
        self.numbers: dict[str, int] = {}
        self.walks: list[float] = []

    def scores(self, question: Question) -> np.ndarray:
        scope = [
            (self._known(name), 0, len(self.blocks.spans(name))) for name in question.documents
        ]
        ids, words = self.reader.turn_ids(question.text, first=True)
        seconds, captured = timed(lambda: capture(self.reader, ids).part(words))
        self.walks.append(seconds)
        scores: Tensor = self.reader.selector.scores(captured, question.text, self.found, scope)
        return scores.cpu().numpy()

    def _known(self, name: str) -> int:
        """The number of a document, which is read when it is first needed."""
        if name not in self.numbers:
            number = self.numbers[name] = len(self.numbers)
            selector, texts = self.reader.selector, self.blocks.scope([name])
            if (known := self.landmarks(name)) is not None:
                self.found.tokens.add(number, 0, *known)
            words = selector.words([self.blocks.text(block) for block in texts])
            if words is not None:
                self.found.words.add(number, 0, BlockWords.of(words))
        return self.numbers[name]

    def landmarks(self, name: str) -> tuple[Tensor, list[int]] | None:
        """A document's landmarks and the lengths of its passages, from an earlier run if there was
        one.
        """
        selector = self.reader.selector
        if not selector.spec.heads:
            return None
        file = self.work / f"landmarks-{self.name}-{selector.spec.digest[:8]}-{name}.pt"
        if not file.exists():
            seconds, landmarks = timed(lambda: self._read(name))
            print(f"  {name}: {len(landmarks[0]) / seconds:.0f} tokens a second", flush=True)
            torch.save(landmarks, file.with_suffix(".part"))
            file.with_suffix(".part").rename(file)
        kept: tuple[Tensor, list[int]] = torch.load(file)
        return kept

    def _read(self, name: str) -> tuple[Tensor, list[int]]:
        """The landmarks of a document, and how many tokens each passage has."""
        reader = self.reader
        passages = list(passages_of(reader, [self.blocks.documents[name]]))
        ids = [passage.ids.tolist() for passage in passages]
        read = list(encode(reader, ids, layers=reader.selector.captures.layers))
        landmarks = landmarks_of(reader, read)
        assert landmarks is not None
        return landmarks, [len(one) for one in ids]


def main() -> None:
    options = read_options()
    torch.set_num_threads(options.threads)
    work = options.work
    work.mkdir(parents=True, exist_ok=True)
    plan = planned(options, work)
    blocks = Blocks(passages(tokenizer_of(options.model)), plan.documents)
    reader = passage_model(options.model, options.dtype)
    chosen = Chosen(reader, blocks, work, f"{options.dtype}-{options.seed}")
    choosers: dict[str, Chooser] = {"memory": chosen}
    if "bm25" in options.baselines:
        choosers["bm25"] = Words(blocks)
    if "minilm" in options.baselines:
        choosers["minilm"] = Sentences(blocks, minilm(work))
    rows: list[Row] = []
    asked = [
        question
        for task in options.tasks
        for question in [q for q in plan.questions if q.task == task][: options.asked]
    ]
    named = f"choice-{options.seed}-{options.documents}-{options.questions}"
    for name, chooser in choosers.items():
        by = name
        if name == "memory":
            spec = reader.selector.spec
            cut = f"{reader.passage_tokens}-{reader.context}"
            by = f"{options.dtype}-{spec.name}-{spec.digest[:8]}-{cut}"
        results, scopes = Results(work / f"{named}-{by}.jsonl"), set[tuple[str, ...]]()
        for question in asked:
            if (question.name, name) not in results:
                if question.documents not in scopes:
                    chooser.scores(question)  # documents are read and indexed
                    scopes.add(question.documents)
                length = options.documents * DOCUMENT
                results.add(ask(question, name, chooser, blocks) | {"length": length})
        rows += [row for row in results if row["question"] in {each.name for each in asked}]
    for by in ("near", "rank"):
        print("\n" + finds(rows, by))
    print("\n" + refusals(rows))
    print("\n" + speeds(rows, chosen.walks))
    write(options, {"rows": rows})


def read_options(
    doc: str | None = __doc__, more: Callable[[argparse.ArgumentParser], None] | None = None
) -> argparse.Namespace:
    """more: adds options of another script over the same questions."""
    options = parser(doc, lengths=["128K"])
    if more is not None:
        more(options)
    add(options, "--documents", 8, "of 128K tokens each")
    add(options, "--questions", 100, "of each task")
    tasks = [task for task in TASKS if task != "natural"]
    add(options, "--tasks", tasks, "that are asked now", choices=tasks)
    add(options, "--baselines", ["bm25", "minilm"], choices=["bm25", "minilm"], nargs="*")
    given = read(options)
    if given.work is None:
        options.error("--work is needed: what was read is kept there")
    return given


def planned(options: argparse.Namespace, work: Path) -> Plan:
    """Recall's questions at 128K tokens, and documents of books beside theirs."""
    path = work / f"choice-{options.seed}-{options.documents}-{options.questions}.json"
    if not path.exists():
        texts, offsets = list(read_documents(options.text)), counting(options.model)
        plan = build(offsets, texts, [DOCUMENT], {DOCUMENT: options.questions}, options.seed)
        hay = Hay(offsets, texts, Random(f"choice {options.seed}"))
        more = {f"books {number}": hay.prose(DOCUMENT) for number in range(1, options.documents)}
        asked = [
            Question(**{**vars(q), "documents": (*q.documents, *more)})
            for q in plan.questions
            if q.task != "natural"
        ]
        Plan(plan.documents | more, asked).save(path)
    return Plan.load(path)


def ask(question: Question, name: str, chooser: Chooser, blocks: Blocks) -> Row:
    """Where the right block stands for a chooser, and how long that took."""
    seconds, scores = timed(lambda: chooser.scores(question))
    place = standing(scores, blocks.scope(question.documents), blocks, question)
    if name == "memory":
        place["best"] = confidence(torch.from_numpy(scores))
    about = {"question": question.name, "task": question.task}
    return about | {"method": name, "seconds": seconds} | place


def speeds(rows: Sequence[Row], walks: Sequence[float]) -> str:
    """Milliseconds of a question, the median."""
    lines = []
    for name in dict.fromkeys(row["method"] for row in rows):
        taken = [row["seconds"] for row in rows if row["method"] == name]
        walk = f"{1000 * statistics.median(walks):.0f}" if name == "memory" and walks else ""
        lines.append([name, f"{1000 * statistics.median(taken):.0f}", walk])
    return table(["chooser", "ms a question", "of these the walk to the tap"], lines)


if __name__ == "__main__":
    began = time.perf_counter()
    main()
    print(f"{time.perf_counter() - began:.0f} s")
