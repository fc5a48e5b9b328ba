"""What a landmark-trained directory says beside its weights: one file of its landmark's and context
miss token's embeddings, with the sizes that it was trained for.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from memstore.decode import Layer, Share, from_json
from memstore.disk.files import replacement
from memstore.errors import InvalidInput, InvalidWeights
from memstore.model.lookup_settings import LOOKUP_SETTINGS, LookupSettings

FILE = "landmarks.safetensors"
_KEY = "memstore.landmarks"
_Size = Annotated[int, Meta(ge=1, le=1024)]


@dataclass(frozen=True)
class LandmarkSpec:
    """How a Hugging Face decoder reads with landmarks; fixed when it is trained, but for the
    settings of a lookup.
    """

    block_size: _Size = 32  # content tokens in a block; its landmark is one more position
    top_k: _Size = 4
    chunk_blocks: Annotated[int, Meta(ge=1, le=256)] = 8
    cmt_cutoff: Share = 0.1
    cmt: bool = True  # a context miss token and its gate
    # layers that look blocks up; empty = all but the first
    memory_layers: tuple[Layer, ...] = ()
    kv_dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float16"

    @property
    def stride(self) -> int:
        """Positions of a block with its landmark."""
        return self.block_size + 1

    @property
    def trained(self) -> dict[str, Any]:
        """As plain values, without the settings of a lookup: what is trained and stored."""
        values = asdict(self) | {"memory_layers": list(self.memory_layers)}
        return {name: value for name, value in values.items() if name not in LOOKUP_SETTINGS}

    @property
    def lookup(self) -> LookupSettings:
        """What lookups do unless told otherwise. Raises InvalidInput."""
        return LookupSettings(
            top_k=self.top_k, cmt_cutoff=self.cmt_cutoff, chunk_blocks=self.chunk_blocks
        )


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Literal[1]
    form: LandmarkSpec


def save_landmarks(spec: LandmarkSpec, rows: Mapping[str, Tensor], directory: Path) -> None:
    """Write the file, whole. rows: "landmark" and, with a gate, "cmt", [hidden_size]. Raises
    OSError.
    """
    header = json.dumps({"version": 1, "form": asdict(spec)})
    tensors = {name: row.detach().cpu().contiguous() for name, row in rows.items()}
    with replacement(directory / FILE, mode=0o644) as file:
        file.write(save(tensors, {_KEY: header}))


def load_landmarks(directory: Path, hidden_size: int) -> tuple[LandmarkSpec, dict[str, Tensor]]:
    """What `save_landmarks` wrote. Raises InvalidWeights for a file that is damaged, or of a model
    of another width.
    """
    path = directory / FILE
    try:
        with safe_open(path, "pt") as file:
            spec = from_json((file.metadata() or {})[_KEY], _Header).form
            names = list(file.keys())
            fits = all(file.get_slice(name).get_shape() == [hidden_size] for name in names)
            rows = {name: file.get_tensor(name) for name in names} if fits else {}
        _ = spec.lookup
    except OSError as error:
        raise InvalidWeights(f"cannot read {path}: {error}") from None
    except (SafetensorError, KeyError, ValueError, InvalidInput) as error:
        raise InvalidWeights(
            f"{path} is no file of landmarks of this version ({error}); train the model again"
        ) from None
    fits = rows.keys() == ({"landmark", "cmt"} if spec.cmt else {"landmark"}) and all(
        row.is_floating_point() and bool(torch.isfinite(row).all()) for row in rows.values()
    )
    if not fits:
        raise InvalidWeights(f"{path} is damaged, or of another model than the weights beside it")
    return spec, rows
