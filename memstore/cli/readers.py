"""The reader that a command was asked for by name."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memstore.model.verbs import Verbs


def reader_for_command(name: str | None) -> "Verbs":
    """`memstore.hf.named.reader_named`, for a process that does nothing else."""
    from memstore.hf.named import reader_named

    return reader_named(name, own_process=True)
