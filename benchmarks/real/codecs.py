"""What does a passage model's memory take in each codec, and are its answers the same?

The documents of the planted questions (see real.recall) are ingested into a memory of each codec,
and every question is asked of each memory in turns. Compared with the first codec: bytes a token,
the ratio of ingest speeds (median over documents), answers that became right and wrong with the
difference of their shares (paired, 95%), and questions for which other passages were read.

    python -m benchmarks.real.codecs --text books-test.jsonl.zst --model smollm2/ --trials 30
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.intervals import mean_interval
from benchmarks.common.options import add, prepare
from benchmarks.common.results import write
from benchmarks.common.tables import table, tokens_text
from benchmarks.common.timing import timed
from benchmarks.real.memory import answer
from benchmarks.real.passage_model import parser, passage_model
from benchmarks.real.plan import Plan, Question
from benchmarks.real.planted import CORPORA, TASKS, load
from memstore import MemoryStore
from memstore.disk.format.codec import CODECS
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.training.corpus import read_documents

ASKED = ["passkey", "fact", "of_20", "natural"]
LENGTH = 8192  # tokens of a document


class Asked(NamedTuple):
    """How right an answer is, 0..1, and the passages that were read for it."""

    right: float
    read: list[tuple[int, int]]


def main() -> None:
    options = read_options()
    prepare(options.threads)
    reader = passage_model(options.model, options.dtype)
    plan = load(options.planted, list(read_documents(options.text)), [LENGTH])
    questions = plan.of(options.tasks, [LENGTH], options.trials)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stores = {
            codec: stack.enter_context(
                MemoryStore.create(
                    folder / codec, reader.signature, codec=codec, selector=reader.keeps
                )
            )
            for codec in options.codecs
        }
        figures = ingest(reader, plan, questions, stores)
        rows: dict[str, list[Asked]] = {codec: [] for codec in stores}
        for question in questions:
            for codec, store in stores.items():
                rows[codec].append(ask(reader, store, question))
    print(report(rows, figures, options.tasks))
    write(options, {"figures": figures, "tasks": [q.task for q in questions], "rows": rows})


def read_options() -> argparse.Namespace:
    options = parser(__doc__)
    add(options, "--planted", CORPORA[0], "the corpus whose questions are asked", choices=CORPORA)
    add(options, "--trials", 30, "questions a task")
    add(options, "--tasks", ASKED, choices=TASKS, metavar="TASK")
    add(options, "--codecs", ["zstd", "int8"], choices=CODECS, metavar="CODEC")
    return options.parse_args()


def ingest(
    reader: HuggingFacePassageModel,
    plan: Plan,
    questions: Sequence[Question],
    stores: dict[str, MemoryStore],
) -> dict[str, dict[str, Any]]:
    """Ingest what the questions are about; by codec, bytes a token and tokens a second of each
    document.
    """
    names = list(dict.fromkeys(name for question in questions for name in question.documents))
    rates: dict[str, dict[str, float]] = {codec: {} for codec in stores}
    for turn, name in enumerate(names):
        for codec in list(stores) if turn % 2 else reversed(stores):
            work = partial(reader.ingest, plan.documents[name], stores[codec], name=name)
            seconds, document = timed(work)
            if document.tokens >= 1024:
                rates[codec][name] = document.tokens / seconds
    documents = {codec: [store.document(name) for name in names] for codec, store in stores.items()}
    return {
        codec: {
            "bytes a token": sum(one.bytes for one in of) / sum(one.tokens for one in of),
            "rates": rates[codec],
        }
        for codec, of in documents.items()
    }


def ask(reader: HuggingFacePassageModel, store: MemoryStore, question: Question) -> Asked:
    """Ask one question."""
    with reader.session(store, question.documents) as session:
        right, _ = answer(reader, session, question)
        return Asked(right, [(block.document, block.block) for block in session.chosen])


def report(
    rows: dict[str, list[Asked]], figures: dict[str, dict[str, Any]], tasks: Sequence[str]
) -> str:
    """The table: a codec a line, compared with the first."""
    head = ["codec", "bytes a token", "ingest, of the first"]
    head += [f"{task} at {tokens_text(LENGTH)}" for task in tasks]
    head += ["less than the first", "lost, won", "other passages"]
    first = next(iter(rows))
    trials = len(rows[first]) // len(tasks)
    lines = []
    for codec, of in rows.items():
        rates, rates0 = figures[codec]["rates"], figures[first]["rates"]
        right = [row.right for row in of]
        shares = [
            f"{statistics.mean(right[at : at + trials]):.2f}" for at in range(0, len(right), trials)
        ]
        changed = [row0.right - row.right for row, row0 in zip(of, rows[first])]
        mean, low, high = mean_interval(changed)
        lines.append(
            [
                codec,
                f"{figures[codec]['bytes a token']:.0f}",
                f"{statistics.median(rates[name] / rates0[name] for name in rates):.2f}",
                *shares,
                f"{mean:.3f} ({low:.3f} to {high:.3f})",
                f"{sum(one > 0 for one in changed)}, {sum(one < 0 for one in changed)}",
                sum(row.read != row0.read for row, row0 in zip(of, rows[first])),
            ]
        )
    return table(head, lines)


if __name__ == "__main__":
    main()
