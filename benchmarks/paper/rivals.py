"""How do the memories compare on one decoder, at equal parameters, texts and steps of training?

train       the runs (runs.py): every memory of --memories with every seed of --seeds, the seeds one
            after the other. A run that is finished is not trained again, one that was interrupted
            goes on, and two processes share a list without waiting for each other.

    python -m benchmarks.paper.rivals --runs runs/ --books books-train-*.jsonl.zst
"""

import argparse

from benchmarks.common.options import add
from benchmarks.paper.runs import MAIN, Run, parser, runs_of, start, trained_table
from memstore.rivals.config import MEMORIES

PARTS = ("train",)


def read_options() -> argparse.Namespace:
    options = parser(__doc__, seeds=(0, 1, 2))
    add(options, "--memories", list(MAIN), "full: the ceiling", choices=["landmark", *MEMORIES])
    add(options, "--parts", list(PARTS), choices=PARTS)
    return options.parse_args()


def wanted(options: argparse.Namespace) -> list[Run]:
    """The runs that are compared, those of one seed together."""
    return [
        Run(memory, preset=options.preset, seed=seed, steps=options.steps)
        for seed in options.seeds
        for memory in options.memories
    ]


def main() -> None:
    options = read_options()
    runs, compared = runs_of(options), wanted(options)
    if "train" in options.parts:
        try:
            runs.trained(compared)
        finally:
            print("\n" + trained_table(runs, compared))


if __name__ == "__main__":
    start(main)
