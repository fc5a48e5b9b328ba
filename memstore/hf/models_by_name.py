"""Models by whatever name a user has for one: the model that ships, a directory that `memstore
train` wrote, or a Hugging Face model. Imports none of them before it is asked for.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from memstore.hf.needed import PACKAGED, check_transformers

if TYPE_CHECKING:
    from memstore.model.model_api import ModelAPI
    from memstore.model.passages.selectors.adaptation import Adaptation


def reader_named(
    name: str | Path | None, *, own_process: bool = False, adaptation: "Adaptation | None" = None
) -> "ModelAPI":
    """The model that ships (None, or its name), one that `memstore train` wrote, or a Hugging Face
    model: see memstore.hf.load.load_reader.

    own_process: this process does nothing else, and a small model may set how many threads torch
    uses. adaptation: of a Hugging Face model, as load_reader takes it. Raises InvalidInput,
    InvalidWeights, InvalidConfig.
    """
    from memstore.model.landmark.checkpoint import SHIPPED_NAME

    # what is packaged is meant whatever the working directory holds
    if name is None or name == SHIPPED_NAME or (str(name) not in PACKAGED and _is_ours(Path(name))):
        from memstore.model.landmark.landmark_model import load_model, load_model_for_command

        return load_model_for_command(name) if own_process else load_model(name)
    check_transformers()
    from memstore.hf.load import load_reader

    return load_reader(name, adaptation=adaptation)


def _is_ours(directory: Path) -> bool:
    """Did `memstore train` write it? (A directory that says nothing may have been meant to be.)
    Raises InvalidWeights.
    """
    from memstore.model.model_files import read_file

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
