"""What does reading a text cost that the memory has, or nearly has?

A part of a book is read into a memory; then again under another name; then with one sentence in a
hundred changed, in its own place; and into another memory with --keep text. Told of each are the
processor's seconds and the file's bytes, of those of the first reading; the model is loaded before.

    python -m benchmarks.real.stored_once --text books-test.jsonl.zst --model smollm2/
"""

import argparse
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.common.options import add, prepare
from benchmarks.common.results import write
from benchmarks.common.tables import table, tokens_number
from benchmarks.common.text import part
from benchmarks.real.passage_model import parser, passage_model
from memstore.disk.format.document import Document
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.model.source_text import Text
from memstore.store.memory_store import MemoryStore

CHANGED = "He looked at it for a while and said nothing more about number {}."


def main() -> None:
    options = read_options()
    prepare(options.threads)
    reader = passage_model(options.model, options.dtype)
    text = part(options.text, options.tokens, options.seed)
    with tempfile.TemporaryDirectory() as place:
        rows = measure(reader, Path(place), text, options.codec, options.seed)
    first = rows["new"]
    print(f"{first['tokens']:,} tokens in {first['seconds']:.1f} s, {first['bytes']:,} bytes\n")
    lines = [
        (name, f"{row['seconds'] / first['seconds']:.4f}", f"{row['bytes'] / first['bytes']:.4f}")
        for name, row in rows.items()
    ]
    print(table(("", "seconds", "bytes"), lines))
    text_alone = rows["text alone"]
    print(f"\ntext alone: {text_alone['bytes'] / text_alone['tokens']:.0f} bytes a token")
    write(options, {"rows": rows})


def read_options() -> argparse.Namespace:
    options = parser(__doc__, "bfloat16")
    add(options, "--codec", "int8", "of the memory")
    add(options, "--tokens", 40_000, "of the text, about", type=tokens_number)
    return options.parse_args()


def measure(
    reader: HuggingFacePassageModel, place: Path, text: str, codec: str, seed: int
) -> dict[str, dict[str, Any]]:
    """Tokens, processor's seconds and bytes of each way of reading."""
    form, rows = reader.keeps, dict[str, dict[str, Any]]()
    with MemoryStore.create(place / "kept", reader.signature, codec=codec, selector=form) as store:
        rows["new"] = timed(store, lambda: reader.ingest(Text(text, "book"), store))
        rows["another name"] = timed(store, lambda: reader.ingest(Text(text, "copy"), store))
        edited = Text(changed(text, seed), "book")
        rows["1% changed"] = timed(store, lambda: reader.ingest(edited, store, mode="replace"))
    with MemoryStore.create(place / "text", reader.signature, codec=codec, selector=form) as store:
        alone = Text(text, "book")
        rows["text alone"] = timed(store, lambda: reader.ingest(alone, store, keep="text"))
    return rows


def timed(store: MemoryStore, read: Callable[[], Document]) -> dict[str, Any]:
    """What a reading takes. Bytes are those that the file grows by."""
    before, began = store.stats()["file_bytes"], time.process_time()
    document = read()
    seconds = time.process_time() - began
    grown = store.stats()["file_bytes"] - before
    return {"tokens": document.tokens, "seconds": seconds, "bytes": grown}


def changed(text: str, seed: int) -> str:
    """The text with one sentence in a hundred replaced, at random places."""
    sentences = re.split(r"(?<=[.!?]) ", text)
    for at in Random(seed).sample(range(len(sentences)), max(1, len(sentences) // 100)):
        sentences[at] = CHANGED.format(at)
    return " ".join(sentences)


if __name__ == "__main__":
    main()
