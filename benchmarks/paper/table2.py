"""The paper's table 2: perplexity by what a choice of blocks is shared over: none (every token and
head chooses for itself), a token's heads, or a head's tokens of a chunk.

One model, whose lookups are made in each way; everything else as in table1.py. A choice that the
tokens of a chunk share is made with all of them in view, the later ones included, as the paper's.

    python -m benchmarks.paper.table2 --runs runs/ --books books-train-*.jsonl.zst \\
        --test books-test.jsonl.zst
"""

from benchmarks.common.results import write
from benchmarks.common.starting import start
from benchmarks.common.tables import table
from benchmarks.paper.measures import Bench, Losses, to
from benchmarks.paper.published import TABLE_2, blocks, kept
from benchmarks.paper.runs import parser
from benchmarks.paper.scoring import Way
from memstore.model.landmark.transformer import PRESETS

KEPT = {2048: 40, 4096: 80}  # blocks, by length: all of them, and so in the paper
LOCAL = 250
FIRST = "per_token_per_head"
Found = dict[tuple[str, int, int], Losses]


def measure(bench: Bench) -> Found:
    """By granularity, the paper's length, and blocks retrieved."""
    bench.train([bench.run()])
    size = PRESETS[bench.options.preset].block_size
    longest = blocks(max(KEPT)) * size
    return {
        (granularity, length, k): bench.losses(
            bench.run(),
            Way(blocks(LOCAL) * size, k, kept(KEPT[length]), granularity),
            longest,
            blocks(length) * size,
        )
        for granularity, points in TABLE_2.items()
        for length, k in points
    }


def report(found: Found, block_size: int) -> str:
    """The table: a row a granularity."""
    points = list(TABLE_2[FIRST])
    head = ["granularity"]
    for length, k in points:
        ours = blocks(length) * block_size
        head += [f"{length}/{k}, theirs", "to the first", f"{ours}/{k}, ours", "to the first"]
    lines = []
    for granularity, theirs in TABLE_2.items():
        line = [granularity]
        for point in points:
            here, first = found[granularity, *point], found[FIRST, *point]
            line += [f"{theirs[point]:.2f}", f"{theirs[point] / TABLE_2[FIRST][point]:.3f}"]
            line += [f"{here.perplexity:.2f}", to(here, first)]
        lines.append(line)
    return table(head, lines)


def main() -> None:
    options = parser(__doc__).parse_args()
    found = measure(Bench(options))
    print("\n" + report(found, PRESETS[options.preset].block_size))
    write(
        options,
        {"points": [{"point": list(point), **here.plain()} for point, here in found.items()]},
    )


if __name__ == "__main__":
    start(main)
