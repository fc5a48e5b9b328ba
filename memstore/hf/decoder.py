"""A transformers decoder that runs with the caller's attention; and its own rotary positions, which
are applied from outside. A forward pass over a short probe text finds its head sizes and how each
layer attends.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from memstore.errors import InvalidWeights
from memstore.hf.attention_seam import (
    ForwardCache,
    attach,
    difference_beyond_rounding,
    run_layers,
    takes_layer_type,
)
from memstore.hf.quantized_weights import MOST_ROWS, QuantizedWeights, Weights, as_loaded
from memstore.hf.reading_adapter import adapted
from memstore.hf.traced_step import TracedStep
from memstore.model.adapter import Attend, AttentionSpec, Enter
from memstore.model.rotary import Positions

_PROBE_TOKENS = 12
_UNSTEADY = {
    "dynamic": "its frequencies change with the length of the text (dynamic RoPE)",
    "longrope": "its frequencies change with the length of the text (LongRoPE)",
}
_TABLE = 4096  # positions to begin with


class _WithoutCudnn:
    """Disables cuDNN attention while any thread is inside: torch has one setting for the process.
    On Hopper torch prefers cuDNN, which plans 30 ms for every new shape, for an attention of
    0.03 ms; sequence lengths here are always new.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside, self._before = 0, True

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = torch.backends.cuda.cudnn_sdp_enabled()
                torch.backends.cuda.enable_cudnn_sdp(False)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.backends.cuda.enable_cudnn_sdp(self._before)


_without_cudnn = _WithoutCudnn()


