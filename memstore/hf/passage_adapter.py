"""A Hugging Face decoder as a model adapter: its own code computes, its attention is given from
outside.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from memstore.disk.format.signature import ModelName, Signature
from memstore.hf.chat_turns import Turns
from memstore.hf.decoder import AttachedDecoder
from memstore.hf.generation.quantized_products import Weights
from memstore.hf.known_selectors import adaptation_of
from memstore.hf.model_rotary import rope_of
from memstore.hf.recall import Recall, behind_prefix
from memstore.hf.tokenizer import OffsetTokenizer
from memstore.hf.weights import digest_of
from memstore.model.adapter import Attend, AttentionSpec, Enter, Shape
from memstore.model.lookup_settings import LookupSettings
from memstore.model.passages.passage_api import PassageAPI
from memstore.model.passages.passage_encoding import check_storable
from memstore.model.passages.repositioned_attention import RepositionedAttention
from memstore.model.passages.selectors.adaptation import Adaptation
from memstore.model.passages.selectors.selector_file import MadeFor
from memstore.model.rotary import Positions
from memstore.store.memory_store import MemoryStore

LONGEST = 128  # tokens of a passage, and of the slots that hold one


class HuggingFacePassageModel(PassageAPI):
    """A PassageModel over a transformers model; the model stays as it is for everybody else."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        adaptation: Adaptation | None = None,
        *,
        weights: str | None = None,
        called: ModelName | None = None,
        generating: Weights = "auto",
        kv_dtype: torch.dtype = torch.float16,
    ) -> None:
        """adaptation: None for the one that was made for these weights. weights: hex digest of the
        model's, if it is known. called: what its memories say that they were made with.
        generating: the weights that tokens are generated with. kv_dtype: of stored keys and values.

        Raises InvalidWeights for an architecture whose attention cannot be given from outside:
        shown by a short text, which has to give the same logits both ways.
        """
        self.model = model
        self._decoder = decoder = AttachedDecoder(model, generating)
        self._weights, self._called = weights or digest_of(model), called
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
        self.gate = adaptation.gate
        self.separator_ids = self.tokenizer.encode(adaptation.separator)
        self.lookup = LookupSettings(
            top_k=adaptation.top_k, score_range=adaptation.score_range, chained=adaptation.chained
        )
        self.passage_tokens = adaptation.passage_tokens
        self.context = adaptation.context
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
        decoder.compare(self._provable(RepositionedAttention(self, []).attend))

    def _provable(self, attend: Attend) -> Attend:
        """The same for a model whose keys and values can be stored; else it raises InvalidWeights
        before there is a memory of it.
        """

        def stored(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kv_dtype = self.shape.kv_dtype
            check_storable([k.to(kv_dtype), v.to(kv_dtype)])
            return attend(layer_idx, q, k, v)

        return stored

    @cached_property
    def signature(self) -> Signature:
        """What ties a memory to this model, its tokenizer and its chat template's beginning."""
        shape = self.shape
        return Signature(
            weights=self._weights,
            tokenizer=self.tokenizer.fingerprint,
            architecture={
                "model_type": self._decoder.config.model_type,
                "keys": "without position",
                "prefix": list(self.prefix_ids),
                "rope": rope_of(self._decoder.config),
            },
            kv_dtype=str(shape.kv_dtype).removeprefix("torch."),
            num_layers=shape.num_layers,
            memory_layers=shape.memory_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=shape.block_size,
            model=self._called,
        )

    @property
    def templated(self) -> bool:
        return self._turns.templated

    def turn_ids(self, question: str, *, first: bool) -> tuple[list[int], range]:
        return self._turns.of(question, first=first)

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
        local = behind_prefix(input_ids, self.prefix_ids)
        session = self.session(store, documents, **lookup)
        return Recall(self.model, session, local, self._turns.last_words(local))

    def ends_turn(self, token: int) -> bool:
        return token in self._turns.ends

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
    ) -> Tensor:
        return self._decoder.hidden(ids, attend, layers=layers, enter=enter, quantized=quantized)

    def logits(self, states: Tensor, *, quantized: bool = False) -> Tensor:
        return self._decoder.logits(states, quantized=quantized)
