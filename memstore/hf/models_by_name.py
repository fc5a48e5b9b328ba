"""Find a model by the name that a user or a memory gives it: the landmark model that ships, a
directory of `memstore train`, or a Hugging Face model. Imports torch and transformers only to load
a model.
"""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from memstore.compute import Compute
from memstore.disk.format.signature import Signature
from memstore.errors import InvalidConfig, InvalidInput, install_extra
from memstore.hf.model_directory import PACKAGED
from memstore.model.landmark import SHIPPED_NAME
from memstore.paths import expanded

if TYPE_CHECKING:
    from memstore.model.model_api import ModelAPI
    from memstore.model.passages.adaptation import Adaptation

MODEL_VARIABLE = "MEMSTORE_MODEL"
DEFAULT = Compute()


def reader_named(
    name: str | Path, *, compute: Compute = DEFAULT, adaptation: "Adaptation | None" = None
) -> "ModelAPI":
    """Load the model that ships, one that `memstore train` wrote, or a Hugging Face model (see
    memstore.hf.load.load_reader).

    compute: see Compute; a landmark model has no quantized weights. adaptation: of a Hugging Face
    model, see load_reader. Raises InvalidInput, InvalidWeights, InvalidConfig.
    """
    from memstore.devices import dtype_named

    number_format = dtype_named(compute.dtype)
    # a packaged model's name means that model, even where a directory has the same name
    if name == SHIPPED_NAME or (str(name) not in PACKAGED and _is_ours(expanded(name))):
        import torch

        from memstore.hf.quantized_weights import weights_named
        from memstore.model.landmark.landmark_model import load_model

        if weights_named(compute.weights, torch.device("cpu")) in ("int8", "int4"):
            raise InvalidConfig(
                f"a landmark model has no {compute.weights} weights; choose auto or full"
            )
        given = {} if number_format is None else {"dtype": number_format}
        return load_model(name, device=compute.device, **given)
    check_transformers()
    from memstore.hf.load import load_reader

    return load_reader(
        name,
        device=compute.device,
        dtype=number_format,
        weights=compute.weights,
        adaptation=adaptation,
    )


def reader_of(
    signature: Signature, where: str, name: str | Path | None = None, *, compute: Compute = DEFAULT
) -> "ModelAPI":
    """Load the model of a memory: `name`, or the one it was made with if this machine has it.

    where: the memory's place, for errors. Raises WrongModel for another model, InvalidInput if the
    user must name the model, and what reader_named raises.
    """
    named = name_of(signature, where, name)
    reader = reader_named(named, compute=compute)
    reader.signature.check_same(signature, where, "ask it with its own model, or make a new memory")
    return reader


def name_of(signature: Signature, where: str, name: str | Path | None = None) -> str | Path:
    """The name that `reader_named` accepts for the model of a memory: see reader_of. Raises
    InvalidInput for a model that this machine lacks, or that only the hub may have.
    """
    model = signature.model
    if name or model is None:  # the memory does not say
        return name or default_name()
    source, made = model.source, f"{where} was made with {model.title}"
    if source is None:
        raise InvalidInput(f"{made}; name that model's directory or file with --model")
    if source == SHIPPED_NAME or source in PACKAGED or source == os.environ.get(MODEL_VARIABLE):
        return source
    if not Path(source).is_absolute():
        raise InvalidInput(
            f"{made}, a model of the Hugging Face hub; memstore downloads it only if you name it: "
            f"--model {source}"
        )
    if not Path(source).exists():
        raise InvalidInput(f"{made}, and {source} is no longer there; name it with --model")
    return source


def default_name() -> str:
    """The default model of a new memory: $MEMSTORE_MODEL, else an installed packaged model, else
    the landmark model that ships.
    """
    if os.environ.get(MODEL_VARIABLE):
        return os.path.expanduser(os.environ[MODEL_VARIABLE])
    if find_spec("transformers") is not None:
        for name, package in PACKAGED.items():
            if find_spec(package) is not None:
                return name
    return SHIPPED_NAME


def check_transformers() -> None:
    """Raises InvalidConfig if transformers is missing."""
    if find_spec("transformers") is None:
        raise InvalidConfig(f"Hugging Face models need transformers: {install_extra('hf')}")


def _is_ours(directory: Path) -> bool:
    """Whether `memstore train` wrote this directory, by config.json. Raises InvalidWeights."""
    from memstore.paths import read_file

    if not directory.is_dir():
        return False
    path = directory / "config.json"
    if not path.exists():
        return True
    try:
        config = json.loads(read_file(path))
    except (ValueError, RecursionError):
        return True
    return not (isinstance(config, dict) and "model_type" in config)
