"""The tables of arXiv 2305.16300 (landmark attention), with our models and texts.

1  Perplexity by length of the text that is read, by what is read at once, by blocks kept and by
   blocks retrieved; compared with a model without memory and Transformer-XL.
2  By what a choice of blocks is shared over: none (every token and head chooses for itself), a
   token's heads, or a head's tokens of a chunk, the later ones included.
3  Perplexity and the share of lookups that are dropped, by the cutoff of the gate; compared with a
   model that is trained without the context miss token.

Every row scores all tokens of the same spans of text. A span is cut into texts of the row's length,
and nothing is seen of the text before. Lengths are scaled: eight of our blocks stand for ten of the
paper's (512 tokens), which is what the models were trained with. Ratios are to the first row, with
95% intervals over spans. The paper's models have 12 layers, hidden size 1024, context 512, blocks
of 50, and 240 thousand steps on PG-19 and arXiv mathematics.

    python -m benchmarks.paper.tables --runs runs/ --books books-train-*.jsonl.zst \\
        --test books-test.jsonl.zst --math math-train.jsonl.zst --test-math math-val.jsonl.zst
"""

import math
from typing import Any, NamedTuple

from benchmarks.common.options import add
from benchmarks.common.results import write
from benchmarks.common.tables import table
from benchmarks.paper.measures import Bench, Losses, to
from benchmarks.paper.runs import parser
from benchmarks.paper.scoring import Way
from memstore.model.landmark.transformer import PRESETS


class Row(NamedTuple):
    """A row of table 1.

    In tokens: length of the text, local (read at once), cache. Then blocks kept and retrieved, and
    perplexities.
    """

    length: int
    local: int
    cache: int | None
    kept: int | None
    top_k: int | None
    books: float
    math: float | None

    @property
    def memory(self) -> str:
        """The memory of the model."""
        return "landmark" if self.kept else "transformer-xl" if self.cache else "none"

    def way(self, size: int) -> Way:
        """How our model, of blocks of this size, reads for the row."""
        chunk = blocks(self.local) * size
        if self.kept:
            return Way(chunk, self.top_k, kept(self.kept))
        return Way(chunk, cache=chunk if self.cache else None)


TABLE_1 = (
    Row(512, 512, None, None, None, 16.32, 4.01),
    Row(512, 250, None, 10, 2, 16.24, 4.01),
    Row(2048, 256, 256, None, None, 14.72, None),
    Row(2048, 250, None, 40, 2, 15.14, 3.43),
    Row(2048, 250, None, 40, 4, 14.92, 3.35),
    Row(4096, 256, 256, None, None, 14.55, None),
    Row(4096, 250, None, 40, 4, 14.79, 3.19),
    Row(4096, 250, None, 80, 4, 14.72, 3.18),
)
# PG-19, by granularity and (length, blocks retrieved); all blocks are kept
TABLE_2 = {
    "per_token_per_head": {(2048, 2): 15.14, (2048, 4): 14.92, (4096, 4): 14.72},
    "per_head": {(2048, 2): 15.48, (2048, 4): 15.10, (4096, 4): 14.95},
    "per_token": {(2048, 2): 15.44, (2048, 4): 15.04, (4096, 4): 14.89},
}
KEPT = {2048: 40, 4096: 80}
# PG-19, length 2048, 4 blocks retrieved: by cutoff (None = trained without the context miss token),
# perplexity and the share of lookups dropped
TABLE_3 = {
    0.0: (16.38, 0.0),
    None: (16.28, None),
    0.1: (16.38, 0.23),
    0.3: (16.43, 0.57),
    0.5: (16.86, 0.84),
    1.0: (19.49, 1.0),
}
LOCAL = 250


def blocks(tokens: int) -> int:
    """The paper's tokens in our blocks: eight for 512, which is what both were trained with."""
    return math.ceil(tokens / 64)


def kept(count: int) -> int:
    """The paper's blocks in our blocks: eight for ten."""
    return max(1, round(count * 0.8))


