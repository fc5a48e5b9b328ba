"""A transformers decoder with landmarks: two embedding rows of its own beside the vocabulary, and
the attention of the landmark model in the place of its own.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from memstore.errors import InvalidWeights
from memstore.hf.decoder import AttachedDecoder
from memstore.hf.generation.quantized_products import Weights
from memstore.hf.landmark_spec import LandmarkSpec
from memstore.kernels.api import local_attention
from memstore.model.adapter import Attend, Enter, Shape
from memstore.model.rotary import Rope

_DISTANCE = 5  # blocks, at which a query sees every old one


class LandmarkDecoder(nn.Module):
    """What training and reading share: hidden states under an attention of the caller's, logits,
    and the context miss token's keys. Differentiable in the model's weights and the two rows.
    """

    def __init__(
        self,
        model: Any,
        spec: LandmarkSpec,
        rows: Mapping[str, Tensor] | None = None,
        generating: Weights = "auto",
    ) -> None:
        """rows: embeddings of "landmark" and, with a gate, "cmt", [hidden_size]; None to begin with
        the mean of the vocabulary's. generating: the weights that tokens are generated with.

        Raises InvalidWeights for an architecture that cannot attend by landmarks.
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
        usual = attached.head_dim**-0.5
        self._scales = [layer.scale / usual for layer in attached.forms]
        attached.compare(self._one_block)

    def _one_block(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention within one block that has no landmark yet: the model's own."""
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
    ) -> Tensor:
        """As ModelAdapter.hidden; ids: of the vocabulary, or `landmark_id`."""
        is_landmark = ids == self.landmark_id
        embedded = self.model.get_input_embeddings()(ids.masked_fill(is_landmark, 0))
        row = self.rows["landmark"].to(embedded.dtype)
        embedded = torch.where(is_landmark[..., None], row, embedded)
        return self._run(embedded, attend, layers=layers, enter=enter, quantized=quantized)

    def _run(self, embedded: Tensor, attend: Attend, **options: Any) -> Tensor:
        def scaled(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scale = self._scales[layer_idx]
            return attend(layer_idx, q if scale == 1 else q * scale, k, v)

        return self.attached.hidden(embedded, scaled, **options)

    def logits(self, states: Tensor, *, quantized: bool = False) -> Tensor:
        """As ModelAdapter.logits: the landmark is none of them."""
        return self.attached.logits(states, quantized=quantized)

    def cmt_keys(self) -> list[Tensor] | None:
        """The context miss token's key of every layer, [Hkv, D], at position -1; None without a
        gate. It passes through the layers with zero attention output (docs/appendix/method.md
        section 3).
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
    """The sizes of a decoder that reads so. Raises InvalidWeights where it cannot."""
    layers, name = attached.num_layers, attached.name
    reach = (spec.top_k + spec.chunk_blocks + 1) * spec.stride
    for layer in attached.forms:
        if layer.softcap is not None:
            raise InvalidWeights(
                f"{name} caps its attention scores; the grouped softmax of landmarks has no caps, "
                "so it cannot be trained with landmarks"
            )
        if layer.window is not None and layer.window < reach:
            raise InvalidWeights(
                f"{name} has layers that see {layer.window} tokens, fewer than the {reach} of a "
                "chunk and its latest blocks; it cannot be trained with landmarks of this block "
                "size"
            )
    memory_layers = spec.memory_layers or tuple(range(min(1, layers - 1), layers))
    if not 0 <= min(memory_layers) <= max(memory_layers) < layers:
        raise InvalidWeights(
            f"memory layers {memory_layers} do not lie in {name}'s {layers} layers"
        )
    return Shape(
        num_layers=layers,
        memory_layers=memory_layers,
        hidden_size=cast(int, attached.config.hidden_size),
        num_heads=attached.heads,
        num_kv_heads=attached.kv_heads,
        head_dim=attached.head_dim,
        block_size=spec.block_size,
        old_block_distance=_DISTANCE * spec.stride,
        kv_dtype=getattr(torch, spec.kv_dtype),
    )
