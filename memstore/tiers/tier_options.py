"""Options of a memory's tiers, checked before the tiers are made."""

from typing import Literal, TypedDict, get_args

from memstore.errors import InvalidConfig
from memstore.tiers.policy import make_policy

HOST_BUDGET = 1 << 30
DEFAULT_POLICY = "arc"
Predictor = Literal["off", "speculative"]
PREDICTORS = get_args(Predictor)


class TierOptions(TypedDict, total=False):
    """Settings of a memory's tiers; each has a default."""

    host_budget: int  # bytes of main memory for blocks (default 1 GiB)
    policy: str  # of eviction: see memstore.tiers.policy
    prefetch: Predictor  # which units are read ahead: see memory_attention.py
    device: str | None  # a torch device with a tier of its own, or None
    device_budget: int  # bytes of the device's memory for blocks (default 1 GiB)


def check_options(options: TierOptions) -> None:
    """Check names of policy and predictor. Raises InvalidConfig."""
    policy, prefetch = options.get("policy", DEFAULT_POLICY), options.get("prefetch", "off")
    make_policy(policy, 1)
    if prefetch not in PREDICTORS:
        raise InvalidConfig(
            f"prefetch {prefetch!r} is unknown; choose one of {', '.join(PREDICTORS)}"
        )
