"""The prefetcher never blocks, raises or changes an answer, and its threads survive any failure
below.
"""

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from memstore.errors import DocumentNotFound, MemoryClosed, MemstoreError
from memstore.model.landmark.landmark_model import LandmarkModel
from memstore.model.lookup_settings import GRANULARITIES
from memstore.store.memory_store import MemoryStore
from memstore.tiers.cascade import Cascade
from memstore.tiers.policy import POLICIES, PREDICTORS
from support.counting_source import (
    SHAPE,
    UNIT_BYTES,
    Aside,
    CountingSource,
    Delayed,
    check_lease,
    check_slots,
    unit,
)
from support.rounding import TINY_MODEL, assert_same_to_rounding
from support.tiny_model import text, tiny_model

# Many threads


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("with_device", [False, True], ids=["host", "device"])
def test_concurrent_leases_prefetches_and_drops_never_deadlock(
    below: CountingSource, policy: str, with_device: bool
) -> None:
    budgets = {"host_budget": 9 * UNIT_BYTES, "device_budget": 12 * UNIT_BYTES}
    device = "cpu" if with_device else None
    tiers = Cascade(below, SHAPE, policy=policy, device=device, **budgets)
    host, tier = tiers.host, tiers.top
    below.wild = random.Random(policy)

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(150):
            wanted = [unit(number) for number in chance.sample(range(40), chance.randint(1, 4))]
            what = chance.random()
            try:
                if what < 0.5:
                    check_lease(tier, wanted)
                elif what < 0.8:
                    tiers.expect(wanted)
                elif what < 0.9:
                    for one in (tier, host):
                        one.drop(wanted) if what < 0.85 else one.drop_document(1)
                else:
                    with tier.lease(wanted[:1]):  # a thread that leases takes more, or is refused
                        check_lease(tier, wanted[1:])
            except (MemstoreError, OSError, RuntimeError):
                pass
            assert tier.bytes <= tier.budget_bytes and host.bytes <= host.budget_bytes

    for call in [Aside(work, seed) for seed in range(6)]:
        call.end()
    Aside(tiers.close).end()
    below.wild = None
    check_lease(tier, [unit(number) for number in range(8)])
    check_slots(tier), check_slots(host)


# Answers


def states(
    model: LandmarkModel, path: Path, budget: int, prefetch: str, **lookup: object
) -> torch.Tensor:
    """Logits of a question and of six tokens fed one by one, from a memory with a slow disk."""
    options = {"host_budget": budget, "prefetch": prefetch}
    with (
        MemoryStore.open(path, model.signature, **options) as store,
        model.session(store, **lookup) as session,
    ):
        store.tiers.host.source = Delayed(store.tiers.host.source, partial(time.sleep, 0.002))
        ids = model.tokenizer.encode(text(15, seed=8))
        parts = [session.feed(ids[:-6])] + [session.feed([token]) for token in ids[-6:]]
        tiers = store.stats()["tiers"]["host"]
        assert tiers["held"] <= budget
        if prefetch != "off" and not lookup:
            assert tiers["prefetched"] + tiers["late"]
        store.tiers._threads.shutdown()
        return session.logits(torch.cat(parts))


VARIANTS: list[tuple[dict[str, object], dict[str, object]]] = [
    *(({}, {"granularity": granularity}) for granularity in GRANULARITIES),
    ({"top_k": 1, "cmt_cutoff": 0.0}, {}),
    ({"top_k": 4, "old_block_position": "stingy", "cmt_cutoff": 0.0}, {}),
    (
        {"cmt": False, "num_kv_heads": 4, "old_block_position": "stingy", "memory_layers": (0, 2)},
        {},
    ),
]


@pytest.mark.parametrize(("shape", "lookup"), VARIANTS, ids=[str({**a, **b}) for a, b in VARIANTS])
def test_prediction_never_changes_an_answer(
    tmp_path: Path, shape: dict[str, object], lookup: dict[str, object]
) -> None:
    model = tiny_model(tmp_path / "model", num_layers=3, **{"cmt_cutoff": 0.02, **shape})
    config = model.config
    with MemoryStore.create(tmp_path / "m", model.signature) as store:
        model.ingest(text(200), store, name="a")
    block = 2 * config.block_size * config.head_dim * 2
    own = config.num_layers * config.num_kv_heads * (config.chunk_blocks + config.top_k)
    small = block * (own + config.top_k * config.num_heads)  # steps of several tokens are split
    outcomes = {
        predictor: states(model, tmp_path / "m", small, predictor, **lookup)
        for predictor in PREDICTORS
    }
    for predictor in PREDICTORS[1:]:
        assert_same_to_rounding(outcomes[predictor], outcomes["off"], products=TINY_MODEL)
    roomy = states(model, tmp_path / "m", 1 << 22, "off", **lookup)
    torch.testing.assert_close(roomy, outcomes["off"], rtol=1e-4, atol=1e-4)


def test_session_does_not_find_a_document_forgotten_during_prefetch(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", cmt_cutoff=0.0)
    with MemoryStore.create(tmp_path / "m", model.signature, prefetch="speculative") as store:
        model.ingest(text(150), store, name="a")
        kept = model.ingest(text(100, seed=2), store, name="b")
        with model.session(store, ["a"]) as session, model.session(store, ["b"]) as other:
            session.feed([3, 4, 5])
            other.feed([3, 4])
            store.forget("a")
            with pytest.raises(DocumentNotFound):
                session.feed([6])
            other.feed([5])
            store.tiers._threads.shutdown()
        assert {unit.document for unit in store.tiers.host._table.slots} <= {kept.id}
        check_slots(store.tiers.host)


# Forks


def test_a_forked_child_gets_a_named_error_though_a_thread_holds_the_lock(
    below: CountingSource,
) -> None:
    tiers = Cascade(below, SHAPE, host_budget=8 * UNIT_BYTES)
    tier = tiers.host
    tiers.expect([unit(0)])
    tiers._threads.shutdown()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(tier._lock.acquire).result()
        child = os.fork()
        if not child:
            signal.alarm(60)
            refused = 0
            for call in (lambda: tier.lease([unit(0)]), lambda: tier.holds(unit(0))):
                try:
                    call()
                except MemoryClosed:
                    refused += 1
            tier.drop([unit(0)])
            tiers.close()
            os._exit(refused)
        pool.submit(tier._lock.release).result()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    tiers.close()
