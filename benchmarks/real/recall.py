"""How often is a real model's answer right, by what is asked and how much was read?

A document of --lengths tokens of books carries facts of all kinds, one or two in every hundred
words, whose words, forms and relations no selector was trained with; each is asked for once. The
pass key stands in a passage of its own that is attached beside a document. An answer is right if
greedy decoding begins with it (found by teacher forcing), after the words that begin the answer;
"natural" questions are typed as they are, nothing is primed, and the answer has to occur in the
first 24 tokens.

Methods: memory (memory@K: its best K blocks; memory-right: the right ones out of it), right (the
blocks of the fact as text in the prompt), full (everything in the prompt, up to --full-up-to
tokens), bm25@K and minilm@K (the best K blocks as text), none.
Questions that nothing answers are judged by the best score: how many of them reach what 95% of the
answerable ones of their kind reach.

A run goes on where it was killed, with --work, where every answer is kept; --out has their numbers.
Intervals are Wilson's, 95%.

    python -m benchmarks.real.recall --text books-test.jsonl.zst --model smollm2/ --work real/
"""

import argparse
import time

from benchmarks.common.options import add
from benchmarks.common.results import write
from benchmarks.real.plan import Plan
from benchmarks.real.prompting import counting
from benchmarks.real.questions import TASKS, build
from benchmarks.real.recall_tables import answers, counts, finds, gate, refusals
from benchmarks.real.running import parser, read, run
from memstore.training.corpus import read_documents


def main() -> None:
    options = read_options()
    trials = {n: options.trials or (50 if n <= 8192 else 100) for n in options.lengths}

    def planned() -> Plan:
        texts = list(read_documents(options.text))
        return build(counting(options.model), texts, options.lengths, trials, options.seed)

    rows = run("recall", options, planned, plans=sorted(trials.items()))
    for length in options.lengths:
        print("\n" + answers(rows, length, options.methods))
    for by in ("near", "rank"):
        print("\n" + finds(rows, by))
    print("\n" + refusals(rows))
    if "memory" in options.methods:
        print("\n" + gate(rows))
    write(options, {"answers": counts(rows)})


def read_options() -> argparse.Namespace:
    options = parser(__doc__, lengths=["2K", "8K", "32K", "128K"])
    add(options, "--trials", 0, "questions a task; 0: 50 up to 8K tokens, 100 beyond")
    add(options, "--tasks", list(TASKS), choices=TASKS, metavar="TASK")
    return read(options)


if __name__ == "__main__":
    began = time.perf_counter()
    main()
    print(f"{time.perf_counter() - began:.0f} s")
