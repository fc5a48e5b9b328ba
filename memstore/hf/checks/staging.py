"""A model's directory as transformers is given it: a new one, which holds what is loaded and was
checked, and nothing else of what lies there. What adapters, code or kernels lie there, or are named
there, is not seen.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from memstore.decode import from_json
from memstore.errors import InvalidWeights, MemstoreError
from memstore.hf.checks.configuration import checked_configuration, read_settings
from memstore.model.model_files import TOKENIZER_BYTES, Stored, check_file, read_file, stored

TOKENIZER = "tokenizer.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_CONFIG, _TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
_GENERATION, _TEMPLATE = "generation_config.json", "chat_template.jinja"
_SPECIAL = "special_tokens_map.json"
# of tokenizers that come without tokenizer.json
_VOCABULARIES = (
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
    "added_tokens.json",
)
LOADED = (
    _CONFIG,
    _TOKENIZER_CONFIG,
    _GENERATION,
    _TEMPLATE,
    _SPECIAL,
    TOKENIZER,
    *_VOCABULARIES,
    INDEX,
)
"""What may be loaded of a model beside its weights."""
# keys of a tokenizer's configuration that name code, or what else is read or made
_OURS = {
    "auto_map",
    "backend",
    "cache_dir",
    "config",
    "from_slow",
    "init_inputs",
    "is_local",
    "local_files_only",
    "merges",
    "name_or_path",
    "post_processor",
    "revision",
    "subfolder",
    "token",
    "tokenizer_object",
    "tokenizer_padding",
    "tokenizer_truncation",
    "trust_remote_code",
    "vocab",
}
_MOST_SHARDS = 4096


class _Index(msgspec.Struct):
    weight_map: dict[str, Annotated[str, Meta(pattern=r"^[^/\\\x00]{1,240}\.safetensors$")]]


@dataclass(frozen=True)
class Staged:
    """A directory that was made, and what the weights in it are."""

    directory: Path
    weights: Stored


@contextmanager
def staged(directory: Path, called: str) -> Iterator[Staged]:
    """What is loaded of a directory, checked, as long as it takes to load. called: as a hub knows
    it, else the directory's name. Raises InvalidWeights for what is missing or out of bounds,
    MemstoreError without a temporary directory.
    """
    if (directory / "adapter_config.json").exists() and not (directory / _CONFIG).exists():
        raise InvalidWeights(
            f"{directory} is an adapter and no model; merge it into its model (peft: "
            "merge_and_unload), save that, and name its directory"
        )
    with _temporary() as temporary:
        new = temporary / called
        new.mkdir(parents=True)
        weights = _weights(directory)
        for file in weights:
            (new / file.name).symlink_to(file.resolve())
        if (directory / INDEX).exists() and len(weights) > 1:
            _link(directory, new, INDEX)
        configuration = checked_configuration(directory / _CONFIG)
        configuration.setdefault("_name_or_path", called)
        _write(new / _CONFIG, configuration)
        for name in (_TOKENIZER_CONFIG, _SPECIAL):
            if (directory / name).exists():
                _write(new / name, _of_tokenizer(read_settings(directory / name)))
        if (directory / _GENERATION).exists():
            _write(new / _GENERATION, _numbers(read_settings(directory / _GENERATION)))
        if (directory / _TEMPLATE).exists():
            read_file(directory / _TEMPLATE)
            _link(directory, new, _TEMPLATE)
        whole = (directory / TOKENIZER).exists()
        for name in (TOKENIZER,) if whole else _VOCABULARIES:
            if (directory / name).exists():
                check_file(directory / name, TOKENIZER_BYTES)
                _link(directory, new, name)
        yield Staged(new, stored(weights))


@contextmanager
def staged_alone(file: Path) -> Iterator[Path]:
    """The directory of a link to a file, with nothing beside it. Raises MemstoreError."""
    with _temporary() as temporary:
        _link(file.parent, temporary, file.name)
        yield temporary


@contextmanager
def _temporary() -> Iterator[Path]:
    with ExitStack() as stack:
        try:
            made = TemporaryDirectory(prefix="memstore-model-", ignore_cleanup_errors=True)
            path = stack.enter_context(made)
        except OSError as error:
            raise MemstoreError(
                f"no temporary directory to load a model from: {error.strerror}; make room, or set "
                "TMPDIR"
            ) from None
        yield Path(path)


def _weights(directory: Path) -> list[Path]:
    """The files that hold a model's weights. Raises InvalidWeights."""
    if (directory / WEIGHTS).exists():
        return [directory / WEIGHTS]
    if not (directory / INDEX).exists():
        raise InvalidWeights(
            f"{directory} cannot be loaded as a Hugging Face model: {WEIGHTS} is missing, and only "
            "safetensors are read"
        )
    try:
        names = set(from_json(read_file(directory / INDEX), _Index).weight_map.values())
    except ValueError as error:
        raise InvalidWeights(f"{directory / INDEX} is no index of weights: {error}") from None
    if not 0 < len(names) <= _MOST_SHARDS:
        raise InvalidWeights(f"{directory / INDEX} names {len(names):,} files")
    return [directory / name for name in sorted(names)]


def _of_tokenizer(values: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer's own settings."""
    return {
        name: value
        for name, value in values.items()
        if not (name in _OURS or name.startswith("_") or name.endswith(("_file", "_files")))
    }


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Settings of `generate` that are numbers, or lists of some."""

    def number(value: Any) -> bool:
        return value is None or isinstance(value, bool | int | float)

    return {
        name: value
        for name, value in values.items()
        if not name.startswith("_")
        and (number(value) or (isinstance(value, list) and all(map(number, value))))
    }


def _link(directory: Path, new: Path, name: str) -> None:
    (new / name).symlink_to((directory / name).resolve())


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values), encoding="utf-8")
