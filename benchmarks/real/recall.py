"""How often does a passage model answer planted questions right, by kind and length of the memory?

The documents and questions are those of `benchmarks/real/planted`: books in which one or two
sentences in every hundred words are planted, each asked for once. The pass key is in a passage of
its own that is attached next to a document; facts that need context (two sentences, a heading, a
table) and facts in other languages are in documents of their own. Everyday questions and questions
about context are asked as typed, without a primed answer, and the answer has to occur in the first
24 tokens. The other questions are primed: the words that begin the answer are given, and the answer
is right if greedy decoding continues with it (found by teacher forcing). Where nothing answers, it
is right to say nothing.

Methods: memory (memory@K: its best K blocks); bm25@K, minilm@K and rrf@K (both, fused by reciprocal
rank), the best K blocks as text in the prompt; full (everything, up to --full-up-to tokens), none.
Ceilings: memory-right (the right blocks out of the memory), memory-text (the blocks that the memory
chose, as text), right (the blocks of the fact as text).

Baselines at their best: a run over validation texts with several K and --tune FILE chooses for each
baseline its K and the best score below which it says nothing, by right answers less false ones: the
share of a kind's questions that are answered rightly, minus the share of unanswerable questions
that are answered, averaged over kinds and lengths. "bm25", "minilm" and "rrf" use K and threshold
of --tuned (the published ones by default). "bm25~" and the like read as many blocks as the memory
would by its own rule.

The refusals are also counted by scores alone: how many unanswerable questions reach the score that
95% of the answerable ones of their kind reach.

With --work, where every answer is stored, an interrupted run continues; --out stores the counts.
Intervals are Wilson's, 95%; those of differences on the same questions Bonett and Price's.

    python -m benchmarks.real.recall --text books-test.jsonl.zst --model smollm2/ --work real/
"""

import argparse
import time
from pathlib import Path

from benchmarks.common.options import add
from benchmarks.common.results import write
from benchmarks.common.tables import tokens_number
from benchmarks.real.plan import Plan
from benchmarks.real.planted import CORPORA, TASKS, load
from benchmarks.real.recall_tables import (
    answers,
    counts,
    differences,
    finds,
    gate,
    refusals,
    worths,
)
from benchmarks.real.running import parser, run
from benchmarks.real.tuning import save, tune
from memstore.training.corpus import read_documents


def main() -> None:
    options = read_options()

    def planned() -> Plan:
        return load(options.planted, list(read_documents(options.text)), options.lengths)

    rows = run("recall", options, planned, options.planted)
    for length in options.lengths:
        print("\n" + answers(rows, length, options.methods))
        if "memory" in options.methods:
            print("\n" + differences(rows, length, options.methods))
    print("\n" + worths(rows, options.methods))
    for by in ("near", "rank"):
        print("\n" + finds(rows, by))
    print("\n" + refusals(rows))
    if "memory" in options.methods:
        print("\n" + gate(rows))
    if options.tune is not None:
        found = tune(rows)
        for name, one in found.items():
            print(f"{name}: the best {one.k}, from {one.threshold} on, worth {one.worth:.3f}")
        save(options.tune, found)
    write(options, {"answers": counts(rows)})


def read_options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--text", nargs="+", required=True, help="books: .jsonl.zst or .txt")
    add(options, "--lengths", ["8K", "32K"], "tokens of memory")
    add(options, "--planted", CORPORA[0], "the corpus whose questions are asked", choices=CORPORA)
    add(options, "--tasks", list(TASKS), choices=TASKS, metavar="TASK")
    add(options, "--tune", None, "write the best K and threshold of each baseline here", type=Path)
    given = options.parse_args()
    given.lengths = sorted(tokens_number(text) for text in given.lengths)
    return given


if __name__ == "__main__":
    began = time.perf_counter()
    main()
    print(f"{time.perf_counter() - began:.0f} s")