class AttachedDecoder:
    """Runs an unchanged model with the caller's attention."""

    def __init__(self, model: Any, weights: Weights = "auto") -> None:
        """weights: format of the weights for generated tokens. Raises InvalidWeights for an
        architecture that cannot run with the caller's attention.
        """
        self.model = model.eval()
        self.config = model.config.get_text_config()
        self.name = type(model).__name__
        self._stack = attach(model)
        self._embeddings: nn.Embedding = model.get_input_embeddings()
        self._head: nn.Module = model.get_output_embeddings()
        self._step = TracedStep(self._stack)
        self.weights = QuantizedWeights(self._stack, self._head, weights)
        self.forms: Sequence[AttentionSpec] = ()
        self.heads, self.kv_heads, self.head_dim = 0, 0, 0
        self.rotary = ModelRotary(self._stack, self.config, self._probe())

    @property
    def device(self) -> torch.device:
        return self._embeddings.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embeddings.weight.dtype

    @property
    def num_layers(self) -> int:
        return len(cast(nn.ModuleList, self._stack.layers))

    def hidden(
        self,
        ids: Tensor,
        attend: Attend,
        *,
        layers: int | None = None,
        enter: Enter | None = None,
        quantized: bool = False,
        adapt: bool | Tensor = False,
    ) -> Tensor:
        """See ModelAdapter.hidden; adapt: as `adapted` takes it."""
        backend = nullcontext() if self.device.type == "cpu" else _without_cudnn
        used = self.weights.used() if quantized else as_loaded()
        with backend, adapted(adapt), used as version:
            if quantized and layers is None and ids.shape[1] == 1:
                few = len(ids) <= MOST_ROWS
                states = self._step(ids, attend, enter, version if few else 0, adapt is True)
                if states is not None:
                    return states
            return run_layers(self._stack, ids, ForwardCache(attend), layers=layers, enter=enter)

    def logits(self, states: Tensor, *, quantized: bool = False) -> Tensor:
        """States [.., hidden_size] -> float32 [.., vocabulary], as the model's own code computes
        them. quantized: see ModelAdapter.hidden.
        """
        config = self.config
        with self.weights.used(look=False) if quantized else as_loaded():
            logits = self._head(states.to(self.dtype)).float()
        logits = logits * (getattr(config, "logit_scale", None) or 1.0)
        logits = logits / (getattr(config, "logits_scaling", None) or 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        return logits if cap is None else cap * (logits / cap).tanh()

    def _probe(self) -> list[bool]:
        """Run the probe text: set the sizes and `forms`; return which layers rotate queries."""
        rotates: list[bool] = []
        shapes: list[tuple[tuple[int, ...], ...]] = []

        def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if layer_idx != len(shapes):
                raise InvalidWeights(
                    f"{self.name} does not attend once in every layer; it cannot be given a memory"
                )
            shapes.append((tuple(q.shape), tuple(k.shape), tuple(v.shape)))
            rotates.append(not bool(q[..., 0].any()))
            return torch.zeros_like(q)

        cache = ForwardCache(attend)
        cache.zero_rotation = True
        try:
            with torch.no_grad():
                run_layers(self._stack, self._probe_ids(), cache)
        except (RuntimeError, IndexError, TypeError, AttributeError) as error:
            raise InvalidWeights(
                f"{self.name} attends in a way not known here ({error}); it cannot be "
                "given a memory"
            ) from error
        layers = self.num_layers
        if not shapes or len(shapes) != layers:
            raise InvalidWeights(
                f"{self.name} attends in {len(shapes)} of its {layers} layers; it cannot be given "
                "a memory"
            )
        q, k, v = shapes[0]
        if set(shapes) != {(q, k, k)} or q[-1] != k[-1] or v != k:
            raise InvalidWeights(
                f"the layers of {self.name} have keys and values of different shapes; it cannot be "
                "given a memory"
            )
        self.heads, self.kv_heads, self.head_dim = q[1], k[1], q[-1]
        self.forms = [cache.forms[layer] for layer in range(layers)]
        return rotates

    def compare(self, attend: Attend) -> None:
        """Compare the probe text's logits under this attention with the stock model's. Raises
        InvalidWeights if they differ.
        """
        ids = self._probe_ids()
        with torch.no_grad():
            stock = self.model(input_ids=ids, use_cache=False).logits[0].float()
            ours = self.logits(self.hidden(ids, attend)[0])
        difference = difference_beyond_rounding(ours, stock, self.dtype)
        if difference is not None:
            raise InvalidWeights(
                f"{self.name} attends in a way not known here (its logits differ by "
                f"{difference:.2g}); it cannot be given a memory"
            )

    def _probe_ids(self) -> Tensor:
        size = self.config.vocab_size
        return torch.arange(1, 1 + _PROBE_TOKENS, device=self.device)[None] * 7 % size


# Rotary positions


class ModelRotary:
    """Rotates queries and keys [.., T, D] of a layer as the model's own code does, attention
    scaling included, by tables of its cosines and sines.
    """

    def __init__(self, decoder: nn.Module, config: Any, turned: Sequence[bool]) -> None:
        """decoder: attached (memstore.hf.attention_seam); turned: which layers have positions.

        Raises InvalidWeights for frequencies that change with the length.
        """
        rotary = cast(Any, decoder.rotary_emb).original
        for kind in _kinds(rotary):
            if kind in _UNSTEADY:
                raise InvalidWeights(
                    f"{config.model_type}: {_UNSTEADY[kind]}; what was stored under one length "
                    "would be wrong under another, so it cannot be given a memory"
                )
        self._rotary = rotary
        self._apply: Callable[..., tuple[Tensor, Tensor]] = sys.modules[
            type(decoder).__module__
        ].apply_rotary_pos_emb
        layers = len(cast(nn.ModuleList, decoder.layers))
        self._types: list[str | None] = (
            list(config.layer_types) if takes_layer_type(rotary) else [None] * layers
        )
        self._turned = turned
        self._half_split = _is_half_split(self._apply)
        self._tables: dict[tuple[str | None, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}
        self._outgrown: list[tuple[Tensor, Tensor]] = []  # which a CUDA graph may still read
        self._growing = threading.Lock()

    def rotate(self, layer: int, x: Tensor, positions: Tensor | range | Positions) -> Tensor:
        """x [.., T, D] to positions [T] (0 and above)."""
        if not self._turned[layer] or not x.numel():
            return x
        shape = x.shape
        x = x.reshape(1, -1, *shape[-2:])
        cos, sin = self._angles(self._types[layer], positions, x)
        turned = cos.shape[-1]
        part = x[..., :turned]
        if self._half_split:
            rotated = _half_split(part, cos, sin)
        else:
            rotated = self._apply(part, part[:, :0], cos, sin)[0].to(x.dtype)
        if turned < shape[-1]:
            rotated = torch.cat((rotated, x[..., turned:]), -1)
        return rotated.view(shape)

    def _angles(
        self, kind: str | None, positions: Tensor | range | Positions, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The model's cosines and sines [1, T, d] of positions [T]."""
        if isinstance(positions, range):
            cos, sin = self._table(kind, positions.stop, x)
            at = slice(positions.start, positions.stop)
            return cos[:, at], sin[:, at]
        if not isinstance(positions, Positions):
            positions = Positions(positions, int(positions.max()) + 1)
        found = positions.angles.get((kind, x.dtype))
        if found is None:
            cos, sin = self._table(kind, positions.reach, x)
            found = cos[:, positions.at], sin[:, positions.at]
            positions.angles[kind, x.dtype] = found
        return found

    def _table(self, kind: str | None, reach: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """The model's cosines and sines [1, n, d] of positions 0 .. n - 1, n >= reach."""
        key = (kind, x.dtype, x.device)
        table = self._tables.get(key)
        if table is None or table[0].shape[1] < reach:
            with self._growing:
                table = self._tables.get(key)
                if table is None or table[0].shape[1] < reach:
                    self._outgrown += [] if table is None else [table]
                    table = self._tables[key] = self._grown(kind, reach, x)
        return table

    def _grown(self, kind: str | None, reach: int, x: Tensor) -> tuple[Tensor, Tensor]:
        size = max(_TABLE, 1 << (reach - 1).bit_length())
        positions = torch.arange(size, device=x.device)[None]
        given = (x.new_zeros(1), positions) if kind is None else (x.new_zeros(1), positions, kind)
        with torch.no_grad():
            cos, sin = self._rotary(*given)
        return cos, sin


def _half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What most models' code computes, in half as many operations: x [1, H, T, D] by cosines and
    sines [1, T, D], dimension i together with i + D/2.
    """
    first, second = x.chunk(2, -1)
    return (x * cos).add_(torch.cat((-second, first), -1).mul_(sin))


def _is_half_split(apply: Callable[..., tuple[Tensor, Tensor]]) -> bool:
    """Is that what a model's code computes?"""
    draw = torch.Generator().manual_seed(0)
    x, cos, sin = (torch.randn(1, 3, 5, 8, generator=draw) for _ in range(3))
    cos, sin = cos[:, 0], sin[:, 0]
    try:
        theirs = apply(x, x[:, :0], cos, sin)[0]
    except (RuntimeError, TypeError, IndexError, ValueError):
        return False
    return theirs.shape == x.shape and torch.equal(theirs, _half_split(x, cos, sin))


def _kinds(rotary: Any) -> list[str]:
    kinds = getattr(rotary, "rope_type", "default")
    return list(kinds.values()) if isinstance(kinds, dict) else [kinds]
