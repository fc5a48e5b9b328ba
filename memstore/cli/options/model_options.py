"""Which model a command takes, and where and in which numbers it computes."""

import os
from dataclasses import dataclass
from typing import Annotated

from memstore.cli.options.command_options import option
from memstore.compute import Compute

Model = Annotated[
    str | None,
    option(
        "--model",
        "MODEL",
        "A model's directory or GGUF file, its name on the Hugging Face hub, smollm2 or books-1m; "
        "default: the one that the memory was made with; of a new one $MEMSTORE_MODEL, else "
        "smollm2 where its package is installed, else books-1m.",
        parser=os.path.expanduser,
    ),
]
Device = Annotated[
    str, option("--device", "auto|cpu|cuda|mps", "Where the model computes and keeps blocks.")
]
Dtype = Annotated[
    str,
    option(
        "--dtype",
        "auto|float32|bfloat16|float16",
        "Numbers that it computes in; auto: bfloat16 where that is clearly faster.",
    ),
]
Weights = Annotated[
    str,
    option(
        "--weights",
        "auto|full|int8|int4",
        "Weights that tokens are generated with, on a CPU; auto: 4 bits where they were stored so, "
        "else 8; full: as loaded. What is stored is computed with those as loaded.",
    ),
]


@dataclass(frozen=True)
class ModelOptions:
    """The model of a command: an option a field."""

    model: Model = None
    device: Device = "auto"
    dtype: Dtype = "auto"
    weights: Weights = "auto"

    @property
    def compute(self) -> Compute:
        """Where and in which numbers."""
        return Compute(self.device, self.dtype, self.weights)
