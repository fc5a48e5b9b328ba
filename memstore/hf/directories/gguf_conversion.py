"""A GGUF file as a directory of safetensors, made once in the cache directory."""

import os
from pathlib import Path
from typing import Any, cast

import torch

from memstore.errors import InvalidWeights, MemstoreError
from memstore.hf.checks.configuration import building_within
from memstore.hf.checks.gguf_header import check_gguf
from memstore.hf.checks.loading import LOCAL, first_line, whole
from memstore.hf.checks.staging import staged_alone
from memstore.hf.directories.new_directory import new_directory
from memstore.hf.tokenizer import without_panics
from memstore.hf.weights import cache_directory

_ONE_FILE = "1000TB"  # larger than any model: one file says that all of it is there


def converted(file: Path) -> Path:
    """A GGUF file as a directory of safetensors, made once. Raises InvalidWeights, InvalidInput."""
    target = converted_at(file)
    if (target / "model.safetensors").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with new_directory(target.parent, ".converting-") as temporary:
        _convert(file, temporary)
        try:
            temporary.rename(target)
        except OSError:  # another process was faster
            if not (target / "model.safetensors").is_file():
                raise
        return target


def converted_at(file: Path) -> Path:
    """Where that directory is, or will be."""
    status = file.stat()
    return cache_directory() / "models" / f"{file.stem}-{status.st_size}-{status.st_mtime_ns}"


def _is_damaged(file: Path) -> bool:
    """Is a GGUF file unreadable, because its end is missing, for instance?"""
    from gguf import GGUFReader

    try:
        GGUFReader(file)
    except (OSError, ValueError, IndexError, KeyError):
        return True
    return False


def _convert(file: Path, directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    size, tensors = check_gguf(file)
    named = {"gguf_file": file.name, **LOCAL}
    with staged_alone(file) as given, without_panics(file):
        try:
            tokenizer = AutoTokenizer.from_pretrained(given, **named)
            with building_within(file, size, tensors):
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    given, dtype=torch.float32, output_loading_info=True, **named
                )
        except MemstoreError:
            raise
        except Exception as error:
            raise InvalidWeights(
                f"{file} is cut short or damaged; download it again"
                if _is_damaged(file)
                else f"transformers cannot read {file} as a model: {first_line(error)}"
            ) from error
    model = whole(loaded, file)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    cast(Any, model).hf_quantizer = None
    model.save_pretrained(directory, max_shard_size=_ONE_FILE)
    tokenizer.save_pretrained(directory)
    for written in directory.iterdir():
        os.chmod(written, 0o600)
