"""Where a model computes, and in which numbers: as users name it, before torch is imported."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Compute:
    """device: cpu, cuda, mps, or auto for the fastest that there is. dtype: float32, bfloat16,
    float16; None or auto for bfloat16 where that is clearly faster. weights: that tokens are
    generated with (memstore.hf.quantized_weights.Weights): auto, full, int8, int4.
    """

    device: str = "cpu"
    dtype: str | None = None
    weights: str = "auto"
