"""What does publishing documents of passages cost again once a little of them has changed, and what
without their keys and values?

A part of a book is cut into documents, which are read into a memory and published to a directory
(file://): all of them; again as they are; with one sentence of one of them changed, by --replace;
with one of them under another name, too; to another directory with --keep text; and there again
after another sentence has changed. Told of each are seconds, requests, bytes sent, these by token
of all documents, and the bytes of the records of passages that are new since the step before.

    python -m benchmarks.share.edited_documents --text books-test.jsonl.zst --model smollm2/
"""

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from benchmarks.common.options import add, prepare
from benchmarks.common.results import write
from benchmarks.common.tables import table
from benchmarks.common.text import part
from benchmarks.common.timing import timed
from benchmarks.real.passage_model import parser, passage_model
from benchmarks.real.stored_once import CHANGED
from memstore.disk.tables.texts import Keep
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.model.source_text import Text
from memstore.share.object_store import ObjectStore
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer import publish_memory


@contextmanager
def counted_requests() -> Iterator[Counter[str]]:
    """Counts "requests" to the object stores of this process, and the bytes "read" and "sent"."""
    counts = Counter(requests=0, read=0, sent=0)

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(place: ObjectStore, *arguments: Any) -> Any:
            result = call(place, *arguments)
            counts["requests"] += 1
            if name in ("get", "get_range"):
                counts["read"] += len(result)
            if name in ("create", "put"):
                counts["sent"] += len(arguments[1])
            return result

        return counted

    names = ("get", "get_range", "names", "create", "put", "_delete")
    calls: dict[str, Any] = {name: counting(name, getattr(ObjectStore, name)) for name in names}
    with patch.multiple(ObjectStore, **calls):
        yield counts


def main() -> None:
    options = read_options()
    prepare(options.threads)
    reader = passage_model(options.model, options.dtype)
    text = part(options.text, options.documents * options.tokens, options.seed)
    characters = len(text) // options.documents
    texts = [text[at * characters :][:characters] for at in range(options.documents)]
    with tempfile.TemporaryDirectory() as place:
        steps = Steps(reader, Path(place), options.codec)
        steps.run(texts, Random(options.seed))
    print(
        table(
            ("", "seconds", "requests", "bytes sent", "a token", "new records, bytes"),
            [
                (
                    name,
                    f"{row['seconds']:.3g}",
                    f"{row['requests']}",
                    f"{row['sent']:,}",
                    f"{row['sent'] / row['tokens']:,.1f}",
                    f"{row['records']:,}",
                )
                for name, row in steps.rows.items()
            ],
        )
    )
    write(options, {"rows": steps.rows})


def read_options() -> argparse.Namespace:
    options = parser(__doc__, "bfloat16")
    add(options, "--codec", "int8", "of the memory")
    add(options, "--documents", 20)
    add(options, "--tokens", 1500, "of a document, about")
    return options.parse_args()


class Steps:
    """Publications of a memory's documents, one after the other."""

    def __init__(self, reader: HuggingFacePassageModel, place: Path, codec: str) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self._reader, self._place = reader, place
        self._store = MemoryStore.create(
            place / "memory", reader.signature, codec=codec, selector=reader.keeps
        )
        self._held = dict[bytes, int]()  # bytes of each passage's records, at the last step

    def run(self, texts: list[str], rng: Random) -> None:
        """All of them. texts: of the documents."""
        with self._store as store:
            for number, text in enumerate(texts):
                self._reader.ingest(Text(text, f"document {number:02}"), store)
            self._publish("all documents")
            self._publish("all again")
            self._edit(texts, rng)
            self._publish("one sentence of one changed")
            self._reader.ingest(Text(texts[0], "copy"), store)
            self._publish("one under another name, too")
            self._publish("all, --keep text", "text")
            self._edit(texts, rng)
            self._publish("one sentence of one changed, --keep text", "text")

    def _edit(self, texts: list[str], rng: Random) -> None:
        """Change one sentence of one document."""
        number = rng.randrange(len(texts))
        sentences = re.split(r"(?<=[.!?]) ", texts[number])
        at = rng.randrange(1, len(sentences) - 1)
        sentences[at] = CHANGED.format(at)
        texts[number] = " ".join(sentences)
        text = Text(texts[number], f"document {number:02}")
        self._reader.ingest(text, self._store, mode="replace")

    def _publish(self, name: str, keep: Keep = "kv") -> None:
        """Publish all of them, to a directory of those that are kept so."""
        url = f"file://{self._place}/{keep}"
        with counted_requests() as counts:
            seconds, report = timed(
                lambda: publish_memory(self._store, url, keep=keep, replace=True)
            )
        catalog, before = self._store._catalog, self._held
        with catalog.database.read() as txn:
            self._held = {row.digest: row.bytes for row in catalog.passages.all(txn)}
        self.rows[name] = {
            "seconds": seconds,
            **counts,
            "documents": len(report.documents),
            "tokens": sum(document.tokens for document in self._store.documents()),
            "records": sum(self._held[digest] for digest in self._held.keys() - before.keys()),
        }
        print(f"{name}: {seconds:.3g} s, {counts['sent']:,} bytes", flush=True)


if __name__ == "__main__":
    main()
