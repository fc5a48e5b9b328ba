"""Find what belongs to a model's weights: their digest, selector and reading adapter."""

import hashlib
from pathlib import Path

import torch
from torch import nn

from memstore.errors import InvalidWeights
from memstore.hf.model_directory import cache_directory
from memstore.hf.reading_adapter import ReadingAdapter
from memstore.model.passages.adaptation import (
    UNADAPTED,
    Adaptation,
    MadeFor,
    load_selector,
    read_made_for,
)

SHIPPED = Path(__file__).parent / "selectors"
"""The directory of the selectors that ship with the package, one file a model."""
SHIPPED_ADAPTERS = Path(__file__).parent / "adapters"
"""The directories of the reading adapters that ship with the package, one a model."""


@torch.no_grad()
def digest_of(model: nn.Module, name: str | Path = "") -> str:
    """Hex digest of a model's weights in memory. name: of the model, for errors. Raises
    InvalidWeights for weights that are NaN or infinite.
    """
    for parameter, tensor in model.named_parameters():
        if tensor.numel() and not all(bound.isfinite() for bound in tensor.aminmax()):
            raise InvalidWeights(
                f"{name or type(model).__name__}: the weights {parameter} hold NaN or infinite "
                "numbers; get the model's files again"
            )
    digest = hashlib.blake2b(digest_size=16)
    seen: set[int] = set()
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.data_ptr() in seen and tensor.numel():
            continue  # tied to an earlier one
        seen.add(tensor.data_ptr())
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(memoryview(data.numpy()))
    return digest.hexdigest()


def made_here(weights: str) -> Path:
    """The file of the selector that this user made for weights of this digest."""
    return cache_directory() / "selectors" / f"{weights}.safetensors"


def adaptation_of(model: MadeFor) -> Adaptation:
    """The selector made for a model's weights: this user's own, else one that ships.

    UNADAPTED, which searches by words alone, if there is neither. Raises InvalidWeights for a
    damaged file.
    """
    own = made_here(model.weights)
    for path in ([own] if own.is_file() else []) + sorted(SHIPPED.glob("*.safetensors")):
        if read_made_for(path).weights == model.weights:
            return load_selector(path, model)
    return UNADAPTED


def adapter_made_here(weights: str) -> Path:
    """The directory of the reading adapter that this user made for weights of this digest."""
    return cache_directory() / "adapters" / weights


def adapter_of(weights: str, model: nn.Module) -> ReadingAdapter | None:
    """The reading adapter made for a model's weights: this user's own, else one that ships, else
    None. Raises InvalidWeights for a damaged one.
    """
    own = adapter_made_here(weights)
    for directory in ([own] if own.is_dir() else []) + sorted(SHIPPED_ADAPTERS.glob("*")):
        if weights in ReadingAdapter.made_for(directory):
            return ReadingAdapter.load(directory, model)
    return None
