"""A Hugging Face decoder as a passage model: its own code computes, with the caller's attention."""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from memstore.disk.format.signature import ModelName, Signature
from memstore.hf.decoder import AttachedDecoder
from memstore.hf.quantized_weights import Weights
from memstore.hf.reading_adapter import UNKNOWN, ReadingAdapter, attach_adapter
from memstore.hf.tokenizer import OffsetTokenizer, Turns
from memstore.hf.weights import adaptation_of, digest_of
from memstore.model.adapter import Attend, AttentionSpec, Enter, Shape
from memstore.model.lookup_settings import LookupSettings
from memstore.model.passages.adaptation import Adaptation, MadeFor, Refusal
from memstore.model.passages.passage_encoding import check_storable
from memstore.model.passages.passage_session import PassageAPI
from memstore.model.passages.repositioned_attention import RepositionedAttention
from memstore.model.rotary import Positions

LONGEST = 128  # tokens of a passage, and of the slots that hold one


class HuggingFacePassageModel(PassageAPI):
    """The API of a transformers model that reads passages; the model itself does not change."""

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

        Raises InvalidWeights for an architecture that cannot run with the caller's attention: a
        short text must give the stock model's logits.
        """
        self.model = model
        self._decoder = decoder = AttachedDecoder(model, generating)
        self._weights, self._called = weights or digest_of(model), called
        self.adapter = adapter
        if adapter is not None:
            attach_adapter(model, adapter)
        self.adapted_passages = adapter is not None
        self.adapted_turns = adapter is not None and adapter.kind == "both"
        self.tokenizer: OffsetTokenizer = OffsetTokenizer(tokenizer)
        self._turns = Turns(tokenizer, self.tokenizer)
        self.prefix_ids = self._turns.prefix
        self.tokenizer.check_known(decoder.config.vocab_size, self.prefix_ids)
        self.forms: Sequence[AttentionSpec] = decoder.forms
        layers = decoder.num_layers
        self.made_for = MadeFor(
            decoder.config.hidden_size,
            layers,
            decoder.heads,
            decoder.kv_heads,
            decoder.head_dim,
            decoder.config.vocab_size,
            self._weights,
        )
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
        self.lookup = LookupSettings(top_k=adaptation.top_k, score_range=adaptation.score_range)
        self.passage_tokens = adaptation.passage_tokens
        self.shape = Shape(
            num_layers=layers,
            memory_layers=tuple(range(min(adaptation.read_from, layers - 1), layers)),
            hidden_size=decoder.config.hidden_size,
            num_heads=decoder.heads,
            num_kv_heads=decoder.kv_heads,
            head_dim=decoder.head_dim,
            block_size=LONGEST,
            old_block_distance=None,
            kv_dtype=kv_dtype,
        )
        attention = RepositionedAttention(self, [])

        def storable(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            check_storable([k.to(kv_dtype), v.to(kv_dtype)])  # before a memory is made
            return attention.attend(layer_idx, q, k, v)

        decoder.compare(storable)

    @cached_property
    def signature(self) -> Signature:
        """Ties a memory to this model, its tokenizer and its chat template's beginning.

        A memory stores a passage as one record: of each token the keys of all memory layers and KV
        heads in a row, then the values. To storage that is one layer with one head.
        """
        shape, config = self.shape, self._decoder.config
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

    @property
    def templated(self) -> bool:
        return self._turns.templated

    def turn_ids(self, question: str, *, first: bool) -> tuple[list[int], range]:
        return self._turns.of(question, first=first)

    def ends_turn(self, token: int) -> bool:
        return token in self._turns.ends

    @property
    def end_of_turn(self) -> int:
        """The token that ends answers."""
        return self._turns.end

    @property
    def device(self) -> torch.device:
        return self._decoder.device

    @property
    def dtype(self) -> torch.dtype:
        return self._decoder.dtype

    def rotate(self, layer: int, x: Tensor, positions: Tensor | range | Positions) -> Tensor:
        return self._decoder.rotary.rotate(layer, x, positions)

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
        """As ModelAdapter.hidden; adapt may also name tokens: [1, T, 1] of ones and zeros."""
        return self._decoder.hidden(
            ids, attend, layers=layers, enter=enter, quantized=quantized, adapt=adapt
        )

    def logits(self, states: Tensor, *, quantized: bool = False) -> Tensor:
        return self._decoder.logits(states, quantized=quantized)
