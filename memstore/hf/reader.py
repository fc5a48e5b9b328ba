"""A Hugging Face decoder as a reader: its own code computes, its attention is given from
outside.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from memstore.disk.signature import Signature
from memstore.errors import InvalidWeights
from memstore.hf.recall import Recall
from memstore.hf.rotary import ModelRotary
from memstore.hf.seam import WalkCache, attach, walk
from memstore.hf.selectors import adaptation_of
from memstore.hf.tokenizer import OffsetTokenizer
from memstore.hf.turns import Turns
from memstore.hf.weights import digest_of
from memstore.model.adaptation import Adaptation
from memstore.model.choosing import ChoosingVerbs
from memstore.model.compact import CompactAttention
from memstore.model.reader import Attend, Enter, LayerForm, Shape
from memstore.model.selector_file import MadeFor
from memstore.model.settings import LookupSettings
from memstore.store.memory_store import MemoryStore

BLOCK_SIZE = 64  # tokens
# blocks of a chunk while a document is read, and of the window before it
_CHUNK_BLOCKS, _WINDOW_BLOCKS = 8, 16
_PROBE_TOKENS = 12
# by how much logits may differ, of the largest: in float32, and in half precision
_TOLERANCE, _ROUGH = 1e-4, 0.05


class HuggingFaceReader(ChoosingVerbs):
    """A ChoosingReader over a transformers model; the model stays as it is for everybody else."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        adaptation: Adaptation | None = None,
        *,
        weights: str | None = None,
        kv_dtype: torch.dtype = torch.float16,
    ) -> None:
        """adaptation: None for the one that was made for these weights. weights: hex digest of the
        model's, if it is known. kv_dtype: of stored keys and values.

        Raises InvalidWeights for an architecture whose attention cannot be given from outside:
        shown by a short text, which has to give the same logits both ways.
        """
        self.model = model.eval()
        self._config = model.config.get_text_config()
        self._weights = weights or digest_of(model)
        self.tokenizer = OffsetTokenizer(tokenizer)
        self._turns = Turns(tokenizer, self.tokenizer)
        self.prefix_ids = self._turns.prefix
        self._decoder = attach(model)
        self._head: nn.Module = model.get_output_embeddings()
        probe = _Probe(self)
        self.forms: Sequence[LayerForm] = probe.forms
        self._rotary = ModelRotary(self._decoder, self._config, probe.turned)
        heads, kv_heads, dim = probe.geometry
        layers = len(self.forms)
        self.made_for = MadeFor(
            self._config.hidden_size,
            layers,
            heads,
            kv_heads,
            dim,
            self._config.vocab_size,
            BLOCK_SIZE,
            self._weights,
        )
        adaptation = adaptation or adaptation_of(self.made_for, self.rotate)
        self.adaptation, self.selector = adaptation, adaptation.selector
        self.answerable = adaptation.answerable
        self.lookup = LookupSettings(
            top_k=adaptation.top_k,
            score_range=adaptation.score_range,
            margin=adaptation.margin,
            chunk_blocks=_CHUNK_BLOCKS,
        )
        self.window_blocks = _WINDOW_BLOCKS
        self.shape = Shape(
            num_layers=layers,
            memory_layers=tuple(range(min(adaptation.read_from, layers - 1), layers)),
            hidden_size=self._config.hidden_size,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            block_size=BLOCK_SIZE,
            old_block_distance=None,
            kv_dtype=kv_dtype,
        )
        probe.compare()

    @cached_property
    def signature(self) -> Signature:
        """What ties a memory to this model, its tokenizer and its chat template's beginning."""
        shape = self.shape
        return Signature(
            weights=self._weights,
            tokenizer=self.tokenizer.fingerprint,
            architecture={
                "model_type": self._config.model_type,
                "keys": "without position",
                "prefix": list(self.prefix_ids),
                "rope": _rope(self._config),
            },
            kv_dtype=str(shape.kv_dtype).removeprefix("torch."),
            num_layers=shape.num_layers,
            memory_layers=shape.memory_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=shape.block_size,
        )

    def turn_ids(self, question: str, *, first: bool) -> tuple[list[int], range]:
        return self._turns.of(question, first=first)

    def last_words(self, local: list[int]) -> range:
        """Which ids of a prompt behind the prefix are the question's own words."""
        return self._turns.last_words(local)

    def recall(
        self,
        store: MemoryStore,
        input_ids: Tensor | Sequence[int],
        *,
        documents: Sequence[str] | None = None,
        **lookup: Any,
    ) -> Recall:
        """What `model.generate` needs to read a memory for a prompt: see Recall.

        input_ids: of the whole prompt, [1, tokens] or a list, as the chat template makes it.
        documents: to choose from; None for every ready one. lookup: LookupSettings that shall
        differ. Raises InvalidInput for a batch, or a prompt with another beginning.
        """
        return Recall(self, store, input_ids, documents, **lookup)

    def ends_turn(self, token: int) -> bool:
        return token in self._turns.ends

    @property
    def device(self) -> torch.device:
        return cast(torch.device, self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        return cast(torch.dtype, self.model.dtype)

    def rotate(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        return self._rotary.rotate(layer, x, positions)

    def hidden(
        self, ids: Tensor, attend: Attend, *, layers: int | None = None, enter: Enter | None = None
    ) -> Tensor:
        return walk(self._decoder, ids, WalkCache(attend), layers=layers, enter=enter)

    def logits(self, states: Tensor) -> Tensor:
        config = self._config
        logits = self._head(states.to(self.dtype)).float()
        logits = logits * (getattr(config, "logit_scale", None) or 1.0)
        logits = logits / (getattr(config, "logits_scaling", None) or 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        return logits if cap is None else cap * (logits / cap).tanh()


def _rope(config: Any) -> dict[str, Any]:
    """What decides a model's rotary positions, as plain values."""
    values = getattr(config, "rope_parameters", None) or {}
    return json.loads(json.dumps(values, sort_keys=True, default=str))


class _Probe:
    """A short text through a model, to see how each layer attends."""

    def __init__(self, reader: HuggingFaceReader) -> None:
        """Raises InvalidWeights."""
        self._reader, self.turned = reader, list[bool]()
        shapes: list[tuple[tuple[int, ...], ...]] = []
        name = type(reader.model).__name__

        def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if layer_idx != len(shapes):
                raise InvalidWeights(
                    f"{name} does not attend once in every layer; it cannot be given a memory"
                )
            shapes.append((tuple(q.shape), tuple(k.shape), tuple(v.shape)))
            self.turned.append(not bool(q[..., 0].any()))
            return torch.zeros_like(q)

        cache = WalkCache(attend)
        cache.blank = True
        size = reader._config.vocab_size
        self._ids = torch.arange(1, 1 + _PROBE_TOKENS, device=reader.device)[None] * 7 % size
        try:
            with torch.no_grad():
                walk(reader._decoder, self._ids, cache)
        except (RuntimeError, IndexError, TypeError, AttributeError) as error:
            raise InvalidWeights(
                f"{name} attends in a way that is not known here ({error}); it cannot be given a "
                "memory"
            ) from error
        layers = len(cast(nn.ModuleList, reader._decoder.layers))
        if len(shapes) != layers:
            raise InvalidWeights(
                f"{name} attends in {len(shapes)} of its {layers} layers; it cannot be given a "
                "memory"
            )
        q, k, v = shapes[0]
        if set(shapes) != {(q, k, k)} or q[-1] != k[-1] or v != k:
            raise InvalidWeights(
                f"the layers of {name} have keys and values of different shapes; it cannot be "
                "given a memory"
            )
        self.geometry = q[1], k[1], q[-1]
        self.forms = [cache.forms[layer] for layer in range(layers)]

    def compare(self) -> None:
        """Does the reader compute what the model does? Raises InvalidWeights."""
        reader = self._reader
        with torch.no_grad():
            stock = reader.model(input_ids=self._ids, use_cache=False).logits[0].float()
            context = CompactAttention(reader, [])
            ours = reader.logits(reader.hidden(self._ids, context.attend)[0])
        exact = reader.dtype in (torch.float32, torch.float64)
        most = float(stock.abs().max()) * (_TOLERANCE if exact else _ROUGH)
        apart = float((stock - ours).abs().max())
        if not apart <= most:
            raise InvalidWeights(
                f"{type(reader.model).__name__} attends in a way that is not known here (its "
                f"logits differ by {apart:.2g}); it cannot be given a memory"
            )
