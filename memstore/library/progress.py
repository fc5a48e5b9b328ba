"""How far the reading of a library is, for people and as metrics."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, get_args

from memstore.library.batch import Status, Told


@dataclass
class Progress:
    """How far it is."""

    files: int
    bytes: int  # of all files
    done: int = 0  # bytes of files that are done
    documents: Counter[Status] = field(default_factory=Counter)
    passages: int = 0
    tokens: int = 0  # that were read now
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.began

    @property
    def tokens_per_second(self) -> float:
        """How fast all of them read."""
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float:
        """At the speed so far."""
        return self.seconds * (self.bytes - self.done) / max(1, self.done)

    def add(self, told: Told) -> None:
        """A document is done."""
        self.done += told.size
        self.documents[told.status] += 1
        self.passages += told.passages
        self.tokens += told.tokens

    def collect(self) -> Iterable[Any]:
        """As metrics, for a registry of prometheus_client: counters of documents by what came of
        them, passages and tokens; gauges of speed and of the time left.
        """
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        documents = CounterMetricFamily(
            "memstore_library_documents", "Documents that are done.", labels=["status"]
        )
        for status in get_args(Status):
            documents.add_metric([status], self.documents[status])
        yield documents
        yield CounterMetricFamily("memstore_library_passages", "Passages read.", self.passages)
        yield CounterMetricFamily("memstore_library_tokens", "Tokens read.", self.tokens)
        for name, text, value in (
            ("files", "Files that were found.", self.files),
            ("tokens_per_second", "Tokens that all readers read.", self.tokens_per_second),
            ("seconds_left", "At the speed so far.", self.seconds_left),
        ):
            yield GaugeMetricFamily(f"memstore_library_{name}", text, value)
