"""Which files of memstore does the ingest of one text by a Hugging Face model cross, and which a
question before its first token?

A file is crossed if one of its functions runs, in any thread, after `ingest` or `ask` was called; a
file that is only imported is not. The model is a random decoder of two layers that has ingested and
answered once before, and its memory holds a few sentences in a temporary directory.

    python -m benchmarks.crossed
"""

import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import torch

import memstore
from benchmarks.common.random_decoder import SHAPES, random_decoder
from memstore.hf.passage_adapter import HuggingFacePassageModel

_TEXT = "The red fox lives behind the old mill. Its lamp burns all night. The north gate is shut."
_ROOT = Path(memstore.__file__).parent
_QUESTION = "Where does the red fox live?"


class Crossed:
    """The files of memstore whose functions ran between `start` and `stop`, in the order of their
    first calls: in this thread, and in threads started after this object was made.
    """

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self._on = False
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def start(self) -> None:
        self.files, self._on = {}, True

    def stop(self, *ignored: Any) -> None:
        self._on = False

    def report(self, what: str) -> None:
        """Stop, and print the files."""
        self.stop()
        print("\n".join([*self.files, f"{len(self.files)} files {what}"]))

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if not self._on or event != "call" or frame.f_code.co_name == "<module>":
            return
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(_ROOT):
            self.files.setdefault(str(file.relative_to(_ROOT.parent)))


def main() -> None:
    decoder = random_decoder(SHAPES["tiny"], 4096, torch.device("cpu"), torch.float32)
    model, crossed = memstore.wrap(*decoder), Crossed()
    assert isinstance(model, HuggingFacePassageModel)
    with (
        TemporaryDirectory() as folder,
        memstore.MemoryStore.create(
            Path(folder) / "memory", model.signature, selector=model.keeps
        ) as store,
    ):
        model.ingest(_TEXT, store, name="first")  # does what happens once a process
        crossed.start()
        model.ingest(f"{_TEXT} {_QUESTION}", store, name="second")
        crossed.report("of an ingest")
        model.ask(_QUESTION, store, max_new_tokens=1)
        crossed.start()
        model.ask(_QUESTION, store, max_new_tokens=1, on_text=crossed.stop)
        crossed.report("before the first token")


if __name__ == "__main__":
    main()
