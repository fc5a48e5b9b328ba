"""How fast does a passage model ingest a text, against its own prefill, and in how much memory?

ingest  Tokens a second of `reader.ingest`, against the stock model of transformers reading the same
        tokens in chunks of 256 after the same prefix, over a window of 256, with its stock cache
        and nothing stored. In turns; the ratio is the median of pairs.
peak    Peak main memory of a fresh process that ingests --peak tokens, with --host-budget bytes of
        host tier.

    python -m benchmarks.real.ingest --text books-test.jsonl.zst --model smollm2/
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.memories import peaks_table, weigh_ingest
from benchmarks.common.options import add, prepare
from benchmarks.common.results import write
from benchmarks.common.tables import spread, table, tokens_number, tokens_text
from benchmarks.common.text import part
from benchmarks.common.timing import in_fresh_process, interleaved, paired_ratio, timed
from benchmarks.real.passage_model import DTYPES, parser, passage_model
from memstore import MemoryStore
from memstore.disk.format.codec import CODECS
from memstore.hf.attention_seam import cache_argument
from memstore.hf.passage_adapter import HuggingFacePassageModel

PARTS = ["ingest", "peak"]


def main() -> None:
    options = read_options()
    prepare(options.threads)
    found: dict[str, Any] = {}
    if "ingest" in options.parts:
        reader = passage_model(options.model, options.dtype)
        stock = Stock(options.model, options.dtype, reader)
        text = part(options.text, options.tokens, options.seed)
        found["ingest"] = against_prefill(reader, stock, text, options)
    if "peak" in options.parts:
        found["peak"] = peaks(options)
    write(options, found)


def read_options() -> argparse.Namespace:
    options = parser(__doc__)
    add(options, "--codec", "zstd", choices=CODECS)
    add(options, "--parts", PARTS, choices=PARTS, metavar="PART")
    add(options, "--tokens", "8K", "of the long document", type=tokens_number)
    add(options, "--peak", ["32K", "128K"], "tokens")
    add(options, "--host-budget", 64 * 1024**2, "bytes")
    add(options, "--repeats", 3)
    return options.parse_args()


class Stock:
    """The stock model of transformers, which reads the same tokens and stores nothing."""

    def __init__(self, model: str, dtype: str, reader: HuggingFacePassageModel) -> None:
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype])
        self.model = loaded.eval().get_decoder()
        self.prefix = reader.prefix_ids
        self.chunk = self.window = 256  # tokens

    @torch.no_grad()
    def read(self, ids: Sequence[int]) -> None:
        """Read a document in chunks."""
        from transformers.cache_utils import DynamicCache, DynamicLayer

        cache = DynamicCache()
        taken = cache_argument(self.model, cache)
        sinks = len(self.prefix)
        if sinks:
            self.model(input_ids=torch.tensor([self.prefix]), **taken, use_cache=True)
        for first in range(0, len(ids), self.chunk):
            given = torch.tensor([ids[first : first + self.chunk]])
            at = torch.arange(sinks + first, sinks + first + given.shape[1])[None]
            self.model(input_ids=given, position_ids=at, **taken, use_cache=True)
            for layer in cache.layers:
                assert isinstance(layer, DynamicLayer)
                assert layer.keys is not None and layer.values is not None
                if layer.keys.shape[2] > sinks + self.window:
                    layer.keys, layer.values = (
                        torch.cat((half[:, :, :sinks], half[:, :, -self.window :]), 2)
                        for half in (layer.keys, layer.values)
                    )


def against_prefill(
    reader: HuggingFacePassageModel, stock: Stock, text: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Tokens a second of both."""
    ids = reader.tokenizer.encode(text)

    def stored(_: int) -> float:
        with tempfile.TemporaryDirectory() as folder, created(reader, folder, options) as store:
            return len(ids) / timed(lambda: reader.ingest(text, store, name="text", keep="kv"))[0]

    def prefilled(_: int) -> float:
        return len(ids) / timed(lambda: stock.read(ids))[0]

    runs = {"ingest": stored, "prefill": prefilled}
    for run in runs.values():
        run(-1)  # warm up
    measured = interleaved(runs, options.repeats)
    ratio = paired_ratio(measured["ingest"], measured["prefill"])
    what = f"{tokens_text(len(ids))} tokens, {options.dtype}, {options.codec}"
    medians = " / ".join(f"{statistics.median(rates):,.0f}" for rates in measured.values())
    head = ["document", "tokens a second: ingest / stock prefill", "ratio"]
    print(table(head, [[what, medians, spread(ratio)]]) + "\n", flush=True)
    return {"clock": {"ratio": ratio, "tokens_per_second": measured}}


def peaks(options: argparse.Namespace) -> list[dict[str, int]]:
    """Peak main memory by length."""
    found = []
    for length in map(tokens_number, options.peak):
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "text.txt"
            some = [part(options.text, min(16384, length), at) for at in range(-(-length // 16384))]
            file.write_text("\n".join(some), encoding="utf-8")
            found.append(in_fresh_process(weigh, file, Path(directory) / "memory", options))
    print(peaks_table(found) + "\n", flush=True)
    return found


def weigh(text: Path, memory: Path, options: argparse.Namespace) -> dict[str, int]:
    """In a process of its own: peak resident bytes of ingesting a file."""
    prepare(options.threads)
    reader = passage_model(options.model, options.dtype)
    with created(reader, memory, options, host_budget=options.host_budget) as store:
        return weigh_ingest(reader, store, text, keep="kv")


def created(
    reader: HuggingFacePassageModel, directory: str | Path, options: argparse.Namespace, **more: Any
) -> MemoryStore:
    """A new memory of --codec."""
    where = Path(directory) / "m"
    kept = {"codec": options.codec, "selector": reader.keeps}
    return MemoryStore.create(where, reader.signature, **kept, **more)


if __name__ == "__main__":
    main()
