"""The paper's figure 5: how many different blocks the tokens of one chunk read, by what a choice of
blocks is shared over. Few are few to fetch.

The chunk is the last of a text of the paper's 2,048 tokens (in our blocks: see table1.py), four
blocks are retrieved, and all before are kept. Counted by head (the mean over heads and layers) and
by layer (by whichever of its heads), as a share of the blocks that could be read.

    python -m benchmarks.paper.figure5 --runs runs/ --books books-train-*.jsonl.zst \\
        --test books-test.jsonl.zst --out figure5.json
"""

from collections import Counter, defaultdict
from functools import partial
from typing import Any

import numpy as np

from benchmarks.common.intervals import mean_interval
from benchmarks.common.reading import TARGETS, segments
from benchmarks.common.results import write
from benchmarks.common.starting import start
from benchmarks.common.tables import table
from benchmarks.paper.measures import Bench, Measured
from benchmarks.paper.published import blocks
from benchmarks.paper.runs import parser
from memstore import MemoryStore
from memstore.model.landmark.landmark_model import LandmarkModel
from memstore.model.landmark.transformer import PRESETS
from memstore.model.lookup_settings import GRANULARITIES
from memstore.model.session import StepReads

LENGTH, LOCAL, TOP_K = 2048, 250, 4
Found = dict[str, dict[str, list[float]]]


class Distinct:
    """Counts different blocks by layer and head, and by layer: an OnRead, of all rows."""

    def __init__(self) -> None:
        self._heads: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
        self.times: Counter[tuple[int, int]] = Counter()  # a block (document, block) was read

    def __call__(self, reads: StepReads) -> None:
        for unit in reads.units:
            block = (unit.document, unit.block)
            self._heads[unit.layer, unit.head].add(block)
            self.times[block] += 1

    @property
    def by_head(self) -> dict[tuple[int, int], int]:
        """Different blocks of every layer and head that read any."""
        return {key: len(read) for key, read in sorted(self._heads.items())}

    @property
    def by_layer(self) -> dict[int, int]:
        """Different blocks of every layer, by whichever of its heads."""
        layers: dict[int, set[tuple[int, int]]] = defaultdict(set)
        for (layer, _), read in self._heads.items():
            layers[layer] |= read
        return {layer: len(read) for layer, read in sorted(layers.items())}


def distinct_blocks(model: LandmarkModel, text: np.ndarray, chunk: int, **lookup: Any) -> Distinct:
    """What the last `chunk` tokens of a text read of the blocks before them, in one session that
    retrieves from its own text; lookup: LookupSettings that shall differ.
    """
    counted = Distinct()
    with (
        MemoryStore.in_memory(model.signature) as store,
        model.session(store, [], read_all_rows=True, **lookup) as session,
    ):
        session.feed(text[:-chunk].tolist())
        session.end_chunk()
        session.attention.on_read = counted
        session.feed(text[-chunk:].tolist())
    return counted


def measure(bench: Bench) -> Found:
    """By granularity: different blocks by head and by layer, one number a text and seed."""
    bench.train([bench.run()])
    found: Found = {name: {"by_head": [], "by_layer": []} for name in GRANULARITIES}
    size = PRESETS[bench.options.preset].block_size
    length, chunk, count = blocks(LENGTH) * size, blocks(LOCAL) * size, bench.options.texts
    for run in bench.of_seeds(bench.run()):
        measured = bench.measured(run)
        for granularity in GRANULARITIES:
            settings = {"granularity": granularity, "length": length, "chunk": chunk}
            settings |= {"top_k": TOP_K, "texts": count, "seed": bench.options.seed}
            counted = measured.kept(
                "distinct", settings, partial(count_blocks, measured, **settings)
            )
            for name, values in counted.items():
                found[granularity][name] += values
    return found


def count_blocks(
    measured: Measured, length: int, chunk: int, texts: int, seed: int, **lookup: Any
) -> dict[str, list[float]]:
    """Of every text, the mean over heads and layers and that over layers."""
    model = measured.model
    assert isinstance(model, LandmarkModel)
    counted: dict[str, list[float]] = {"by_head": [], "by_layer": []}
    for segment in segments(measured.books, texts, length - TARGETS, seed):
        text = np.concatenate([segment.before, segment.targets])
        read = distinct_blocks(
            model, text, chunk, chunk_blocks=chunk // model.shape.block_size, **lookup
        )
        searched = model.shape.memory_layers
        heads = [n for (layer, _), n in read.by_head.items() if layer in searched]
        layers = [n for layer, n in read.by_layer.items() if layer in searched]
        # heads whose gate stayed shut have read none
        counted["by_head"].append(sum(heads) / (len(searched) * model.shape.num_heads))
        counted["by_layer"].append(sum(layers) / len(searched))
    return counted


def report(found: Found, choice: int) -> str:
    """The table: a row a granularity."""
    lines = []
    for granularity, counted in found.items():
        line = [granularity]
        for values in counted.values():
            mean, low, high = mean_interval(values)
            line.append(f"{mean:.1f} ({low:.1f}-{high:.1f})")
            line.append(f"{mean / choice:.0%}")
        lines.append(line)
    head = ["granularity", "blocks, by head", f"of {choice}", "by layer", f"of {choice}"]
    return table(head, lines)


def main() -> None:
    options = parser(__doc__).parse_args()
    found = measure(Bench(options))
    choice = blocks(LENGTH) - blocks(LOCAL)
    print("\n" + report(found, choice))
    write(options, {"found": found, "choice": choice})


if __name__ == "__main__":
    start(main)
