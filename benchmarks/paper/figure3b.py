"""The paper's figure 3b: how often a pass key is found in a text, by the length of the prompt; with
landmarks, and without any memory.

The paper's protocol: its whole prompt (the pass key's sentence at a random place of book text, the
question at the end) through one session that retrieves from its own blocks. Right is the whole
number and then its end. Intervals are Wilson's, 95%.

    python -m benchmarks.paper.figure3b --runs runs/ --books books-train-*.jsonl.zst \\
        --test books-test.jsonl.zst --out figure3b.json
"""

from functools import partial
from typing import Any

from benchmarks.common.needle_memory import streamed
from benchmarks.common.options import add
from benchmarks.common.results import write
from benchmarks.common.starting import start
from benchmarks.common.tables import rate, table, tokens_number, tokens_text
from benchmarks.paper.measures import Bench, Measured
from benchmarks.paper.published import FIGURE_3B
from benchmarks.paper.runs import parser

MEMORIES = ("landmark", "none")
Found = dict[str, dict[int, tuple[int, int]]]


def measure(bench: Bench, lengths: list[int]) -> Found:
    """By memory and length: right answers and trials of all seeds."""
    bench.train(bench.run(memory) for memory in MEMORIES)
    found: Found = {memory: {} for memory in MEMORIES}
    settings = {"trials": bench.options.trials, "seed": bench.options.seed}
    for memory in MEMORIES:
        for length in lengths:
            rows = []
            for run in bench.of_seeds(bench.run(memory)):
                compute = partial(ask, bench.measured(run), length, **settings)
                about = settings | {"length": length}
                rows.append(bench.measured(run).kept("streamed", about, compute))
            right, trials = (sum(row[name] for row in rows) for name in ("right", "trials"))
            found[memory][length] = right, trials
            print(f"  {memory} {tokens_text(length)}: {rate(right, trials)}", flush=True)
    return found


def ask(measured: Measured, length: int, trials: int, seed: int) -> dict[str, Any]:
    """The answers of a model."""
    return streamed(measured.model, measured.books, length, trials=trials, seed=seed)


def report(found: Found, lengths: list[int]) -> str:
    """The table: a row a length."""
    lines = [
        [
            tokens_text(length),
            *(rate(*by_length[length]) for by_length in found.values()),
            f"{FIGURE_3B[length]:.2f}" if length in FIGURE_3B else "",
        ]
        for length in lengths
    ]
    return table(["prompt", *found, "theirs (LLaMA 7B)"], lines)


def main() -> None:
    arguments = parser(__doc__)
    add(arguments, "--lengths", ["256", "512", "1K", "2K", "4K", "8K", "16K", "32K"])
    add(arguments, "--trials", 40)
    options = arguments.parse_args()
    options.lengths = sorted(tokens_number(length) for length in options.lengths)
    found = measure(Bench(options), options.lengths)
    print("\n" + report(found, options.lengths))
    write(options, {"right_of": found})


if __name__ == "__main__":
    start(main)
