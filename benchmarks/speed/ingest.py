"""How fast is text read into a new memory on disk, against the same chunks with nothing stored?

Both go through the same session, and both tokenise. Tokens a second, in turns; medians, and the
ratio is the median over repeats of the ratio within a repeat.

    python -m benchmarks.speed.ingest --text books-test.jsonl.zst
"""

import argparse
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.memories import long_text
from benchmarks.common.options import add_memory_tokens, load, parser
from benchmarks.common.results import write_part
from benchmarks.common.tables import spread, table, tokens_text
from benchmarks.common.timing import interleaved, paired_ratio, timed
from benchmarks.speed.forwards import chunked_forward
from memstore import LandmarkModel, MemoryStore


def measure(
    model: LandmarkModel, text: np.ndarray, directory: Path, options: argparse.Namespace
) -> dict[str, Any]:
    written = model.tokenizer.decode(text.tolist())

    def stored(repeat: int) -> float:
        path = directory / f"ingest {repeat} {time.monotonic_ns()}"
        with MemoryStore.create(path, model.signature) as store:
            seconds, _ = timed(lambda: model.ingest(written, store, name="book"))
        shutil.rmtree(path)
        return len(text) / seconds

    def forgotten(repeat: int) -> float:
        def read() -> None:
            ids = [token for part in model.tokenizer.encode_stream([written]) for token in part]
            chunked_forward(model, np.asarray(ids), model.config.chunk_blocks)

        return len(text) / timed(read)[0]

    runs = {"stored": stored, "not stored": forgotten}
    measured = interleaved(runs, options.repeats)
    return {
        "tokens": len(text),
        "tokens_per_second": {name: statistics.median(values) for name, values in measured.items()},
        "ratio": paired_ratio(measured["stored"], measured["not stored"]),
        "measured": measured,
    }


def main() -> None:
    arguments = parser(__doc__)
    add_memory_tokens(arguments, repeats=5)
    arguments.set_defaults(memory_tokens="64K")
    options = arguments.parse_args()
    model = load(options)
    with long_text(options, model) as (directory, _, text):
        found = measure(model, text, directory, options)
    rates = [f"{rate:,.0f}" for rate in found["tokens_per_second"].values()]
    what = f"ingesting {tokens_text(len(text))} tokens / the same, not stored"
    print(
        table(
            ["what", "tokens a second", "ratio"],
            [[what, " / ".join(rates), spread(found["ratio"])]],
        )
    )
    write_part(options, "ingest", found)


if __name__ == "__main__":
    main()
