"""A Prometheus endpoint for the tiers of the memory that a long-running command has open.

Needs the optional package prometheus-client, which is imported where it is used.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from memstore.errors import InvalidInput, install_extra
from memstore.tiers.stats import COUNTS

if TYPE_CHECKING:
    from memstore.store.memory_store import MemoryStore

ADDRESS = "127.0.0.1"
_HELP = {
    "hits": "Units (blocks of one KV head) looked up that were there or on their way.",
    "misses": "Units that a lookup had to fetch from below.",
    "bytes": "Decoded bytes delivered.",
    "seconds": "Upper tiers: time lookups waited for the tier below; disk: time spent reading.",
    "evictions": "Units dropped to make room.",
    "prefetched": "First lookups of a unit that a prefetch had brought in time.",
    "late": "First lookups of a unit that waited for its prefetch.",
    "unused": "Prefetched units dropped before anything looked them up.",
}


def new_registry() -> Any:
    """A registry of prometheus_client with nothing in it. Raises InvalidInput where that package is
    missing.
    """
    try:
        from prometheus_client import CollectorRegistry
    except ImportError:
        raise InvalidInput(
            f"metrics need the package prometheus-client: {install_extra('metrics')}"
        ) from None
    return CollectorRegistry(auto_describe=False)


class Metrics:
    """What an endpoint shows: the counts of `store`, read when they are asked for; nothing without
    a store.

    The counts are those of one opening: with another store they begin again, as after a restart.
    """

    def __init__(self) -> None:
        self.store: MemoryStore | None = None
        self.port = 0  # the one that is served

    def collect(self) -> Iterable[Any]:
        """The metrics, as prometheus_client's custom collectors give them.

        Counters memstore_tier_{hits, misses, bytes, seconds, ...}_total by tier and layer; gauges
        memstore_tier_held_bytes and memstore_tier_budget_bytes by tier.
        """
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        store = self.store
        layers = {} if store is None else store.tiers.layers()
        for count in COUNTS:
            counter = CounterMetricFamily(
                f"memstore_tier_{count}", _HELP[count], labels=["tier", "layer"]
            )
            for tier, by_layer in layers.items():
                for layer, stats in by_layer.items():
                    counter.add_metric([tier, str(layer)], stats.to_dict()[count])
            yield counter
        tiers = {} if store is None else store.tier_stats()
        for name, text in (
            ("held", "Bytes of units that are held."),
            ("budget", "Bytes that may be held."),
        ):
            gauge = GaugeMetricFamily(f"memstore_tier_{name}_bytes", text, labels=["tier"])
            for tier, counts in tiers.items():
                if name in counts:
                    gauge.add_metric([tier], counts[name])
            yield gauge


@contextmanager
def serve(port: int | None) -> Iterator[Metrics]:
    """Serve metrics at http://127.0.0.1:PORT/metrics until the block ends; set `store` of what is
    yielded.

    port: 0 takes any that is free; with None nothing is served. Raises as `served` does.
    """
    metrics = Metrics()
    if port is None:
        yield metrics
        return
    with served(metrics, port) as metrics.port:
        yield metrics


@contextmanager
def served(collector: Any, port: int) -> Iterator[int]:
    """Serve what a custom collector of prometheus_client tells until the block ends; yields the
    port. Raises InvalidInput for a missing prometheus-client and for a port that cannot be had.
    """
    registry = new_registry()
    registry.register(collector)
    from prometheus_client import start_http_server

    try:
        server, thread = start_http_server(port, ADDRESS, registry)
    except OSError as error:
        raise InvalidInput(
            f"metrics cannot be served at {ADDRESS}:{port}: {error.strerror}; choose another port"
        ) from None
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
