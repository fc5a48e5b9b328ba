"""The paper's table 1: perplexity by length of the text that is read, by what is read at once, by
blocks kept and by blocks retrieved; beside a model without memory and Transformer-XL.

Every row scores all tokens of the same spans of text. A span is cut into texts of the row's length,
and nothing is seen of the text before. Lengths are scaled: eight of our blocks stand for ten of the
paper's (512 tokens), which is what the models were trained with. Ratios are to the first row, with
95% intervals over spans.

    python -m benchmarks.paper.table1 --runs runs/ --books books-train-*.jsonl.zst \\
        --test books-test.jsonl.zst --math math-train.jsonl.zst --test-math math-val.jsonl.zst
"""

from benchmarks.common.results import write
from benchmarks.common.starting import start
from benchmarks.common.tables import table
from benchmarks.paper.measures import Bench, Losses, to
from benchmarks.paper.published import TABLE_1, Row, blocks, kept
from benchmarks.paper.runs import parser
from benchmarks.paper.scoring import Way
from memstore.model.landmark.transformer import PRESETS

Found = list[dict[str, Losses]]
PAPER = {"books": ("PG-19", "pg19"), "math": ("arXiv", "arxiv")}  # its text, and a Row's field


def way(row: Row, block_size: int) -> Way:
    """How our model reads for a row."""
    chunk = blocks(row.local) * block_size
    if row.memory == "landmark":
        assert row.kept is not None
        return Way(chunk, row.top_k, kept(row.kept))
    return Way(chunk, cache=chunk if row.cache else None)


def measure(bench: Bench, texts: list[str]) -> Found:
    """Of every row, what was found by text."""
    bench.train(
        bench.run(memory, text=text)
        for text in texts
        for memory in ("landmark", "transformer-xl", "none")
    )
    size = PRESETS[bench.options.preset].block_size
    longest = blocks(max(row.length for row in TABLE_1)) * size
    return [
        {
            text: bench.losses(
                bench.run(row.memory, text=text), way(row, size), longest, blocks(row.length) * size
            )
            for text in texts
        }
        for row in TABLE_1
    ]


def report(found: Found, texts: list[str], block_size: int) -> str:
    """The table, a row a row of the paper's."""
    head = ["length (paper's)", "local", "XL cache", "blocks kept", "k"]
    for text in texts:
        head += [f"{PAPER[text][0]}, theirs", "to the first", text, "to the first"]
    head += ["tokens attended to", "state, KB"]
    lines = []
    for row, here in zip(TABLE_1, found):
        reads = way(row, block_size)
        line = [f"{blocks(row.length) * block_size} ({row.length})", f"{reads.chunk} ({row.local})"]
        line.append(f"{reads.cache} ({row.cache})" if row.cache else "")
        line.append(f"{reads.own_blocks} ({row.kept})" if row.kept else "")
        line.append(str(row.top_k or ""))
        for text in texts:
            value, first = (getattr(of, PAPER[text][1]) for of in (row, TABLE_1[0]))
            line += [f"{value:.2f}", f"{value / first:.3f}"] if value is not None else ["", ""]
            line += [f"{here[text].perplexity:.2f}", to(here[text], found[0][text])]
        cost = here[texts[0]]
        lines.append([*line, f"{cost.attended:.0f}", f"{cost.state / 1024:,.0f}"])
    return table(head, lines)


def main() -> None:
    options = parser(__doc__).parse_args()
    given = {"books": options.test, "math": options.test_math}
    texts = [name for name, files in given.items() if files] or ["books"]
    found = measure(Bench(options), texts)
    print("\n" + report(found, texts, PRESETS[options.preset].block_size))
    write(options, {"rows": [{of: losses.plain() for of, losses in row.items()} for row in found]})


if __name__ == "__main__":
    start(main)
