"""The paper's figure 6: perplexity at true positions, without retrieval, beyond the length of
training; trained with positions that jump by up to 100 after a block (its appendix E), and without.

Text and targets are one chunk that sees all of itself. The same 256 targets are scored after more
and more text. Windows of training have 264 and 396 positions, so what lies beyond was never seen
without jumps.

    python -m benchmarks.paper.figure6 --runs runs/ --books books-train-*.jsonl.zst \\
        --test books-test.jsonl.zst --out figure6.json
"""

import math

import numpy as np

from benchmarks.common.intervals import mean_interval
from benchmarks.common.options import add
from benchmarks.common.reading import TARGETS, score_whole, segments
from benchmarks.common.results import write
from benchmarks.common.starting import start
from benchmarks.common.tables import table
from benchmarks.paper.measures import Bench, Measured
from benchmarks.paper.runs import parser
from memstore.model.landmark.landmark_model import LandmarkModel

JUMPS = 100
Found = dict[str, dict[int, np.ndarray]]


def measure(bench: Bench, lengths: list[int]) -> Found:
    """With and without jumps, by tokens in all: the loss of each text, the mean over seeds."""
    compared = {"without jumps": bench.run(), "with jumps": bench.run(jumps=JUMPS)}
    bench.train(compared.values())
    return {
        name: {
            length: np.mean(
                [losses(bench.measured(one), bench, length, max(lengths)) for one in runs], 0
            )
            for length in lengths
        }
        for name, run in compared.items()
        for runs in [bench.of_seeds(run)]
    }


def losses(measured: Measured, bench: Bench, length: int, longest: int) -> list[float]:
    """Of every text."""
    count, seed = bench.options.texts, bench.options.seed

    def compute() -> list[float]:
        model, found = measured.model, []
        assert isinstance(model, LandmarkModel)
        for segment in segments(measured.books, count, longest - TARGETS, seed):
            before = segment.before[longest - length :]
            whole = score_whole(model, before, segment.targets)
            assert whole is not None
            found.append(-float(whole.mean()))
        return found

    settings = {"length": length, "longest": longest, "texts": count, "seed": seed}
    found: list[float] = measured.kept("whole", settings, compute)
    return found


def report(found: Found, lengths: list[int]) -> str:
    """The table: a row a length."""
    lines = []
    for length in lengths:
        line = [str(length)]
        line += [f"{math.exp(by_length[length].mean()):.2f}" for by_length in found.values()]
        without, jumping = (by_length[length] for by_length in found.values())
        middle, low, high = (math.exp(x) for x in mean_interval(jumping - without))
        lines.append([*line, f"{middle:.3f} ({low:.3f}-{high:.3f})"])
    return table(["tokens", *found, "with / without"], lines)


def main() -> None:
    arguments = parser(__doc__)
    add(arguments, "--lengths", [256, 384, 512, 768, 1024, 1536, 2048], "tokens in all")
    options = arguments.parse_args()
    found = measure(Bench(options), options.lengths)
    print("\n" + report(found, options.lengths))
    write(
        options,
        {
            "losses": {
                name: {str(length): values.tolist() for length, values in by_length.items()}
                for name, by_length in found.items()
            }
        },
    )


if __name__ == "__main__":
    start(main)