def table_1(bench: Bench, size: int) -> list[dict[str, Any]]:
    """A row a row of the paper's, by text."""
    given = {"books": bench.options.test, "math": bench.options.test_math}
    texts = [name for name, files in given.items() if files] or ["books"]
    memories = dict.fromkeys(row.memory for row in TABLE_1)
    bench.train(bench.run(memory, text=text) for text in texts for memory in memories)
    longest = blocks(max(row.length for row in TABLE_1)) * size
    head = ["length (paper's)", "local", "XL cache", "blocks kept", "k"]
    for text in texts:
        head += [f"{text}, theirs", "to the first", f"{text}, ours", "to the first"]
    lines, found = [], list[dict[str, Losses]]()
    for row in TABLE_1:
        reads = row.way(size)
        length = blocks(row.length) * size
        here = {
            text: bench.losses(bench.run(row.memory, text=text), reads, longest, length)
            for text in texts
        }
        found.append(here)
        line = [f"{length} ({row.length})", f"{reads.chunk} ({row.local})"]
        line.append(f"{reads.cache} ({row.cache})" if row.cache else "")
        line += [f"{reads.own_blocks} ({row.kept})" if row.kept else "", str(row.top_k or "")]
        for text in texts:
            line += theirs(getattr(row, text), getattr(TABLE_1[0], text))
            line += [f"{here[text].perplexity:.2f}", to(here[text], found[0][text])]
        cost = here[texts[0]]
        lines.append([*line, f"{cost.attended:.0f}", f"{cost.state / 1024:,.0f}"])
    print("\n" + table([*head, "tokens attended to", "state, KB"], lines))
    return [{text: losses.plain() for text, losses in here.items()} for here in found]


def table_2(bench: Bench, size: int) -> list[dict[str, Any]]:
    """A row a granularity; what was found by granularity, the paper's length, and k."""
    bench.train([bench.run()])
    longest = blocks(max(KEPT)) * size
    head, lines, found = ["granularity"], [], dict[tuple[str, int, int], Losses]()
    firsts = TABLE_2["per_token_per_head"]
    for length, k in firsts:
        point = f"{blocks(length) * size}/{k}"
        head += [f"{length}/{k}, theirs", "to the first", f"{point}, ours", "to the first"]
    for granularity, points in TABLE_2.items():
        line = [granularity]
        for (length, k), value in points.items():
            way = Way(blocks(LOCAL) * size, k, kept(KEPT[length]), granularity)
            here = bench.losses(bench.run(), way, longest, blocks(length) * size)
            found[granularity, length, k] = here
            first = found["per_token_per_head", length, k]
            line += theirs(value, firsts[length, k])
            line += [f"{here.perplexity:.2f}", to(here, first)]
        lines.append(line)
    print("\n" + table(head, lines))
    return [{"point": list(point), **here.plain()} for point, here in found.items()]


def table_3(bench: Bench, size: int) -> list[dict[str, Any]]:
    """A row a cutoff."""
    without, gated = bench.run(cmt=False), bench.run()
    bench.train([without, gated])
    length, lines, found = blocks(2048) * size, [], dict[float | None, Losses]()
    for cutoff, (value, dropped) in TABLE_3.items():
        way = Way(blocks(LOCAL) * size, 4, kept(KEPT[2048]), cmt_cutoff=cutoff)
        here = bench.losses(without if cutoff is None else gated, way, length, length)
        found[cutoff] = here
        line = ["no token" if cutoff is None else f"{cutoff:g}", *theirs(value, TABLE_3[0.0][0])]
        line += ["" if dropped is None else f"{dropped:.0%}", f"{here.perplexity:.2f}"]
        lines.append(
            [*line, to(here, found[0.0]), "" if dropped is None else f"{here.skipped:.0%}"]
        )
    head = ["cutoff", "PG-19, theirs", "to cutoff 0", "dropped, theirs"]
    print("\n" + table([*head, "books, ours", "to cutoff 0", "dropped"], lines))
    return [{"cutoff": cutoff, **here.plain()} for cutoff, here in found.items()]


def theirs(value: float | None, first: float) -> list[str]:
    """The paper's perplexity, and its ratio to that of the first row."""
    return ["", ""] if value is None else [f"{value:.2f}", f"{value / first:.3f}"]


TABLES = {1: table_1, 2: table_2, 3: table_3}


def main() -> None:
    arguments = parser(__doc__)
    add(arguments, "--tables", list(TABLES), choices=TABLES)
    options = arguments.parse_args()
    bench, size = Bench(options), PRESETS[options.preset].block_size
    write(options, {f"table {n}": TABLES[n](bench, size) for n in options.tables})


if __name__ == "__main__":
    main()
