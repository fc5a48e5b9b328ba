"""Checks of a Hugging Face model before and after transformers loads it: its files are whole, and
its configuration belongs to its weights. A model is trusted as a program is; these find mistakes.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from memstore.decode import from_json
from memstore.errors import InvalidWeights
from memstore.model.model_files import Stored, check_file, read_file, stored

_log = logging.getLogger("memstore")
# without the first, transformers asks whoever is at standard input
LOCAL = {"trust_remote_code": False, "local_files_only": True}
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]  # the file of each weight


def check_directory(directory: Path) -> Stored:
    """What the weights in a model's directory are. Raises InvalidWeights for a file that is missing
    or damaged, and for an adapter, whose weights transformers would leave out.
    """
    for name in _ADAPTERS:
        if (directory / name).exists():
            raise InvalidWeights(
                f"{directory / name} is an adapter; merge it into its model (peft: "
                "merge_and_unload), save that, and name its directory"
            )
    weights = stored(_weights(directory))
    tokenizers = [directory / name for name in _TOKENIZERS if (directory / name).exists()]
    if not tokenizers:
        raise InvalidWeights(
            f"{directory} has no tokenizer ({_TOKENIZERS[0]}); get all of the model's files"
        )
    for file in (directory / "config.json", *tokenizers):
        check_file(file)
    return weights


def _weights(directory: Path) -> list[Path]:
    """The files that hold a model's weights. Raises InvalidWeights."""
    if (directory / _WEIGHTS).exists():
        return [directory / _WEIGHTS]
    if not (directory / _INDEX).exists():
        raise InvalidWeights(
            f"{directory} cannot be loaded as a Hugging Face model: {_WEIGHTS} is missing, and "
            "only safetensors are read"
        )
    try:
        files = from_json(read_file(directory / _INDEX), _Index).weight_map.values()
    except ValueError as error:
        raise InvalidWeights(f"{directory / _INDEX} is no index of weights: {error}") from None
    return [directory / name for name in sorted(set(files))]


def checked_configuration(name: str | Path, directory: Path, weights: Stored) -> Any:
    """The configuration of a model, which belongs to its weights. Raises InvalidWeights."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, **LOCAL)
    # kernels that a configuration names are code from the hub; transformers chooses its own
    config._attn_implementation = config._experts_implementation = None
    text = config.get_text_config()
    if any(getattr(part, "quantization_config", None) for part in (config, text)):
        raise InvalidWeights(
            f"{name}: config.json says that the weights are quantized, which needs kernels of "
            "others; take the model's own weights, or a GGUF file of them"
        )
    layers = getattr(text, "num_hidden_layers", 0)
    there = len({part for key in weights.shapes for part in key.split(".") if part.isdecimal()})
    if not 0 < layers <= there:
        raise InvalidWeights(
            f"{name}: config.json says {layers:,} layers, of its weights there are {there:,}; get "
            "all of its files, or the config.json that belongs to them"
        )
    embedding = (getattr(text, "vocab_size", 0), getattr(text, "hidden_size", 0))
    if embedding not in weights.shapes.values():
        raise InvalidWeights(
            f"{name}: config.json says a vocabulary of {embedding[0]:,} and states of "
            f"{embedding[1]:,}, and no embedding of its weights is so; get the config.json that "
            "belongs to them"
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
