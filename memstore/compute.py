"""The device and number formats of a model, as users name them, before torch is imported."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Compute:
    """device: cpu, cuda, mps, or auto for the fastest available. dtype: float32, bfloat16, float16;
    None or auto for bfloat16 if it is clearly faster. weights: for generated tokens
    (memstore.hf.quantized_weights.Weights): auto, full, int8, int4.
    """

    device: str = "cpu"
    dtype: str | None = None
    weights: str = "auto"
