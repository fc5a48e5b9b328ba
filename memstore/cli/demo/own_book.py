"""The demonstration with a text of the user's own: it is read, and then asked what one types."""

import time
from pathlib import Path
from typing import Any

from memstore.cli.demo.real_book import memory_of, shown
from memstore.cli.options.model_options import ModelOptions
from memstore.cli.terminal import answers, console
from memstore.model.model_api import ModelAPI
from memstore.model.texts.source_text import Text


def run_own_book(
    reader: ModelAPI, by: ModelOptions, text: Path, store: Path, *, quiet: bool
) -> dict[str, Any]:
    """Read a text, and answer the questions that come line by line, until the input ends.

    Raises what ingesting and asking raise.
    """
    with memory_of(store, reader, by) as memory:
        began = time.monotonic()
        source = Text(text)
        with console.reading(source.name) as show:
            document = reader.ingest(source, memory, progress=shown(show))
        seconds = round(time.monotonic() - began, 3)
        console.note(f"read {document.tokens:,} tokens in {seconds:.1f} s; ask, Ctrl-D ends")
        asked = []
        for line in filter(None, console.read_lines(prompt="> ")):
            answer = reader.ask(line, memory, documents=[document.name]).to_dict()
            asked.append({"question": line, **answer})
            if not quiet:
                answers.print_answer(asked[-1], streamed=False)
    return {"tokens": document.tokens, "reading_seconds": seconds, "answers": asked}
