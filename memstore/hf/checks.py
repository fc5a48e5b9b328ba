"""Checks of a Hugging Face model before and after transformers loads it. They find mistakes: a
model is trusted as a program is.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memstore.errors import InvalidWeights
from memstore.model.model_files import check_fetched

_log = logging.getLogger("memstore")
# without the first, transformers asks whoever is at standard input
LOCAL = {"trust_remote_code": False, "local_files_only": True}
_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def check_directory(directory: Path) -> None:
    """Raises InvalidWeights for an adapter, whose weights transformers would leave out, for a
    directory without a tokenizer or safetensors, and for files that Git LFS has not fetched.
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
                f"{name}: config.json says that the weights are quantized, which needs kernels of "
                "others; take the model's own weights, or a GGUF file of them"
            )
    return config


def whole(loaded: Any, name: str | Path) -> Any:
    """The model of what `from_pretrained` gives with `output_loading_info`. Raises InvalidWeights
    where weights are missing, which transformers has drawn at random; reports unused ones.
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
    """What an error of transformers says, in a line of an error here."""
    if "ignore_mismatched_sizes" in str(error):
        return "config.json gives other sizes than the weights have"
    if isinstance(error, LookupError):
        return repr(error)
    first, *rest = str(error).strip().splitlines() or [type(error).__name__]
    said = f"{first} {rest[0].strip()}" if rest and first.endswith(":") else first
    return said[:200]


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and tables that transformers prints of whatever it loads."""
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
