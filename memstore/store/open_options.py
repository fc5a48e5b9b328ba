"""Open a memory's tables, and check the options for that.

A bad option is refused before anything is opened or created; torch is imported only if an option
needs it.
"""

from pathlib import Path

from memstore.disk.format.signature import Signature
from memstore.disk.tables.catalog import Catalog
from memstore.errors import BudgetExceeded, InvalidConfig
from memstore.share.publication_options import ShareOptions, is_url, take_share_options
from memstore.tiers.policy import HOST_BUDGET, TierOptions, check_options


class OpenOptions(TierOptions, ShareOptions, total=False):
    """Settings of a store's index and tiers; each has a default."""

    index: str  # one of memstore.index.INDEX_KINDS; default "auto"


def open_catalog(path: Path | str, options: OpenOptions, *, read_only: bool) -> Catalog:
    """The tables of a memory's directory, or of a published memory by its URL; removes the options
    of published memories from `options`. Raises what MemoryStore.open raises.
    """
    share = take_share_options(options)
    if is_url(path):
        from memstore.share.published_catalog import open_published

        published: Catalog = open_published(str(path), share)
        return published
    if share:
        raise InvalidConfig(f"{min(share)} is for published memories; {path} is a directory")
    return Catalog.open(path, read_only=read_only)


def check_open_options(options: OpenOptions, signature: Signature) -> None:
    """Check options. Raises InvalidConfig, InvalidInput, BudgetExceeded."""
    if unknown := sorted(options.keys() - OpenOptions.__annotations__.keys()):
        raise InvalidConfig(
            f"unknown option {unknown[0]!r}; choose one of {', '.join(OpenOptions.__annotations__)}"
        )
    check_options(options)
    _check_budget("host", options.get("host_budget", HOST_BUDGET), signature)
    device = options.get("device")
    if device is not None:
        from memstore.devices import usable_device

        usable_device(device)
        _check_budget("device", options.get("device_budget", HOST_BUDGET), signature)
    if "index" in options:
        from memstore.index import LandmarkIndex

        LandmarkIndex(signature.num_kv_heads, signature.head_dim, kind=options["index"])


def _check_budget(tier: str, budget: int, signature: Signature) -> None:
    """A budget must hold at least what one row of one step needs: one block of each KV head."""
    if not isinstance(budget, int):
        raise InvalidConfig(f"a {tier} budget is a number of bytes, not {budget!r}")
    least = signature.geometry.record_bytes
    if budget < least:
        raise BudgetExceeded(
            f"a {tier} budget of {budget} bytes is too small; one block takes {least} bytes, so "
            "raise it"
        )


def on_device(options: OpenOptions, device: str) -> OpenOptions:
    """These options with a tier on the device that the model computes on ("auto": the fastest).
    Raises InvalidConfig.
    """
    if device == "cpu":
        return options
    from memstore.devices import usable_device

    place = usable_device(device)
    return options if place.type == "cpu" else {**options, "device": str(place)}
