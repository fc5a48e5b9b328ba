"""How do answers change when tokens are generated with weights of fewer bits?

One memory, ingested in float32, is asked the planted questions of real.recall by the model in
float32 and in bfloat16 with the weights as loaded, and in bfloat16 with those of --weights. An
answer is what is generated after the question, up to --most tokens; nothing is primed. Reported are
how many answers differ from those of float32 and from those of bfloat16, and how many became right
or wrong. What bfloat16 changes of float32 is the measure of what fewer bits may change.

    python -m benchmarks.real.weights --text books-val.jsonl.zst --model smollm2/
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.intervals import mean_interval
from benchmarks.common.options import add, plain_parser, prepare
from benchmarks.common.results import write
from benchmarks.common.tables import table
from benchmarks.real.passage_model import passage_model
from benchmarks.real.plan import Plan, Question
from benchmarks.real.planted import CORPORA, TASKS, load
from memstore import MemoryStore
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.training.corpus import read_documents

ASKED = ["natural", "pronoun", "fact", "updated"]
LENGTH = 8192  # tokens of a document
FULL = ("float32 full", "bfloat16 full")


class Said(NamedTuple):
    """An answer."""

    text: str
    right: float


def main() -> None:
    options = read_options()
    prepare(options.threads)
    plan = load(options.planted, list(read_documents(options.text)), [LENGTH])
    questions = plan.of(options.tasks, [LENGTH], options.trials)
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "memory"
        rows: dict[str, list[Said]] = {}
        for name in [*FULL, *(f"bfloat16 {weights}" for weights in options.weights)]:
            dtype, weights = name.split()
            reader = passage_model(options.model, dtype, caution=0.0, weights=weights)
            with opened(reader, path, plan, questions) as store:
                rows[name] = [asked(reader, store, one, options.most) for one in questions]
            print(f"  {name}: {sum(one.right for one in rows[name]):.0f} right", flush=True)
    print(compared(rows))
    write(options, {"tasks": [one.task for one in questions], "rows": numbered(rows)})


def read_options() -> argparse.Namespace:
    options = plain_parser(__doc__)
    options.add_argument("--text", nargs="+", required=True, help="books: .jsonl.zst or .txt")
    options.add_argument("--model", required=True, help="a directory of Hugging Face's make")
    add(options, "--weights", ["int8", "auto"], "that tokens are generated with")
    add(options, "--planted", CORPORA[1], "the corpus whose questions are asked", choices=CORPORA)
    add(options, "--trials", 50, "questions a task")
    add(options, "--most", 32, "tokens of an answer")
    add(options, "--tasks", ASKED, choices=TASKS, metavar="TASK")
    return options.parse_args()


def opened(
    reader: HuggingFacePassageModel, path: Path, plan: Plan, questions: Sequence[Question]
) -> MemoryStore:
    """The memory of all that is asked about, filled by the first model that opens it."""
    if path.exists():
        return MemoryStore.open(path, reader.signature)
    store = MemoryStore.create(path, reader.signature, codec="raw", selector=reader.keeps)
    for name in dict.fromkeys(name for one in questions for name in one.documents):
        reader.ingest(plan.documents[name], store, name=name)
    return store


def asked(reader: Any, store: MemoryStore, question: Question, most: int) -> Said:
    """The answer to one question."""
    with reader.session(store, question.documents) as session:
        state = session.ask(question.text, lambda: None)
        text = reader.tokenizer.decode(list(session.generate(state, most)))
        return Said(text, question.marks(text))


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


def compared(rows: dict[str, list[Said]]) -> str:
    """The table: a model a line, against float32 and bfloat16 with weights as loaded."""
    lines = []
    for name, of in rows.items():
        right, low, high = mean_interval([one.right for one in of])
        line: list[object] = [name, f"{right:.3f} ({low:.3f}-{high:.3f})"]
        for base in FULL:
            pairs = list(zip(of, rows[base]))
            other = sum(one.text != before.text for one, before in pairs)
            won = sum(one.right > before.right for one, before in pairs)
            lost = sum(one.right < before.right for one, before in pairs)
            line += [other, f"{won}, {lost}"]
        lines.append(line)
    head = ["model", "right"]
    for base in FULL:
        head += [f"differ from {base}", "won, lost"]
    return table(head, lines)


if __name__ == "__main__":
    main()
