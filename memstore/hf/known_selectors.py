"""Selectors that were made for known weights: those that ship, and those that `memstore adapt` made
here.
"""

from collections.abc import Iterator
from pathlib import Path

from memstore.hf.weights import cache_directory
from memstore.model.passages.selectors.adaptation import UNADAPTED, Adaptation
from memstore.model.passages.selectors.selector_file import MadeFor, load_selector, read_made_for

SHIPPED = Path(__file__).parent / "selectors"
"""The directory of the selectors that ship with the package, a file for each model."""


def made_here(weights: str) -> Path:
    """Where the selector that this user made for weights of this digest is kept."""
    return cache_directory() / "selectors" / f"{weights}.safetensors"


def adaptation_of(model: MadeFor) -> Adaptation:
    """The selector that was made for a model, this user's own before one that ships; words alone
    where there is none. Raises InvalidWeights for a file that is damaged.
    """
    for path in _files(model.weights):
        if read_made_for(path).weights == model.weights:
            return load_selector(path, model)
    return UNADAPTED


def _files(weights: str) -> Iterator[Path]:
    own = made_here(weights)
    if own.is_file():
        yield own
    yield from sorted(SHIPPED.glob("*.safetensors"))
