"""A Hugging Face decoder as a passage model: the model's own code runs with the caller's attention.
A forward pass over a short probe text finds its head sizes and how each layer attends.
"""

import json
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from memstore.disk.format.signature import ModelName, Signature
from memstore.errors import InvalidWeights
from memstore.hf.attention_seam import (
    ForwardCache,
    ModelRotary,
    attach,
    difference_beyond_rounding,
    run_layers,
)
from memstore.hf.quantized_weights import MOST_ROWS, QuantizedWeights, Weights
from memstore.hf.reading_adapter import UNKNOWN, ReadingAdapter, attach_adapter
from memstore.hf.tokenizer import OffsetTokenizer, Turns
from memstore.hf.traced_step import TracedStep
from memstore.hf.weights import adaptation_of, digest_of
from memstore.model.adapter import Attend, AttentionSpec, Enter, Shape
from memstore.model.lookup_settings import LookupSettings
from memstore.model.passages.adaptation import Adaptation, MadeFor, Refusal
from memstore.model.passages.passage_encoding import check_storable
from memstore.model.passages.passage_session import PassageAPI
from memstore.model.passages.repositioned_attention import RepositionedAttention
from memstore.model.rotary import Positions

LONGEST = 128  # tokens of a passage, and of the slots that hold one
_PROBE_TOKENS = 12


