"""How often does a passage model answer planted questions right, by kind and length of the memory?

The documents and questions are those of `benchmarks/real/planted`: books in which one or two
sentences in every hundred words are planted, each asked for once. The pass key is in a passage of
its own that is attached next to a document; facts that need context (two sentences, a heading, a
table) and facts in other languages are in documents of their own. Everyday questions and questions
about context are asked as typed, without a primed answer, and the answer has to occur in the first
24 tokens. The other questions are primed: the words that begin the answer are given, and the answer
is right if greedy decoding continues with it (found by teacher forcing). Where nothing answers, it
is right to say nothing.

Methods: memory; bm25@K, minilm@K and rrf@K (both, fused by reciprocal rank), the best K passages as
text in the prompt; memory-text, the passages that the memory chose as text; right, those of the
fact as text.

Baselines at their best: a run over validation texts with several K and --tune FILE chooses for each
baseline its K and the best score below which it says nothing, by right answers less false ones: the
share of a kind's questions that are answered rightly, minus the share of unanswerable questions
that are answered, averaged over kinds and lengths. "bm25", "minilm" and "rrf" use K and threshold
of --tuned (the published ones by default).

With --work, where every answer is stored, an interrupted run continues; --out stores the counts.
Intervals are Wilson's, 95%; those of differences on the same questions Bonett and Price's.

    python -m benchmarks.real.recall --text books-test.jsonl.zst --model smollm2/ --work real/
"""

import argparse
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.common.memories import workplace
from benchmarks.common.options import add, prepare
from benchmarks.common.results import write
from benchmarks.common.tables import tokens_number
from benchmarks.real.baselines import Chooser, chooser
from benchmarks.real.passage_model import MOST, answer, memory_of, parser, passage_model
from benchmarks.real.plan import Block, Blocks, Question
from benchmarks.real.planted import CORPORA, TASKS, TUNED, load
from benchmarks.real.recall_tables import Row, Tuned, answers, counts, differences, tune, worths
from benchmarks.real.text_reader import TextReader
from memstore import MemoryStore
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.model.lookup_settings import CAUTION
from memstore.model.passages.passage_encoding import passages_of
from memstore.training.corpus import read_documents

BASELINES = ("bm25", "minilm", "rrf")
DEFAULT_METHODS = ["memory", "bm25@1", "bm25@4", "minilm@4", "rrf@4", "right"]


class Asking:
    """Asks planted questions by any method. tuned: of the baselines without a number."""

    def __init__(
        self,
        reader: HuggingFacePassageModel,
        store: MemoryStore,
        documents: Mapping[str, str],
        work: Path,
        tuned: Mapping[str, Tuned],
    ) -> None:
        self.reader, self.store, self.tuned = reader, store, tuned
        self.blocks = Blocks(lambda text: passages_of(reader, [text]), documents)
        self._texts = TextReader(reader)
        self._chooser: Any = cache(lambda name: chooser(name, self.blocks, work))

    def ask(self, method: str, question: Question) -> Row:
        """What came of a question: "right" (0..1), "said", "answered", and "read", the passages; of
        a baseline "best", its best score. Raises SystemExit for an unknown method.
        """
        if method == "memory":
            with self.reader.session(self.store, question.documents) as session:
                right, said = answer(self.reader, session, question)
                read = self._names(session.chosen)
                return {"right": right, "said": said, "answered": session.answered, "read": read}
        if method == "memory-text":
            with self.reader.session(self.store, question.documents) as session:
                turn = self.reader.turn_ids(question.text, first=True)
                chosen = self._names(session.choose(question.text, *turn))
                return self._as_text(question, chosen, session.answered)
        if method == "right":
            return self._as_text(question, self.blocks.right(question), True)
        name, _, number = method.partition("@")
        if name not in BASELINES or not (number or name in self.tuned):
            raise SystemExit(f"no method {method!r}, or none that --tuned has")
        how = Tuned(int(number), None, 0.0) if number else self.tuned[name]
        made: Chooser = self._chooser(name)
        scores = made.scores(question)
        best = float(scores.max(initial=-np.inf))
        scope = self.blocks.scope(question.documents)
        chosen = [scope[at] for at in sorted(np.argsort(-scores, kind="stable")[: how.k])]
        answered = how.threshold is None or best >= how.threshold
        return self._as_text(question, chosen, answered) | {"best": best}

    def _as_text(self, question: Question, chosen: Sequence[Block], answered: bool) -> Row:
        """The answer after passages in the prompt; nothing is read if nothing is answered."""
        row: Row = {"right": 0.0, "said": "", "answered": answered, "read": []}
        if not answered:
            return row
        ids = [self.blocks.passages(name)[number].ids.tolist() for name, number in chosen]
        if question.rule != "forced":
            said, _, _ = self._texts.answer(ids, question.text, MOST)
            row |= {"right": question.marks(said), "said": said}
        elif question.answers:
            asked = (question.text, question.primed, question.following)
            row["right"] = float(self._texts.goes_on(ids, *asked))
        return row | {"read": list(chosen)}

    def _names(self, chosen: Sequence[Any]) -> list[Block]:
        name_of = {document.id: document.name for document in self.store.documents()}
        return [(name_of[one.document], one.block) for one in chosen]


