"""What is found out once of a model's files and remembered: the digest of its weights, and that its
tokenizer passed its trial.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from memstore.errors import InvalidWeights

_REMEMBERED = "weights.json"
_MOST = 256  # entries


def cache_directory() -> Path:
    """Where converted models, digests and selectors of this user are kept: $MEMSTORE_CACHE, or
    memstore in the user's cache directory.
    """
    named = os.environ.get("MEMSTORE_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memstore"


@torch.no_grad()
def digest_of(model: nn.Module, name: str | Path = "") -> str:
    """Hex digest of a model's weights, as they are in memory. name: of the model, in errors. Raises
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
            continue  # tied to one before
        seen.add(tensor.data_ptr())
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(memoryview(data.numpy()))
    return digest.hexdigest()


def remembered(files: Sequence[Path]) -> str | None:
    """What was remembered of these files, if none of them changed since."""
    return _read().get(_key(files))


def remember(files: Sequence[Path], found: str) -> None:
    """Remember what was found out of these files; where that is not possible, nothing happens."""
    known = dict(list(_read().items())[-_MOST + 1 :]) | {_key(files): found}
    place = cache_directory() / _REMEMBERED
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(known), encoding="utf-8")
        temporary.replace(place)
    except OSError:
        pass


def _key(files: Sequence[Path]) -> str:
    """Paths, sizes and times of files."""
    described = [
        (str(file.resolve()), status.st_size, status.st_mtime_ns, status.st_ino)
        for file in sorted(files)
        for status in [file.stat()]
    ]
    return hashlib.blake2b(json.dumps(described).encode(), digest_size=16).hexdigest()


def _read() -> dict[str, str]:
    try:
        known = json.loads((cache_directory() / _REMEMBERED).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {key: value for key, value in known.items() if isinstance(value, str)}
