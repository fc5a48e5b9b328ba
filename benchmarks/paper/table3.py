"""The paper's table 3: perplexity and the share of lookups that are dropped, by the cutoff of the
gate; beside a model that is trained without the context miss token.

Everything else as in table1.py, length 2048 and four blocks retrieved in the paper's terms.

    python -m benchmarks.paper.table3 --runs runs/ --books books-train-*.jsonl.zst \\
        --test books-test.jsonl.zst
"""

from benchmarks.common.results import write
from benchmarks.common.starting import start
from benchmarks.common.tables import table
from benchmarks.paper.measures import Bench, Losses, to
from benchmarks.paper.published import TABLE_3, blocks, kept
from benchmarks.paper.runs import parser
from benchmarks.paper.scoring import Way
from memstore.model.landmark.transformer import PRESETS

LENGTH, LOCAL, KEPT, TOP_K = 2048, 250, 40, 4
Found = dict[float | None, Losses]


def measure(bench: Bench) -> Found:
    """By cutoff; None: without the context miss token."""
    without, gated = bench.run(cmt=False), bench.run()
    bench.train([without, gated])
    size = PRESETS[bench.options.preset].block_size
    length = blocks(LENGTH) * size
    found = {}
    for cutoff in TABLE_3:
        way = Way(blocks(LOCAL) * size, TOP_K, kept(KEPT), cmt_cutoff=cutoff)
        found[cutoff] = bench.losses(without if cutoff is None else gated, way, length, length)
    return found


def report(found: Found) -> str:
    """The table: a row a cutoff."""
    head = ["cutoff", "PG-19, theirs", "to cutoff 0", "dropped, theirs"]
    head += ["books", "to cutoff 0", "dropped"]
    lines = []
    for cutoff, (perplexity, dropped) in TABLE_3.items():
        line = ["no token" if cutoff is None else f"{cutoff:g}", f"{perplexity:.2f}"]
        line += [f"{perplexity / TABLE_3[0.0][0]:.3f}", "" if dropped is None else f"{dropped:.0%}"]
        here = found[cutoff]
        line += [f"{here.perplexity:.2f}", to(here, found[0.0])]
        lines.append([*line, "" if cutoff is None else f"{here.skipped:.0%}"])
    return table(head, lines)


def main() -> None:
    options = parser(__doc__).parse_args()
    found = measure(Bench(options))
    print("\n" + report(found))
    write(
        options, {"cutoffs": [{"cutoff": cutoff, **here.plain()} for cutoff, here in found.items()]}
    )


if __name__ == "__main__":
    start(main)
