"""The figures of arXiv 2305.16300 (landmark attention), as tables of our models.

3b  How often a pass key is found in a text, by the length of the prompt; with landmarks, and
    without any memory. The paper's protocol: its whole prompt (the pass key's sentence at a random
    place of book text, the question at the end) through one session that retrieves from its own
    blocks. Right is the whole number and then its end. Intervals are Wilson's, 95%.
5   How many different blocks a head reads for the tokens of one chunk (the mean over heads and
    layers), by what a choice of blocks is shared over. Few are few to fetch. The chunk is the last
    of a text of the paper's 2,048 tokens (in our blocks: see tables.py), four blocks are retrieved,
    and all before are kept.

    python -m benchmarks.paper.figures --runs runs/ --books books-train-*.jsonl.zst \\
        --test books-test.jsonl.zst
"""

from functools import partial
from typing import Any

import numpy as np

from benchmarks.common.intervals import mean_interval
from benchmarks.common.needle_memory import streamed
from benchmarks.common.options import add
from benchmarks.common.reading import TARGETS, segments
from benchmarks.common.results import write
from benchmarks.common.tables import rate, table, tokens_number, tokens_text, with_interval
from benchmarks.paper.measures import Bench, Measured
from benchmarks.paper.runs import parser
from benchmarks.paper.tables import LOCAL, blocks
from memstore import LandmarkModel, MemoryStore
from memstore.model.landmark.transformer import PRESETS
from memstore.model.lookup_settings import GRANULARITIES
from memstore.model.session import StepReads

MEMORIES = ("landmark", "none")
LENGTH, TOP_K = 2048, 4


def figure_3b(bench: Bench) -> dict[str, dict[int, tuple[int, int]]]:
    """By memory and length: right answers and trials of all seeds."""
    bench.train(bench.run(memory) for memory in MEMORIES)
    found: dict[str, dict[int, tuple[int, int]]] = {memory: {} for memory in MEMORIES}
    settings = {"trials": bench.options.trials, "seed": bench.options.seed}
    for memory in MEMORIES:
        for length in bench.options.lengths:
            rows = []
            for run in bench.of_seeds(bench.run(memory)):
                compute = partial(pass_keys, bench.measured(run), length, **settings)
                about = settings | {"length": length}
                rows.append(bench.measured(run).kept("streamed", about, compute))
            right, trials = (sum(row[name] for row in rows) for name in ("right", "trials"))
            found[memory][length] = right, trials
            print(f"  {memory} {tokens_text(length)}: {rate(right, trials)}", flush=True)
    lines = [
        [tokens_text(length), *(rate(*by_length[length]) for by_length in found.values())]
        for length in bench.options.lengths
    ]
    print("\n" + table(["prompt (the paper's LLaMA 7B: 0.98 at 32K)", *found], lines))
    return found


def pass_keys(measured: Measured, length: int, trials: int, seed: int) -> dict[str, Any]:
    """The answers of a model."""
    return streamed(measured.model, measured.books, length, trials=trials, seed=seed)


def figure_5(bench: Bench) -> dict[str, list[float]]:
    """By granularity: different blocks that a head reads, one number a text and seed."""
    bench.train([bench.run()])
    found: dict[str, list[float]] = {name: [] for name in GRANULARITIES}
    size = PRESETS[bench.options.preset].block_size
    about = {"length": blocks(LENGTH) * size, "chunk": blocks(LOCAL) * size}
    about |= {"texts": bench.options.texts, "seed": bench.options.seed, "top_k": TOP_K}
    for run in bench.of_seeds(bench.run()):
        measured = bench.measured(run)
        for granularity in GRANULARITIES:
            settings = about | {"granularity": granularity}
            compute = partial(count_blocks, measured, **settings)
            found[granularity] += measured.kept("distinct", settings, compute)
    choice, lines = blocks(LENGTH) - blocks(LOCAL), []
    for granularity, values in found.items():
        found_mean = mean_interval(values)
        share = f"{found_mean[0] / choice:.0%}"
        lines.append([granularity, with_interval(found_mean, 1), share])
    print("\n" + table(["granularity", "blocks, by head", f"of {choice}"], lines))
    return found


def count_blocks(
    measured: Measured, length: int, chunk: int, texts: int, seed: int, **lookup: Any
) -> list[float]:
    """Different blocks that a head reads, the mean over heads and layers, of every text."""
    model, counted = measured.model, []
    assert isinstance(model, LandmarkModel)
    lookup |= {"chunk_blocks": chunk // model.shape.block_size}
    searched = model.shape.memory_layers
    for segment in segments(measured.books, texts, length - TARGETS, seed):
        text = np.concatenate([segment.before, segment.targets])
        read = distinct_blocks(model, text, chunk, **lookup)
        heads = [len(some) for (layer, _), some in read.items() if layer in searched]
        # heads whose gate stayed shut have read none
        counted.append(sum(heads) / (len(searched) * model.shape.num_heads))
    return counted


def distinct_blocks(
    model: LandmarkModel, text: np.ndarray, chunk: int, **lookup: Any
) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """By layer and head, the blocks (document, block) before the last `chunk` tokens of a text that
    these tokens read, in one session that retrieves from its own text; lookup: LookupSettings that
    differ.
    """
    found: dict[tuple[int, int], set[tuple[int, int]]] = {}

    def count(reads: StepReads) -> None:
        for unit in reads.units:
            found.setdefault((unit.layer, unit.head), set()).add((unit.document, unit.block))

    with (
        MemoryStore.in_memory(model.signature) as store,
        model.session(store, [], read_all_rows=True, **lookup) as session,
    ):
        session.feed(text[:-chunk].tolist())
        session.end_chunk()
        session.attention.on_read = count
        session.feed(text[-chunk:].tolist())
    return found


FIGURES = {"3b": figure_3b, "5": figure_5}


def main() -> None:
    arguments = parser(__doc__)
    add(arguments, "--figures", list(FIGURES), choices=FIGURES)
    lengths = ["256", "512", "1K", "2K", "4K", "8K", "16K", "32K"]
    add(arguments, "--lengths", lengths, "of prompts")
    add(arguments, "--trials", 40, "of pass keys")
    options = arguments.parse_args()
    options.lengths = sorted(tokens_number(length) for length in options.lengths)
    bench = Bench(options)
    write(options, {f"figure {name}": FIGURES[name](bench) for name in options.figures})


if __name__ == "__main__":
    main()
