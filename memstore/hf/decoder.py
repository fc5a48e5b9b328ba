"""A transformers decoder that runs with the caller's attention. A forward pass over a short probe
text finds its head sizes and how each layer attends.
"""

import json
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from memstore.disk.format.signature import ModelName, Signature
from memstore.errors import InvalidWeights
from memstore.hf.attention_seam import ForwardCache, attach, difference_beyond_rounding, run_layers
from memstore.hf.generation.low_rank import adapted
from memstore.hf.generation.quantized_weights import MOST_ROWS, QuantizedWeights, Weights, as_loaded
from memstore.hf.generation.traced_step import TracedStep
from memstore.hf.model_rotary import ModelRotary
from memstore.model.adapter import Attend, AttentionSpec, Enter, Shape

_PROBE_TOKENS = 12


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
        given: Tensor,
        attend: Attend,
        *,
        layers: int | None = None,
        enter: Enter | None = None,
        quantized: bool = False,
        adapt: bool | Tensor = False,
    ) -> Tensor:
        """See ModelAdapter.hidden; given: ids [B, T], or embeddings [B, T, hidden_size]; adapt: as
        `adapted` takes it.
        """
        backend = nullcontext() if self.device.type == "cpu" else _without_cudnn
        used = self.weights.used() if quantized else as_loaded()
        with backend, adapted(adapt), used as version:
            if quantized and layers is None and given.shape[1] == 1:
                few = len(given) <= MOST_ROWS
                states = self._step(given, attend, enter, version if few else 0, adapt is True)
                if states is not None:
                    return states
            return run_layers(self._stack, given, ForwardCache(attend), layers=layers, enter=enter)

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

    def signature(
        self, shape: Shape, *, weights: str, tokenizer: str, model: ModelName | None, **others: Any
    ) -> Signature:
        """The signature of memories made with this decoder.

        weights, tokenizer: digests. model: its name. others: more that memories depend on.
        """
        rope = getattr(self.config, "rope_parameters", None) or {}
        return Signature(
            weights=weights,
            tokenizer=tokenizer,
            architecture={
                "model_type": self.config.model_type,
                "rope": json.loads(json.dumps(rope, sort_keys=True, default=str)),
                **others,
            },
            kv_dtype=str(shape.kv_dtype).removeprefix("torch."),
            num_layers=shape.num_layers,
            memory_layers=shape.memory_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=shape.block_size,
            model=model,
        )

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
