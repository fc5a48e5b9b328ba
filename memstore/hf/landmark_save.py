"""A landmark-trained decoder as a directory: weights with adapters merged in, tokenizer, and the
file of landmarks.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memstore.hf.checks import quiet
from memstore.hf.landmark_decoder import LandmarkDecoder
from memstore.hf.landmark_spec import save_landmarks
from memstore.hf.lora import merged_weights
from memstore.hf.model_directory import new_directory

_SAVING = ".saving-"


class Saver:
    """Writes directories of a model that is trained in another dtype than it is stored in."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        """model: as it was loaded."""
        self._dtype: torch.dtype = model.dtype
        self._tokenizer = tokenizer

    def save(self, decoder: LandmarkDecoder, directory: Path) -> None:
        """Every file is replaced whole. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        with new_directory(directory, _SAVING) as temporary:
            with quiet():
                decoder.model.save_pretrained(temporary, state_dict=self._weights(decoder))
            self._tokenizer.save_pretrained(temporary)
            _set_dtype(temporary / "config.json", self._dtype)
            save_landmarks(decoder.spec, dict(decoder.rows.items()), temporary)
            for file in sorted(temporary.iterdir(), key=lambda file: file.suffix != ".safetensors"):
                file.chmod(0o644)
                file.replace(directory / file.name)

    def _weights(self, decoder: LandmarkDecoder) -> dict[str, Tensor]:
        """On the CPU in the stored dtype; tied ones stay one."""
        converted: dict[int, Tensor] = {}
        weights = merged_weights(decoder.model)
        return {
            name: converted.setdefault(
                tensor.data_ptr(), tensor.detach().to("cpu", self._dtype).contiguous()
            )
            for name, tensor in weights.items()
        }


def _set_dtype(path: Path, dtype: torch.dtype) -> None:
    """Say in a configuration of what dtype the weights are."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
