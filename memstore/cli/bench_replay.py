"""Measuring the tiers without a model: recorded lookups are replayed with setting after setting."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memstore.cli.terminal import console
from memstore.errors import InvalidConfig
from memstore.tiers.policy import POLICIES
from memstore.tiers.recorded import Recorded
from memstore.tiers.replay import belady, replay
from memstore.tiers.tier_options import check_options

LIVE_BUDGETS, LIVE_PREFETCH = (0.01, 0.03, 0.1), ("off", "speculative")
REPLAY_BUDGETS, REPLAY_PREFETCH = (0.02, 0.05, 0.1, 0.25, 0.5), ("off", "recorded")
ALL_POLICIES = tuple(POLICIES)
COUNTED = ("hits", "misses", "evictions", "prefetched", "unused")


@dataclass(frozen=True)
class Settings:
    """What is varied: every policy with every budget and every prefetcher."""

    budgets: Sequence[float]  # shares of the units there are
    policies: Sequence[str]
    prefetch: Sequence[str]

    def check(self, prefetchers: Sequence[str]) -> None:
        """Raises InvalidConfig for a name that there is none of, or a share that is not in (0,
        1].
        """
        for policy in self.policies:
            check_options({"policy": policy})
        for name in self.prefetch:
            if name not in prefetchers:
                raise InvalidConfig(
                    f"prefetch {name!r} is unknown; choose of {', '.join(prefetchers)}"
                )
        for share in self.budgets:
            if not 0 < share <= 1:
                raise InvalidConfig(f"a budget is a share above 0% and up to 100%, not {share:.2%}")


def run_replay(trace: Path, settings: Settings) -> dict[str, Any]:
    """A trace against every capacity, policy and prefetcher, with Belady's optimum as the bound;
    plain values.

    A budget is a share of the distinct units in the trace. Predictions are taken to be fulfilled at
    once, so hits with a prefetcher are an upper bound. Belady's optimum is of fetching on demand: a
    prefetcher may beat it. Raises InvalidInput, InvalidConfig.
    """
    settings.check(REPLAY_PREFETCH)
    recorded = Recorded.load(trace)
    units = recorded.units
    began = time.monotonic()
    bounds, runs = [], []
    ahead = {prefetch: recorded.ahead(prefetch) for prefetch in settings.prefetch}
    for share in settings.budgets:
        capacity = max(1, round(share * units))
        best = belady(recorded.requests, capacity)
        bounds.append(
            {
                "share": share,
                "capacity": capacity,
                "hits": best.hits,
                "hit_rate": round(best.hit_rate, 4),
            }
        )
        for policy in settings.policies:
            for prefetch, predicted in ahead.items():
                result = replay(recorded.requests, capacity, policy, predicted)
                runs.append(
                    {"share": share, "capacity": capacity, "policy": policy, "prefetch": prefetch}
                    | {name: getattr(result, name) for name in COUNTED}
                    | {"hit_rate": round(result.hit_rate, 4)}
                )
        console.note(
            f"capacity {share:.0%}: {len(runs)} replays done, {time.monotonic() - began:.0f} s"
        )
    return {
        "mode": "replay",
        "trace": str(trace),
        "lookups": len(recorded.requests),
        "requested": sum(map(len, recorded.requests)),
        "predicted": sum(map(len, recorded.predicted)),
        "units": units,
        "runs": runs,
        "belady": bounds,
        "reuse": recorded.reuse(),
    }


def run_columns(run: dict[str, Any] | None = None) -> tuple[object, ...]:
    """A run as a row of a table, live or replayed; of None the head."""
    if run is None:
        return "policy", "prefetch", "hit rate", "misses", "evicted", "in time", "unused"
    counts = (run[name] for name in ("misses", "evictions", "prefetched", "unused"))
    return run["policy"], run["prefetch"], f"{run['hit_rate']:.3f}", *counts


def print_replay(result: dict[str, Any]) -> None:
    """The table of a replay, and what it was made of."""
    rows = [("capacity", *run_columns())]
    for bound in result["belady"]:
        share = f"{bound['share']:4.0%}"
        rows += [
            (share, *run_columns(run)) for run in result["runs"] if run["share"] == bound["share"]
        ]
        missed = result["requested"] - bound["hits"]
        best = dict.fromkeys(COUNTED, 0) | bound | {"misses": missed}
        rows.append((share, *run_columns(best | {"policy": "belady", "prefetch": "off"})))
    console.say(console.columns(rows))
    console.say("")
    console.say(
        f"{result['lookups']:,} lookups of {result['requested']:,} units, {result['units']:,} of "
        "them distinct; "
        f"{result['predicted']:,} predictions recorded"
    )
    console.say(
        "predicted units are taken to arrive at once: an upper bound; belady is the bound of "
        "fetching on demand"
    )
