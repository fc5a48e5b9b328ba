"""The reader that a command was asked for by name."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memstore.model.model_api import ModelAPI


def reader_for_command(name: str | None) -> "ModelAPI":
    """`memstore.hf.models_by_name.reader_named`, for a process that does nothing else."""
    from memstore.hf.models_by_name import reader_named

    return reader_named(name, own_process=True)
