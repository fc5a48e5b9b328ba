"""Are a passage model's answers the same from a memory in another codec, or with weights of fewer
bits, and what does a memory take in each codec?

The planted questions of real.recall at 8K tokens are asked of each variant: how many answers
differ from the first variant's, how many became right and wrong, and the difference of the shares
of right ones (paired, 95%).

--codecs   one memory in each codec, and the bytes of a token in it
--weights  one memory, ingested in float32 and asked by the model in float32, in bfloat16 with the
           weights as loaded, and in bfloat16 with those named. Nothing is primed: an answer is what
           is generated, up to 32 tokens.

    python -m benchmarks.real.variants --text books-test.jsonl.zst --model smollm2/ --codecs
    python -m benchmarks.real.variants --text books-val.jsonl.zst --model smollm2/ --weights
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.intervals import mean_interval
from benchmarks.common.options import add, prepare
from benchmarks.common.results import write
from benchmarks.common.tables import table, with_interval
from benchmarks.real.passage_model import answer, memory_of, parser, passage_model
from benchmarks.real.plan import Plan, Question
from benchmarks.real.planted import CORPORA, load
from memstore import MemoryStore
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.training.corpus import read_documents

LENGTH = 8192  # tokens of a document
CODECS, WEIGHTS = ["zstd", "int8"], ["int8", "auto"]
TASKS = {"codecs": ["passkey", "fact", "of_20", "natural"]}
TASKS["weights"] = ["natural", "pronoun", "fact", "updated"]
MOST = 32  # tokens of an answer that is not primed


class Said(NamedTuple):
    """An answer, and how right it is, 0..1."""

    text: str
    right: float


def main() -> None:
    options = read_options()
    prepare(options.threads)
    kind = "weights" if options.weights is not None else "codecs"
    plan = load(options.planted, list(read_documents(options.text)), [LENGTH])
    questions = plan.of(TASKS[kind], [LENGTH], options.trials)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if kind == "weights":
            questions = [replace(one, primed="", rule="all") for one in questions]
            rows = by_weights(plan, questions, Path(folder), options)
        else:
            rows = by_codec(plan, questions, Path(folder), options, figures)
    print(report(rows))
    for codec, found in figures.items():
        print(f"{codec}: {found['bytes'] / found['tokens']:,.0f} bytes a token")
    tasks = [one.task for one in questions]
    write(options, {"figures": figures, "tasks": tasks, "rows": numbered(rows)})


def read_options() -> argparse.Namespace:
    options = parser(__doc__, dtype="bfloat16")
    kind = options.add_mutually_exclusive_group(required=True)
    kind.add_argument("--codecs", nargs="*", metavar="CODEC", help="(zstd int8)")
    kind.add_argument("--weights", nargs="*", metavar="WEIGHTS", help="(int8 auto)")
    add(options, "--planted", CORPORA[0], "the corpus whose questions are asked", choices=CORPORA)
    add(options, "--trials", 30, "questions a task")
    return options.parse_args()


def by_codec(
    plan: Plan,
    questions: Sequence[Question],
    folder: Path,
    options: argparse.Namespace,
    figures: dict[str, Any],
) -> dict[str, list[Said]]:
    """Answers by codec; figures gets the bytes and tokens of each memory."""
    reader = passage_model(options.model, options.dtype)
    rows = {}
    for codec in options.codecs or CODECS:
        with memory_of(reader, folder / codec, plan, questions, codec) as store:
            documents = store.documents()
            figures[codec] = {
                name: sum(getattr(one, name) for one in documents) for name in ("bytes", "tokens")
            }
            rows[codec] = [asked(reader, store, one) for one in questions]
    return rows


def by_weights(
    plan: Plan, questions: Sequence[Question], folder: Path, options: argparse.Namespace
) -> dict[str, list[Said]]:
    """Answers by dtype and weights, of one memory."""
    rows = {}
    names = [f"bfloat16 {weights}" for weights in options.weights or WEIGHTS]
    for name in ["float32 full", "bfloat16 full", *names]:
        dtype, weights = name.split()
        reader = passage_model(options.model, dtype, caution=0.0, weights=weights)
        with memory_of(reader, folder / "memory", plan, questions, "raw") as store:
            rows[name] = [asked(reader, store, one) for one in questions]
    return rows


def asked(reader: HuggingFacePassageModel, store: MemoryStore, question: Question) -> Said:
    """The answer to one question."""
    with reader.session(store, question.documents) as session:
        right, text = answer(reader, session, question, MOST)
        return Said(text, right)


def numbered(rows: dict[str, list[Said]]) -> dict[str, list[tuple[int, float]]]:
    """A number for every distinct answer to a question in place of its text, which may be a
    book's.
    """
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in rows}
    for answers in zip(*rows.values(), strict=True):
        known: dict[str, int] = {}
        for name, one in zip(rows, answers, strict=True):
            found[name].append((known.setdefault(one.text, len(known)), one.right))
    return found


def report(rows: dict[str, list[Said]]) -> str:
    """The table: a variant a line, compared with the first."""
    first = next(iter(rows.values()))
    lines = []
    for name, of in rows.items():
        pairs = list(zip(of, first))
        won, lost = (
            sum((one.right - before.right) * sign > 0 for one, before in pairs) for sign in (1, -1)
        )
        less, least, most = mean_interval([before.right - one.right for one, before in pairs])
        line: list[object] = [name, with_interval(mean_interval([one.right for one in of]))]
        line += [sum(one.text != before.text for one, before in pairs), f"{won}, {lost}"]
        lines.append([*line, f"{less:.3f} ({least:.3f} to {most:.3f})"])
    return table(["", "right", "differ", "won, lost", "less than the first"], lines)


if __name__ == "__main__":
    main()
