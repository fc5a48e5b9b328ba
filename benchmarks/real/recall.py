"""How often is a real model's answer right, by what is asked and how much was read?

A document of --lengths tokens of books carries facts of all kinds, one or two in every hundred
words, whose words, forms and relations no selector was trained with; each is asked for once. The
pass key stands in a passage of its own that is attached beside a document; facts that need context
(two sentences, a heading, a table) and those in other languages stand in documents of their own.
Everyday questions and those about context are typed as they are, nothing is primed, and the answer
has to occur in the first 24 tokens. Of the others an answer is right if greedy decoding begins with
it (found by teacher forcing), after the words that begin the answer. Where nothing answers, it is
right to say nothing.

Methods: memory (memory@K: its best K blocks); bm25@K, minilm@K and rrf@K (both, fused by reciprocal
rank), the best K blocks as text in the prompt; full (everything there, up to --full-up-to tokens),
none. Ceilings: memory-right (the right blocks out of the memory), memory-text (the blocks that it
chose, as text), right (the blocks of the fact as text).

Baselines at their best: a run over validation texts with many K and --tune FILE chooses K of each
and the best score below which it says nothing, by right answers less false ones: the share of a
kind's questions that are answered rightly, minus the share of questions that nothing answers which
are answered all the same, the mean over kinds and lengths. With --tuned FILE, "bm25", "minilm" and
"rrf" do so. "bm25~" and its like read as many as the memory would by its own rule.

Beside it the refusals by scores alone: how many questions that nothing answers reach what 95% of
the answerable ones of their kind reach.

A run goes on where it was killed, with --work, where every answer is kept; --out has their numbers.
Intervals are Wilson's, 95%; those of differences on the same questions Bonett and Price's.

    python -m benchmarks.real.recall --text books-test.jsonl.zst --model smollm2/ --work real/
"""

import argparse
import time
from pathlib import Path

from benchmarks.common.options import add
from benchmarks.common.results import write
from benchmarks.real.plan import Plan
from benchmarks.real.prompting import counting
from benchmarks.real.questions import TASKS, build
from benchmarks.real.recall_tables import (
    answers,
    counts,
    differences,
    finds,
    gate,
    refusals,
    worths,
)
from benchmarks.real.running import parser, read, run
from benchmarks.real.tuning import save, tune
from memstore.training.corpus import read_documents


def main() -> None:
    options = read_options()
    trials = {n: options.trials or (50 if n <= 8192 else 100) for n in options.lengths}

    def planned() -> Plan:
        texts = list(read_documents(options.text))
        return build(counting(options.model), texts, options.lengths, trials, options.seed)

    rows = run("recall", options, planned, plans=[*TASKS, *sorted(trials.items())])
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
    options = parser(__doc__, lengths=["2K", "8K", "32K", "128K"])
    add(options, "--trials", 0, "questions a task; 0: 50 up to 8K tokens, 100 beyond")
    add(options, "--tasks", list(TASKS), choices=TASKS, metavar="TASK")
    add(options, "--tune", None, "write there what is best of the baselines' @K asked", type=Path)
    return read(options)


if __name__ == "__main__":
    began = time.perf_counter()
    main()
    print(f"{time.perf_counter() - began:.0f} s")
