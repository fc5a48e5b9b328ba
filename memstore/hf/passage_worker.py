"""A worker process of an ingest: computes the passages that arrive on stdin, writes them to stdout,
and ends with its parent.

python -m memstore.hf.passage_worker DIRECTORY DTYPE SIGNATURE SELECTOR THREADS
"""

import os
import signal
import sys
import threading
from queue import SimpleQueue
from types import TracebackType

import torch

from memstore.errors import MemstoreError, WrongModel
from memstore.hf.load import load_reader
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.model.passages.passage_encoding import compute
from memstore.model.passages.worker_process import Asked, Told, receive, send


def main() -> None:
    """Load the model, say so, and compute; an exception is the last answer."""
    directory, dtype, signature, selector, threads = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent obeys it and ends this process
    told = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not mix with answers

    def say(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None = None
    ) -> None:
        ours = issubclass(kind, MemstoreError)
        said = str(error) if ours else f"{kind.__name__}: {error}".partition("\n")[0][:200]
        send(told, Told(error=(kind.__name__ if ours else "", said)))

    sys.excepthook = say
    asked = SimpleQueue[Asked]()
    threading.Thread(target=_listen, args=(asked,), daemon=True).start()
    torch.set_num_threads(int(threads))
    reader = load_reader(directory, dtype=getattr(torch, dtype))
    found = reader.signature.digest.hex(), None if reader.keeps is None else reader.keeps.digest
    if found != (signature, selector) or not isinstance(reader, HuggingFacePassageModel):
        raise WrongModel(f"{directory} was changed since it was loaded; try again")
    send(told, Told())
    while True:
        one = asked.get()
        send(told, Told.of(list(compute(reader, one.passages, one.layers))))


def _listen(asked: SimpleQueue[Asked]) -> None:
    """Receive requests while others are computed, to notice at once that the parent has ended."""
    try:
        while True:
            asked.put(receive(sys.stdin.buffer, Asked))
    except EOFError:
        os._exit(0)


if __name__ == "__main__":
    main()
