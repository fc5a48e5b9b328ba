"""Prometheus metrics of an open memory's tiers and of a server's answers, without any text."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from memstore.serve.answers import Outcome
from memstore.serve.api_errors import ApiError
from memstore.store.memory_store import MemoryStore
from memstore.tiers.slots import COUNTS

_HELP = {
    "hits": "Units (blocks of one KV head) looked up that were cached or being prefetched.",
    "misses": "Units looked up that had to be fetched from the tier below.",
    "bytes": "Decoded bytes delivered.",
    "seconds": "Upper tiers: time lookups waited for the tier below; disk: time spent reading.",
    "evictions": "Units evicted.",
    "prefetched": "First lookups of a unit that was prefetched in time.",
    "late": "First lookups of a unit that waited for its prefetch.",
    "unused": "Prefetched units evicted before any lookup.",
    "held": "Bytes of cached units.",
    "budget": "Most bytes of cached units.",
}
_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TOKENS = tuple(4**power for power in range(14))  # buckets that the gen_ai conventions advise
_LOAD = {
    "active": "Questions being answered.",
    "waiting": "Questions in the queue.",
    "jobs": "Documents being ingested or waiting for ingest.",
    "documents": "Documents of the memory.",
}


class ServerMetrics:
    """Metrics of a server's answers and load, and of the tiers since the store was opened, which
    are read at each scrape.

    registry: of prometheus_client.
    """

    def __init__(self, store: MemoryStore, load: Callable[[], Mapping[str, int]]) -> None:
        """load: returns the numbers of "active" and "waiting" questions, and of "jobs"."""
        self._store, self._load = store, load
        self.registry = CollectorRegistry(auto_describe=False)

        def histogram(name: str, text: str, labels: Iterable[str], buckets: Any) -> Histogram:
            return Histogram(name, text, labels, registry=self.registry, buckets=buckets)

        self._duration = histogram(
            "gen_ai_server_request_duration_seconds",
            "Seconds from the start of an answer, after the queue, to its end.",
            ["error_type"],
            _SECONDS,
        )
        self._first = histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Seconds from the start of an answer, after the queue, to its first token.",
            [],
            _SECONDS,
        )
        self._usage = histogram(
            "gen_ai_client_token_usage",
            "Tokens of prompts and answers.",
            ["gen_ai_token_type"],
            _TOKENS,
        )

        counter = partial(Counter, registry=self.registry)
        self._busy = counter("memstore_busy", "Requests answered with status 429.")
        self._refused = counter("memstore_refused", "Questions that the memory does not answer.")
        self.registry.register(self)  # for `collect`

    def collect(self) -> Iterable[Any]:
        """Gauges of the load, and by tier counters memstore_tier_{hits, misses, bytes, seconds,
        ...}_total and gauges memstore_tier_{held, budget}_bytes.
        """
        tiers = self._store.tier_stats()
        now = {**self._load(), "documents": len(self._store.documents())}
        families: list[Any] = [
            GaugeMetricFamily(f"memstore_{name}", text, now[name]) for name, text in _LOAD.items()
        ]
        for name, text in _HELP.items():
            kind: Any = CounterMetricFamily if name in COUNTS else GaugeMetricFamily
            unit = "" if name in COUNTS else "_bytes"
            families.append(kind(f"memstore_tier_{name}{unit}", text, labels=["tier"]))
            for tier, counts in tiers.items():
                if name in counts:
                    families[-1].add_metric([tier], counts[name])
        return families

    def failed(self, error: ApiError) -> None:
        """Count a request that got an error response."""
        self._busy.inc(error.status == 429)

    def ended(self, outcome: Outcome, error: BaseException | None) -> None:
        """Count an answer; error: None unless it failed or its client disconnected."""
        failed = "" if error is None else type(error).__name__
        self._duration.labels(failed).observe(outcome.seconds)
        if outcome.first_token_seconds:
            self._first.observe(outcome.first_token_seconds)
        self._refused.inc(outcome.refused)
        self._usage.labels("input").observe(outcome.prompt_tokens)
        self._usage.labels("output").observe(outcome.completion_tokens)
