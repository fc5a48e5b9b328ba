"""What do answers change when tokens are generated with weights of fewer bits?

One memory, read in once in float32, is asked the same questions (recall.py's, about passages of
books) by the model in float32 and in bfloat16 with the weights as loaded, and in bfloat16 with
those of --weights. An answer is what is generated after the question, up to --most tokens; nothing
is primed. Told are how many answers are another text than those of float32, and than those of
bfloat16, and how many became right or wrong: what bfloat16 changes of float32 is the measure of
what fewer bits may change.

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
from benchmarks.common.tables import table, tokens_number
from benchmarks.real.passage_model import passage_model
from benchmarks.real.plan import Plan, Question
from benchmarks.real.prompting import counting
from benchmarks.real.questions import TASKS, build
from memstore import MemoryStore
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.training.corpus import read_documents

ASKED = ["natural", "pronoun", "fact", "updated"]
FULL = ("float32 full", "bfloat16 full")


class Said(NamedTuple):
    """An answer."""

    text: str
    right: float


def main() -> None:
    options = read_options()
    prepare(options.threads)
    texts = list(read_documents(options.text))
    length = options.length
    plan = build(counting(options.model), texts, [length], {length: options.trials}, options.seed)
    questions = plan.of(options.tasks, [length])
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
    add(options, "--length", "2K", "tokens of a document", type=tokens_number)
    add(options, "--trials", 50, "questions a task")
    add(options, "--most", 32, "tokens of an answer")
    add(options, "--tasks", ASKED, choices=TASKS, metavar="TASK")
    return options.parse_args()


def opened(
    reader: HuggingFacePassageModel, path: Path, plan: Plan, questions: Sequence[Question]
) -> MemoryStore:
    """The memory of all that is asked about; the first model that opens it reads it in."""
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
    """For every text a number of its question, the same for the same text, in place of its words:
    they may be a book's.
    """
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in rows}
    for answers in zip(*rows.values(), strict=True):
        known: dict[str, int] = {}
        for name, one in zip(rows, answers, strict=True):
            found[name].append((known.setdefault(one.text, len(known)), one.right))
    return found


def compared(rows: dict[str, list[Said]]) -> str:
    """A model a line, against float32 and against bfloat16 with its weights as loaded."""
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
        head += [f"other text than {base}", "won, lost"]
    return table(head, lines)


if __name__ == "__main__":
    main()
