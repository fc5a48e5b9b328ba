"""Gates by tier: how low a row's gate may be for it to wait for a block that is in a tier."""

from collections.abc import Mapping

from memstore.errors import InvalidInput

TIERS = ("host", "local", "disk", "remote")
"""What a cutoff may be given of, the fastest first: main memory (a device's too), the local cache
of a published memory, the directory, and what is farther away.
"""


def check_cutoffs(cutoffs: Mapping[str, float]) -> None:
    """Raises InvalidInput for cutoffs by tier that cannot be meant."""
    unknown = sorted(set(cutoffs) - set(TIERS))
    if unknown:
        raise InvalidInput(
            f"cmt_cutoff has no tier {unknown[0]!r}; give it for some of {', '.join(TIERS)}"
        )
    if "host" not in cutoffs:
        raise InvalidInput("cmt_cutoff by tier needs one for host, below which nothing is read")
    given = [cutoffs[tier] for tier in TIERS if tier in cutoffs]
    if given != sorted(given):
        raise InvalidInput(
            f"cmt_cutoff must not fall from one tier to a slower one: {dict(cutoffs)}"
        )


def cutoff_of(cutoffs: Mapping[str, float], tier: str) -> float:
    """The least gate of a row that waits for a tier: its own, or of the next faster one that has
    one.
    """
    place = TIERS.index(tier) if tier in TIERS else 0
    return max(cutoffs[faster] for faster in TIERS[: place + 1] if faster in cutoffs)
