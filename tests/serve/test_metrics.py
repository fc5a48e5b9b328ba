"""The Prometheus endpoint: a scrape shows the counts of the store."""

import socket
import sys
import urllib.request
from collections.abc import Iterator

import pytest

from memstore import MemoryStore
from memstore.errors import InvalidInput
from memstore.serve.metrics import TierMetrics, served
from memstore.tiers.stats import COUNTS
from support import tiny_model

Samples = dict[tuple[str, str], float]


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemoryStore]:
    """A memory that was asked something."""
    directory = tmp_path_factory.mktemp("metrics")
    model = tiny_model.tiny_model(directory / "model")
    with MemoryStore.create(directory / "mem", model.signature) as store:
        model.ingest(tiny_model.text(400), store, name="book")
    with MemoryStore.open(directory / "mem", model.signature, prefetch="speculative") as store:
        model.ask("the river of the captain", store, max_new_tokens=4, cmt_cutoff=0.0)
        yield store


def scrape(port: int) -> Samples:
    """{(name, tier): value} of what the endpoint answers."""
    parser = pytest.importorskip("prometheus_client.parser")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        families = list(parser.text_string_to_metric_families(answer.read().decode()))
    return {
        (sample.name, sample.labels["tier"]): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_scrape_shows_the_counts_of_every_tier(memory: MemoryStore) -> None:
    pytest.importorskip("prometheus_client")
    with served(TierMetrics(memory), 0) as port:
        found = scrape(port)
    tiers = memory.tier_stats()
    expected: Samples = {
        (f"memstore_tier_{count}_total", tier): counts[count]
        for tier, counts in tiers.items()
        for count in COUNTS
    }
    expected["memstore_tier_held_bytes", "host"] = tiers["host"]["held"]
    expected["memstore_tier_budget_bytes", "host"] = tiers["host"]["budget"]
    assert found == pytest.approx(expected)
    assert found["memstore_tier_bytes_total", "host"] > 0


def test_the_endpoint_listens_on_loopback_until_its_block_ends(memory: MemoryStore) -> None:
    pytest.importorskip("prometheus_client")
    metrics = TierMetrics(memory)
    with served(metrics, 0) as port:
        with pytest.raises(InvalidInput, match=f"{port}.*another port"), served(metrics, port):
            pass
        with socket.socket() as other:
            # free, as it would not be if every address were taken
            other.bind(("127.0.0.2", port))
    with served(metrics, port):
        pass


def test_a_missing_package_is_named(memory: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    metrics = TierMetrics(memory)
    with pytest.raises(InvalidInput, match=r"pip install '\.\[metrics\]'"), served(metrics, 0):
        pass
