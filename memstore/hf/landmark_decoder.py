"""A landmark model built on a transformers decoder: the decoder's own code runs with landmark
attention and two extra embedding rows. `landmarks.safetensors` in the model's directory stores
these rows and the LandmarkSpec.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec
import torch
from msgspec import Meta
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from memstore.decode import Layer, Share, from_json
from memstore.disk.files import replacement
from memstore.disk.format.signature import ModelName, Signature
from memstore.errors import InvalidConfig, InvalidInput, InvalidWeights, install_extra
from memstore.hf.decoder import AttachedDecoder
from memstore.hf.model_directory import new_directory, quiet
from memstore.hf.quantized_weights import Weights
from memstore.hf.tokenizer import LandmarkTokenizer
from memstore.hf.weights import digest_of
from memstore.kernels.api import local_attention
from memstore.model.adapter import Attend, Enter, Shape
from memstore.model.landmark.landmark_session import LandmarkAPI
from memstore.model.lookup_settings import LOOKUP_SETTINGS, LookupSettings
from memstore.model.rotary import Rope

FILE = "landmarks.safetensors"
_KEY = "memstore.landmarks"
_OLD_BLOCK_DISTANCE = 5  # blocks; the distance at which a query sees every old block
_Size = Annotated[int, Meta(ge=1, le=1024)]


@dataclass(frozen=True)
class LandmarkSpec:
    """Sizes and settings of a decoder with landmarks. Training fixes all but LOOKUP_SETTINGS."""

    block_size: _Size = 32  # content tokens in a block; its landmark is one more position
    top_k: _Size = 4
    chunk_blocks: Annotated[int, Meta(ge=1, le=256)] = 8
    cmt_cutoff: Share = 0.1
    cmt: bool = True  # has a context miss token and its gate
    # layers that retrieve blocks; empty: all but the first
    memory_layers: tuple[Layer, ...] = ()
    kv_dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float16"

    @property
    def stride(self) -> int:
        """Positions that a block and its landmark take."""
        return self.block_size + 1

    @property
    def trained(self) -> dict[str, Any]:
        """The settings that training fixes, as JSON values."""
        values = asdict(self) | {"memory_layers": list(self.memory_layers)}
        return {name: value for name, value in values.items() if name not in LOOKUP_SETTINGS}

    @property
    def lookup(self) -> LookupSettings:
        """Default lookup settings. Raises InvalidInput if they are invalid."""
        return LookupSettings(
            top_k=self.top_k, cmt_cutoff=self.cmt_cutoff, chunk_blocks=self.chunk_blocks
        )


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Literal[1]
    form: LandmarkSpec


def save_landmarks(spec: LandmarkSpec, rows: Mapping[str, Tensor], directory: Path) -> None:
    """Write the landmark file atomically. Raises OSError.

    rows: embeddings [hidden_size] of "landmark" and, if spec.cmt, of "cmt".
    """
    header = json.dumps({"version": 1, "form": asdict(spec)})
    tensors = {name: row.detach().cpu().contiguous() for name, row in rows.items()}
    with replacement(directory / FILE, mode=0o644) as file:
        file.write(save(tensors, {_KEY: header}))


def load_landmarks(directory: Path, hidden_size: int) -> tuple[LandmarkSpec, dict[str, Tensor]]:
    """Read the file of `save_landmarks`. Raises InvalidWeights for a damaged file, or a file of a
    model of another hidden_size.
    """
    path = directory / FILE
    try:
        with safe_open(path, "pt") as file:
            spec = from_json((file.metadata() or {})[_KEY], _Header).form
            rows = {name: file.get_tensor(name) for name in list(file.keys())}
        _ = spec.lookup  # raises InvalidInput
    except OSError as error:
        raise InvalidWeights(f"cannot read {path}: {error}") from None
    except (SafetensorError, KeyError, ValueError, InvalidInput) as error:
        raise InvalidWeights(
            f"{path} is not a landmark file of this version ({error}); train the model again"
        ) from None
    fits = all(row.shape == (hidden_size,) and bool(row.isfinite().all()) for row in rows.values())
    if not fits or rows.keys() != ({"landmark", "cmt"} if spec.cmt else {"landmark"}):
        raise InvalidWeights(f"{path} is damaged, or belongs to another model's weights")
    return spec, rows


class LandmarkDecoder(nn.Module):
    """A decoder with landmarks, for training and inference: hidden states under the caller's
    attention, logits, and the context miss token's keys. Differentiable with respect to the
    model's weights and the two rows.
    """

    def __init__(
        self,
        model: Any,
        spec: LandmarkSpec,
        rows: Mapping[str, Tensor] | None = None,
        generating: Weights = "auto",
    ) -> None:
        """Raises InvalidWeights for an architecture that cannot attend by landmarks.

        rows: as in save_landmarks; None: both start as the mean embedding of the vocabulary.
        generating: format of the weights for generated tokens.
        """
        super().__init__()
        self.model = model
        self.attached = attached = AttachedDecoder(model, generating)
        vocabulary: Tensor = model.get_input_embeddings().weight
        self.spec, self.lookup = spec, spec.lookup
        self.rope: Rope = attached.rotary.rope(attached.head_dim)
        self.shape = _shape(attached, spec)
        self.landmark_id = len(vocabulary)
        if rows is None:
            mean = vocabulary.detach().mean(0)
            rows = {"landmark": mean, **({"cmt": mean.clone()} if spec.cmt else {})}
        self.rows = nn.ParameterDict({name: nn.Parameter(row) for name, row in rows.items()})
        default = attached.head_dim**-0.5
        self._scales = [layer.scale / default for layer in attached.forms]
        attached.compare(self._plain_attention)

    def _plain_attention(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention in one block without a landmark; it must equal the stock model's."""
        angles = self.rope.angles(0, q.shape[2], q)
        q = q * self.attached.forms[layer_idx].scale
        return local_attention(
            self.rope.rotate(q, *angles), self.rope.rotate(k, *angles), v, q.shape[2]
        ).output

    @property
    def device(self) -> torch.device:
        return self.attached.device

    @property
    def dtype(self) -> torch.dtype:
        return self.attached.dtype

    def hidden(
        self,
        ids: Tensor,
        attend: Attend,
        *,
        layers: int | None = None,
        enter: Enter | None = None,
        quantized: bool = False,
        adapt: bool = False,
    ) -> Tensor:
        """See ModelAdapter.hidden; ids [B, T] of the vocabulary, or `landmark_id`."""
        is_landmark = ids == self.landmark_id
        embedded = self.model.get_input_embeddings()(ids.masked_fill(is_landmark, 0))
        row = self.rows["landmark"].to(embedded.dtype)
        embedded = torch.where(is_landmark[..., None], row, embedded)
        return self._run(embedded, attend, layers=layers, enter=enter, quantized=quantized)

    def _run(self, embedded: Tensor, attend: Attend, **options: Any) -> Tensor:
        """Run embeddings [B, T, hidden_size]; `attend` gets queries for scale head_dim**-0.5."""

        def scaled(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scale = self._scales[layer_idx]
            return attend(layer_idx, q if scale == 1 else q * scale, k, v)

        return self.attached.hidden(embedded, scaled, **options)

    def logits(self, states: Tensor, *, quantized: bool = False) -> Tensor:
        """See ModelAdapter.logits; the landmark has no logit."""
        return self.attached.logits(states, quantized=quantized)

    def cmt_keys(self) -> list[Tensor] | None:
        """The context miss token's key in every layer, [Hkv, D], at position -1; None if not
        spec.cmt. Its attention output is zero in every layer (docs/appendix/method.md section 3).
        """
        if not self.spec.cmt:
            return None
        keys: list[Tensor] = []

        def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys.append(self.rope.rotate(k, *self.rope.angles(-1, 0, k))[0, :, 0])
            return torch.zeros_like(q)

        self._run(self.rows["cmt"].to(self.dtype)[None, None], attend)
        return keys


def _shape(attached: AttachedDecoder, spec: LandmarkSpec) -> Shape:
    """The sizes of a decoder with landmarks. Raises InvalidWeights if landmarks do not fit it."""
    layers, name = attached.num_layers, attached.name
    reach = (spec.top_k + spec.chunk_blocks + 1) * spec.stride
    for layer in attached.forms:
        if layer.softcap is not None:
            raise InvalidWeights(
                f"{name} caps its attention scores, which the grouped softmax does not support; it "
                "cannot be trained with landmarks"
            )
        if layer.window is not None and layer.window < reach:
            raise InvalidWeights(
                f"{name} has layers that see {layer.window} tokens, fewer than the {reach} of a "
                "chunk and its latest blocks; it cannot be trained with landmarks of this block "
                "size"
            )
    memory_layers = spec.memory_layers or tuple(range(min(1, layers - 1), layers))
    if not 0 <= min(memory_layers) <= max(memory_layers) < layers:
        raise InvalidWeights(f"memory layers {memory_layers} are outside {name}'s {layers} layers")
    return Shape(
        num_layers=layers,
        memory_layers=memory_layers,
        hidden_size=cast(int, attached.config.hidden_size),
        num_heads=attached.heads,
        num_kv_heads=attached.kv_heads,
        head_dim=attached.head_dim,
        block_size=spec.block_size,
        old_block_distance=_OLD_BLOCK_DISTANCE * spec.stride,
        kv_dtype=getattr(torch, spec.kv_dtype),
    )


class HuggingFaceLandmarkModel(LandmarkAPI):
    """A LandmarkDecoder and a transformers tokenizer as a model adapter."""

    cmt_values = None

    def __init__(
        self,
        decoder: LandmarkDecoder,
        tokenizer: Any,
        *,
        weights: str | None = None,
        called: ModelName | None = None,
    ) -> None:
        """weights: hex digest of the decoder's weights, if known. called: the model's name,
        stored in its memories. Raises InvalidWeights for a tokenizer that changes the text.
        """
        self.decoder = decoder.requires_grad_(False).eval()
        self.shape, self.lookup, self.rope = decoder.shape, decoder.lookup, decoder.rope
        self.landmark_id = decoder.landmark_id
        self.tokenizer: LandmarkTokenizer = LandmarkTokenizer(tokenizer, decoder.landmark_id)
        self._weights, self._called = weights or digest_of(decoder), called
        with torch.no_grad():
            self.cmt_keys = decoder.cmt_keys()

    @cached_property
    def signature(self) -> Signature:
        """The signature of memories made with this model, its landmarks and its tokenizer."""
        return self.decoder.attached.signature(
            self.shape,
            weights=self._weights,
            tokenizer=self.tokenizer.fingerprint,
            model=self._called,
            landmarks=self.decoder.spec.trained,
        )

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.dtype

    def hidden(
        self,
        ids: Tensor,
        attend: Attend,
        *,
        layers: int | None = None,
        enter: Enter | None = None,
        quantized: bool = False,
        adapt: bool = False,
    ) -> Tensor:
        return self.decoder.hidden(ids, attend, layers=layers, enter=enter, quantized=quantized)

    def logits(self, states: Tensor, *, quantized: bool = False) -> Tensor:
        return self.decoder.logits(states, quantized=quantized)


# Training: low-rank adapters (LoRA, arXiv 2106.09685) from peft, merged where a model is saved

_BASE, _ADAPTER = "base_layer.", "lora_"  # in the names of an adapted model's weights


def add_adapters(model: nn.Module, rank: int, seed: int) -> None:
    """Add adapters of a rank to every linear layer but the head, and freeze all other weights. What
    the model computes stays the same until they are trained. Raises InvalidConfig without peft.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise InvalidConfig(
            f"adapters need peft: {install_extra('hf')}, or train all weights (--full)"
        ) from error
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)
    for module in _adapted(model).values():
        # under autocast, peft would cast inputs up and autocast would cast them down again
        module.cast_input_dtype_enabled = False


@torch.no_grad()
def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's weights with adapters merged in, named as without adapters."""
    adapted, weights = _adapted(model), {}
    for name, tensor in model.state_dict().items():
        if _ADAPTER in name:
            continue
        layer, _, kind = name.rpartition(_BASE)
        if layer and kind == "weight":
            module = adapted[layer.removesuffix(".")]
            for adapter in module.active_adapters:
                tensor = tensor + module.get_delta_weight(adapter).to(tensor.dtype)
        weights[name.replace(_BASE, "")] = tensor
    return weights


def _adapted(model: nn.Module) -> dict[str, Any]:
    """The layers of a model that have adapters, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


class Saver:
    """Writes directories of a model that is trained in another dtype than it is stored in."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        """model: as it was loaded."""
        self._dtype: torch.dtype = model.dtype
        self._tokenizer = tokenizer

    def save(self, decoder: LandmarkDecoder, directory: Path) -> None:
        """Write a directory; each file is replaced as a whole. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        with new_directory(directory) as temporary:
            with quiet():
                decoder.model.save_pretrained(temporary, state_dict=self._weights(decoder))
            self._tokenizer.save_pretrained(temporary)
            path = temporary / "config.json"
            config = json.loads(path.read_text(encoding="utf-8"))
            config["dtype"] = str(self._dtype).removeprefix("torch.")
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            save_landmarks(decoder.spec, dict(decoder.rows.items()), temporary)
            for file in sorted(temporary.iterdir(), key=lambda file: file.suffix != ".safetensors"):
                file.chmod(0o644)
                file.replace(directory / file.name)

    def _weights(self, decoder: LandmarkDecoder) -> dict[str, Tensor]:
        """The weights on the CPU in the stored dtype; tied weights stay one tensor."""
        converted: dict[int, Tensor] = {}
        return {
            name: converted.setdefault(
                tensor.data_ptr(), tensor.detach().to("cpu", self._dtype).contiguous()
            )
            for name, tensor in merged_weights(decoder.model).items()
        }
