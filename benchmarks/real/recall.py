"""How often is a real model's answer right, by what is asked and how much was read?

A document of --lengths tokens of books carries facts of all kinds, one or two in every hundred
words, whose words, forms and relations no selector was trained with; each is asked for once. The
pass key stands in a passage of its own that is attached beside a document. An answer is right if
greedy decoding begins with it (found by teacher forcing), after the words that begin the answer;
"natural" questions are typed as they are, nothing is primed, and the answer has to occur in the
first 24 tokens.

Methods: memory; right (the blocks of the fact as text in the prompt: the ceiling), full (everything
in the prompt, up to --full-up-to tokens), bm25@K and minilm@K (the best K blocks as text), none.
Questions that nothing answers are judged by the best score: how many of them reach what 95% of the
answerable ones of their kind reach.

A run goes on where it was killed, with --work; intervals are Wilson's, 95%.

    python -m benchmarks.real.recall --text books-test.jsonl.zst --model smollm2/ --work real/
"""

import argparse
import hashlib
import tempfile
import time
from pathlib import Path

from benchmarks.common.options import add, plain_parser, prepare
from benchmarks.common.results import write
from benchmarks.common.tables import tokens_number
from benchmarks.real.blocks import Blocks
from benchmarks.real.methods import Rivals, ask_all
from benchmarks.real.plan import Plan, Question
from benchmarks.real.prompting import DTYPES, counting
from benchmarks.real.questions import TASKS, build
from benchmarks.real.recall_tables import answers, finds, refusals
from benchmarks.real.results import Results
from memstore.training.corpus import read_documents


def main() -> None:
    options = read_options()
    prepare(options.threads)
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        plan = planned(options, work)
        blocks = Blocks(counting(options.model), plan.documents)
        rivals = Rivals(options.model, options.dtype, blocks, work)
        methods = {name: (lambda name=name: rivals.method(name)) for name in options.methods}
        results = Results(work / f"recall-{digest(options)}.jsonl")

        def applies(question: Question, method: str) -> bool:
            if not question.answers and method in ("right", "full", "none"):
                return False
            return method != "full" or question.length <= options.full_up_to

        ask_all(plan.of(options.tasks, options.lengths), methods, results, applies=applies)
        rows = [row for row in results if row["length"] in options.lengths]
        for length in options.lengths:
            print("\n" + answers(rows, length, options.methods))
        print("\n" + finds(rows))
        print("\n" + refusals(rows))
        write(options, {"rows": rows})


def read_options() -> argparse.Namespace:
    options = plain_parser(__doc__)
    options.add_argument("--text", nargs="+", required=True, help="books: .jsonl.zst or .txt")
    options.add_argument("--model", required=True, help="a directory of Hugging Face's make")
    add(options, "--dtype", "float32", "of the weights", choices=DTYPES)
    options.add_argument("--work", type=Path, help="keep results, texts and memories here")
    add(options, "--lengths", ["2K", "8K", "32K", "128K"], "tokens of memory, e.g. 32K")
    add(options, "--trials", 0, "questions a task; 0: 50 up to 8K tokens, 100 beyond")
    add(options, "--tasks", list(TASKS), choices=TASKS, metavar="TASK")
    add(options, "--methods", ["right", "full", "bm25@4", "minilm@4", "none"], metavar="METHOD")
    add(options, "--full-up-to", "2K", type=tokens_number)
    given = options.parse_args()
    given.lengths = sorted(tokens_number(text) for text in given.lengths)
    return given


def planned(options: argparse.Namespace, work: Path) -> Plan:
    """The documents and questions, made once for a directory."""
    trials = {n: options.trials or (50 if n <= 8192 else 100) for n in options.lengths}
    named = "-".join(f"{length}x{count}" for length, count in trials.items())
    path = work / f"recall-{digest(options)}-{named}.json"
    if not path.exists():
        texts = list(read_documents(options.text))
        build(counting(options.model), texts, options.lengths, trials, options.seed).save(path)
    return Plan.load(path)


def digest(options: argparse.Namespace) -> str:
    """Of what decides on the questions and, beside the method, on the answers."""
    texts = [f"{Path(text).name} {Path(text).stat().st_size}" for text in options.text]
    decides = [*texts, Path(options.model).name, options.dtype, str(options.seed)]
    return hashlib.blake2b("\n".join(decides).encode(), digest_size=4).hexdigest()


if __name__ == "__main__":
    began = time.perf_counter()
    main()
    print(f"{time.perf_counter() - began:.0f} s")
