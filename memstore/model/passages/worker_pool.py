"""Reading documents in by several processes: this one cuts, writes and, while it waits, computes;
its workers compute beside it.

What is computed of a passage follows from its tokens alone: which process computes it, and with
which others, changes what is stored by no more than rounding.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import torch

from memstore.errors import MemstoreError
from memstore.model.document_ingest import IngestWorkers
from memstore.model.passages.passage_encoding import AHEAD, Computed, compute, fitting, pass_tokens
from memstore.model.passages.passage_protocol import PassageModel
from memstore.model.passages.worker_process import Worker
from memstore.model.texts.source_text import Text

_AHEAD_EACH = 16  # passages for each process that are asked for ahead, beside AHEAD of all
Ids = tuple[int, ...]
Lacking = Callable[[Text], Iterator[Sequence[int]]]
"""Of a text the passages (ids) that will have to be computed."""


@dataclass(eq=False)
class _Passage:
    ids: Ids
    text: Text
    layers: int | None
    taken: bool = False
    computed: Computed | None = None


class Workers(IngestWorkers):
    """Processes of one machine that compute passages for documents which are read in one after the
    other; a context manager that ends them. Of one thread.
    """

    def __init__(self, reader: PassageModel, command: Sequence[str], number: int) -> None:
        """command: of a worker, without the number of its threads, its last argument. number: of
        processes, this one among them, which share the threads that torch has here. They begin
        when there is something to compute.
        """
        self._reader, self._command, self._number = reader, command, number
        self._most = AHEAD + _AHEAD_EACH * number
        self._size = pass_tokens(reader)
        self._changed = threading.Condition()
        # of the document that is read in, and of those that come next, in order
        self._asked = deque[_Passage]()
        self._guessed: dict[Ids, _Passage] = {}
        self._complete = False  # more than these there will not be
        self._layers: int | None = None
        self._text: Text | None = None
        self._coming: Iterator[Text] = iter(())
        self._guesses: Iterator[_Passage] | None = None
        self._workers: list[Worker] = []
        self._threads: list[threading.Thread] = []
        self._torch_threads = 0  # before they began
        self._loaded = 0
        self._failed: MemstoreError | None = None
        self._closed = False

    def start(self) -> None:
        """Begin now, and come back when all have loaded the model. Raises as `compute` does."""
        self._begin()
        with self._changed:
            while self._failed is None and self._loaded < len(self._workers):
                self._changed.wait()
            if self._failed is not None:
                raise self._failed

    def expect(self, texts: Iterable[Text]) -> None:
        """Which texts will be read in next, the same objects in the same order: their passages are
        computed while the document before them ends. A guess: what does not come is dropped.
        """
        self._coming, self._guesses = iter(texts), None

    def compute(
        self, passages: Iterable[Sequence[int]], text: Text, *, layers: int | None, lacking: Lacking
    ) -> Iterator[Computed]:
        """What is stored of each of the passages (ids) of a text, in order; layers: as in `encode`.

        Some are taken ahead. Raises InvalidWeights as `encode` does, and MemstoreError for a
        process that did not begin, failed or was ended.
        """
        self._begin()
        if self._guesses is None:
            self._guesses = self._guess(lacking)
        with self._changed:
            self._asked.clear()
            self._text, self._complete = text, False
            if layers != self._layers:
                self._layers = layers
                self._guessed.clear()
            for ids, one in list(self._guessed.items()):  # those of texts before it do not come
                if one.text is text:
                    break
                del self._guessed[ids]
        coming = (_Passage(tuple(ids), text, layers) for ids in passages)
        while True:
            self._fill(coming)
            if not self._asked:
                return
            computed = self._awaited(self._asked[0], coming)
            with self._changed:
                self._asked.popleft()
            yield computed

    def _begin(self) -> None:
        if self._threads or self._closed:
            return
        self._torch_threads = torch.get_num_threads()
        threads = max(1, self._torch_threads // self._number)
        torch.set_num_threads(threads)
        try:
            for _ in range(self._number - 1):
                self._workers.append(Worker([*self._command, str(threads)]))
        except OSError as error:
            raise MemstoreError(f"no worker process did start: {error}") from None
        for worker in self._workers:
            self._threads.append(threading.Thread(target=self._ask, args=(worker,), daemon=True))
            self._threads[-1].start()

    def _guess(self, lacking: Lacking) -> Iterator[_Passage]:
        for text in self._coming:
            with suppress(MemstoreError):  # said when it is its turn
                for ids in lacking(text):
                    if text is self._text:  # it is
                        break
                    yield _Passage(tuple(ids), text, self._layers)

    def _fill(self, coming: Iterator[_Passage]) -> None:
        """Ask for as many passages as are asked for at once: those of this document first."""
        for one in islice(coming, self._most - len(self._asked)):
            with self._changed:
                self._asked.append(self._guessed.pop(one.ids, one))
                self._changed.notify_all()
        if len(self._asked) == self._most or self._guesses is None:
            return
        for one in islice(self._guesses, max(0, self._most - self._held)):
            with self._changed:
                self._guessed.setdefault(one.ids, one)
                self._changed.notify_all()
        with self._changed:
            self._complete = self._held < self._most
            self._changed.notify_all()

    @property
    def _held(self) -> int:
        return len(self._asked) + len(self._guessed)

    def _awaited(self, one: _Passage, coming: Iterator[_Passage]) -> Computed:
        """The first passage of all, once it is computed; others are computed here until then."""
        while True:
            with self._changed:
                if self._failed is not None:
                    raise self._failed
                if one.computed is not None:
                    return one.computed
                group = self._take()
                if not group:
                    self._changed.wait()
                    continue
            some = [each.ids for each in group]
            self._deliver(group, compute(self._reader, some, self._layers))
            self._fill(coming)

    def _take(self) -> list[_Passage]:
        """Passages for a forward pass, the first that nobody has taken among them; none while more
        may come to fill it.
        """
        free = list(islice((one for one in self._known() if not one.taken), AHEAD))
        if not free:
            return []
        urgent = self._complete or free[0] is next(self._known())
        if not urgent and sum(len(one.ids) for one in free) < self._size:
            return []
        group = [free[at] for at in fitting([len(one.ids) for one in free], self._size)]
        for one in group:
            one.taken = True
        return group

    def _known(self) -> Iterator[_Passage]:
        yield from self._asked
        yield from self._guessed.values()

    def _deliver(self, group: Sequence[_Passage], computed: Iterable[Computed]) -> None:
        found = list(computed)
        with self._changed:
            for one, its in zip(group, found, strict=True):
                one.computed = its
            self._changed.notify_all()

    def _ask(self, worker: Worker) -> None:
        """On a thread of its own: give a worker what it can compute, until the end."""
        with self._changed:
            if self._closed:
                return
        try:
            worker.wait()
            with self._changed:
                self._loaded += 1
                self._changed.notify_all()
            while group := self._next():
                self._deliver(group, worker.compute([one.ids for one in group], group[0].layers))
        except MemstoreError as error:
            with self._changed:
                self._failed = self._failed or (None if self._closed else error)
                self._changed.notify_all()

    def _next(self) -> list[_Passage]:
        """What a worker can compute, as soon as there is something; nothing at the end."""
        with self._changed:
            while not self._closed and self._failed is None:
                if group := self._take():
                    return group
                self._changed.wait()
            return []

    def close(self) -> None:
        """End the workers, whatever they do."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for worker in self._workers:
            worker.end()
        for thread in self._threads:
            with suppress(RuntimeError):  # an interrupted start: it will see that this is closed
                thread.join()
        for worker in self._workers:
            worker.close()
        if self._torch_threads:
            torch.set_num_threads(self._torch_threads)