class _WithoutCudnn:
    """Disables cuDNN attention while any thread is inside: torch has one setting for the process.
    On Hopper torch prefers cuDNN, which takes 30 ms to plan each new shape, for an attention of
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


class HuggingFacePassageModel(PassageAPI):
    """The API of a transformers model that reads passages; the model itself is not changed."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        adaptation: Adaptation | None = None,
        *,
        adapter: ReadingAdapter | None = None,
        weights: str | None = None,
        called: ModelName | None = None,
        generating: Weights = "auto",
        kv_dtype: torch.dtype = torch.float16,
    ) -> None:
        """adaptation: None for the one made for these weights. adapter: for reading passages; None
        for the stock model. weights: hex digest of the model's weights, if known. called: the
        model's name, which its memories store. generating: the weights for generated tokens.
        kv_dtype: of stored keys and values.

        Raises InvalidWeights for an architecture that cannot run with the caller's attention: its
        logits for a short text must equal the stock model's.
        """
        self.model = model.eval()
        self._config = config = model.config.get_text_config()
        self._stack = attach(model)
        self._embeddings: nn.Embedding = model.get_input_embeddings()
        self._head: nn.Module = model.get_output_embeddings()
        self._step = TracedStep(self._stack)
        self._generating = QuantizedWeights(self._stack, self._head, generating)
        heads, self.forms, turned = self._probe()
        layers = len(self.forms)
        sizes = {"num_layers": layers, "hidden_size": config.hidden_size, **heads}
        self._rotary = ModelRotary(self._stack, config, turned)
        self.rotary_kinds = self._rotary.kinds
        self._weights, self._called = weights or digest_of(model), called
        self.adapter = adapter
        if adapter is not None:
            attach_adapter(model, adapter)
        self.adapted_passages = adapter is not None
        self.adapted_turns = adapter is not None and adapter.kind == "both"
        self.tokenizer: OffsetTokenizer = OffsetTokenizer(tokenizer)
        self._turns = Turns(tokenizer)
        self.prefix_ids, self.templated = self._turns.prefix, self._turns.templated
        self.tokenizer.check_known(config.vocab_size, self.prefix_ids)
        self.made_for = MadeFor(vocabulary=config.vocab_size, weights=self._weights, **sizes)
        adaptation = adaptation or adaptation_of(self.made_for)
        self.adaptation, self.selector = adaptation, adaptation.selector
        self.gate, doubt = adaptation.gate, adaptation.doubt
        if adapter is not None and adapter.refuse_above is not None:
            token = self.tokenizer.encode(UNKNOWN)[0]
            if doubt is not None and doubt.adapter == adapter.digest:
                self.refusal = Refusal(token, doubt.above, doubt)
            else:
                self.refusal = Refusal(token, (adapter.refuse_above,) * 5)
        separator = adaptation.separator if adapter is None else adapter.separator
        self.separator_ids = self.tokenizer.encode(separator)
        self.lookup = self.usual = LookupSettings(
            top_k=adaptation.top_k,
            score_range=adaptation.score_range,
            score_bias=adaptation.score_bias,
        )
        self.passage_tokens = adaptation.passage_tokens
        self.shape = Shape(
            memory_layers=tuple(range(min(adaptation.read_from, layers - 1), layers)),
            block_size=LONGEST,
            old_block_distance=None,
            kv_dtype=kv_dtype,
            **sizes,
        )
        self._compare()

    def _probe(self) -> tuple[dict[str, int], list[AttentionSpec], list[bool]]:
        """Run the probe text; return the numbers of heads and their size, how each layer attends,
        and which layers rotate queries.
        """
        name, rotates = type(self.model).__name__, list[bool]()
        shapes: list[tuple[tuple[int, ...], ...]] = []

        def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if layer_idx != len(shapes):
                raise InvalidWeights(
                    f"{name} does not attend once in every layer; use another model"
                )
            shapes.append((tuple(q.shape), tuple(k.shape), tuple(v.shape)))
            rotates.append(not bool(q[..., 0].any()))
            return torch.zeros_like(q)

        cache = ForwardCache(attend)
        cache.zero_rotation = True
        try:
            with torch.no_grad():
                run_layers(self._stack, self._probe_ids(), cache)
        except (RuntimeError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise InvalidWeights(
                f"the attention of {name} is not supported ({error}); use another model"
            ) from error
        layers = len(cast(nn.ModuleList, self._stack.layers))
        if not shapes or len(shapes) != layers:
            raise InvalidWeights(
                f"{name} attends in {len(shapes)} of its {layers} layers; use another model"
            )
        q, k, v = shapes[0]
        if set(shapes) != {(q, k, k)} or q[-1] != k[-1] or v != k:
            raise InvalidWeights(
                f"the layers of {name} have keys and values of different shapes; use another model"
            )
        heads = {"num_heads": q[1], "num_kv_heads": k[1], "head_dim": q[-1]}
        return heads, [cache.forms[layer] for layer in range(layers)], rotates

    def _compare(self) -> None:
        """Compare the probe text's logits with the stock model's, and check that its keys and
        values can be stored. Raises InvalidWeights.
        """
        attention, ids = RepositionedAttention(self, []), self._probe_ids()

        def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            check_storable([x.to(self.shape.kv_dtype) for x in (k, v)])  # before a memory is made
            return attention.attend(layer_idx, q, k, v)

        with torch.no_grad():
            stock = self.model(input_ids=ids, use_cache=False).logits[0].float()
            ours = self.logits(self.hidden(ids, attend)[0])
        difference = difference_beyond_rounding(ours, stock, self.dtype)
        if difference is not None:
            raise InvalidWeights(
                f"the attention of {type(self.model).__name__} is not supported (its logits differ "
                f"by {difference:.2g}); use another model"
            )

    def _probe_ids(self) -> Tensor:
        size = self._config.vocab_size
        return torch.arange(1, 1 + _PROBE_TOKENS, device=self.device)[None] * 7 % size

    @cached_property
    def signature(self) -> Signature:
        """Ties a memory to this model, its tokenizer and its chat template's beginning.

        A memory stores a passage as one record: of each token the keys of all memory layers and KV
        heads in a row, then the values. To storage that is one layer with one head.
        """
        shape, config = self.shape, self._config
        rope = getattr(config, "rope_parameters", None) or {}
        return Signature(
            weights=self._weights,
            tokenizer=self.tokenizer.fingerprint,
            architecture={
                "model_type": config.model_type,
                "rope": json.loads(json.dumps(rope, sort_keys=True, default=str)),
                "keys": "without position",
                "adapter": None if self.adapter is None else self.adapter.digest,
                "prefix": list(self.prefix_ids),
                "token": [list(shape.memory_layers), shape.num_kv_heads, shape.head_dim],
            },
            kv_dtype=str(shape.kv_dtype).removeprefix("torch."),
            num_layers=shape.num_layers,
            memory_layers=(0,),
            num_kv_heads=1,
            head_dim=shape.passage_width,
            block_size=shape.block_size,
            model=self._called,
        )

    def turn_ids(self, question: str, *, first: bool) -> tuple[list[int], range]:
        typed = question.strip() if self.templated else question.rstrip()
        words = self.tokenizer.encode(self._turns.lead + typed)
        before = [] if first else self._turns.between
        place = range(len(before), len(before) + len(words))
        return [*before, *words, *self._turns.behind], place

    def ends_turn(self, token: int) -> bool:
        return token in self._turns.ends

    @property
    def end_of_turn(self) -> int:
        """The token that ends answers."""
        return self._turns.end

    @property
    def device(self) -> torch.device:
        return self._embeddings.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embeddings.weight.dtype

    def rotate(self, layer: int, x: Tensor, positions: Tensor | range | Positions) -> Tensor:
        return self._rotary.rotate(layer, x, positions)

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
        """As ModelAdapter.hidden; adapt may also select tokens: [1, T, 1] of ones and zeros."""
        on_gpu = self.device.type != "cpu"
        few = quantized and ids.numel() <= MOST_ROWS and self._generating.ready()
        cache = ForwardCache(attend, layers=layers, enter=enter, adapt=adapt, quantized=few)
        one = quantized and layers is None and ids.shape[1] == 1
        # a GPU computes a text faster than Python launches it by modules
        text = on_gpu and adapt is True and len(ids) == 1 and not torch.is_grad_enabled()
        with _without_cudnn if on_gpu else nullcontext():
            states = self._step(ids, cache) if one or text else None
            return run_layers(self._stack, ids, cache) if states is None else states

    def logits(self, states: Tensor, *, quantized: bool = False) -> Tensor:
        """States [.., hidden_size] -> float32 [.., vocabulary], as the model's own code computes
        them. quantized: see ModelAdapter.hidden.
        """
        config = self._config
        head: Callable[[Tensor], Tensor] = self._generating.head if quantized else self._head
        logits = head(states.to(self.dtype)).float()
        logits = logits * (getattr(config, "logit_scale", None) or 1.0)
        logits = logits / (getattr(config, "logits_scaling", None) or 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        return logits if cap is None else cap * (logits / cap).tanh()