def main() -> None:
    options = read_options()
    prepare(options.threads)
    plan = load(options.planted, list(read_documents(options.text)), options.lengths)
    questions = plan.of(options.tasks, options.lengths, options.asked)
    tuned = {name: Tuned(**one) for name, one in json.loads(options.tuned.read_text()).items()}
    reader = passage_model(options.model, options.dtype, options.caution)
    with workplace(options) as work:
        same = (reader.signature.digest.hex(), reader.keeps.digest, options.planted)
        with memory_of(reader, work / f"memory-{_digest(*same)}", plan, questions) as store:
            asking = Asking(reader, store, plan.documents, work, tuned)
            judged = reader.lookup, reader.gate, reader.refusal, tuned
            file = work / f"rows-{_digest(*same, *judged)}.jsonl"
            rows = ask_all(asking, questions, options.methods, file, options.seed)
    for length in options.lengths:
        print("\n" + answers(rows, length, options.methods))
        if "memory" in options.methods:
            print("\n" + differences(rows, length, options.methods))
    print("\n" + worths(rows, options.methods))
    if options.tune is not None:
        found = tune(rows)
        for name, one in found.items():
            print(f"{name}: the best {one.k}, from {one.threshold} on, worth {one.worth:.3f}")
        options.tune.write_text(json.dumps({name: asdict(one) for name, one in found.items()}))
    write(options, {"answers": counts(rows)})


def ask_all(
    asking: Asking, questions: Sequence[Question], methods: Sequence[str], file: Path, seed: int
) -> list[Row]:
    """A row for each question and method, of those that apply; what `file` has is not asked again.
    In a random order, so that a run that is not over says something of every task.
    """
    known: dict[tuple[str, str], Row] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:  # what a killed process was writing
            continue
        known[row["question"], row["method"]] = row
    order = list(questions)
    Random(seed).shuffle(order)
    began, found = time.perf_counter(), []
    with file.open("a") as out:
        print(file=out)  # ends the line of a killed process
        for number, question in enumerate(order, 1):
            for method in methods:
                if method == "right" and not question.stated:
                    continue
                key = question.name, method
                if key not in known:
                    about: Row = {"question": question.name, "task": question.task}
                    about |= {"length": question.length, "method": method}
                    known[key] = about | asking.ask(method, question)
                    print(json.dumps(known[key]), file=out, flush=True)
                found.append(known[key])
            if number % 48 == 0 or number == len(order):
                seconds = time.perf_counter() - began
                print(f"  {number}/{len(order)} in {seconds:.0f} s", flush=True)
    return found


def read_options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--work", type=Path, help="store the memory and answers here")
    add(options, "--methods", DEFAULT_METHODS, metavar="METHOD")
    add(options, "--tuned", TUNED, "K and thresholds, as written by --tune", type=Path)
    add(options, "--tune", None, "write the best K and threshold of each baseline here", type=Path)
    add(options, "--caution", CAUTION, "of the memory: see LookupSettings")
    add(options, "--asked", None, "at most so many questions of a task and length", type=int)
    add(options, "--lengths", ["8K", "32K"], "tokens of memory")
    add(options, "--planted", CORPORA[0], "the corpus whose questions are asked", choices=CORPORA)
    add(options, "--tasks", list(TASKS), choices=TASKS, metavar="TASK")
    given = options.parse_args()
    given.lengths = sorted(tokens_number(text) for text in given.lengths)
    return given


def _digest(*values: Any) -> str:
    return hashlib.blake2b("\n".join(map(str, values)).encode(), digest_size=4).hexdigest()


if __name__ == "__main__":
    main()
