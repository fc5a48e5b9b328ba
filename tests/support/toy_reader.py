"""A second reader, with nothing of the one that ships: its own decoder, its own tokenizer of
characters, a question template, and no context miss token.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from memstore.disk.format.signature import Signature
from memstore.model.adapter import Attend, Enter, Shape
from memstore.model.landmark.landmark_session import LandmarkAPI
from memstore.model.lookup_settings import LookupSettings
from memstore.model.rotary import Rope

LETTERS = " \nabcdefghijklmnopqrstuvwxyz.?é"
HIDDEN, LAYERS, HEADS, KV_HEADS, DIM, BLOCK = 24, 3, 4, 2, 8, 5


class Letters:
    """An id a letter; a letter outside of the alphabet is a space."""

    def encode(self, text: str) -> list[int]:
        return [max(0, LETTERS.find(letter)) for letter in text.lower()]

    def encode_stream(self, pieces: Iterable[str]) -> Iterator[list[int]]:
        return map(self.encode, pieces)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(LETTERS[token] for token in ids)

    def characters(self, ids: Sequence[int]) -> int:
        return len(ids)

    def whole_characters(self, ids: Sequence[int], following: Sequence[int]) -> str:
        return self.decode(ids)


class ToyReader(LandmarkAPI):
    """Linear layers of random weights around the attention that it is given."""

    landmark_id = len(LETTERS)
    cmt_keys = cmt_values = None
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, kv_dtype: torch.dtype = torch.float32) -> None:
        self.shape = Shape(
            num_layers=LAYERS,
            memory_layers=(0, 2),
            hidden_size=HIDDEN,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            block_size=BLOCK,
            old_block_distance=20,
            kv_dtype=kv_dtype,
        )
        self.lookup = LookupSettings(top_k=3, chunk_blocks=2)
        self.rope = Rope(DIM)
        self.tokenizer = Letters()
        generator = torch.Generator().manual_seed(5)
        self._embedding = torch.randn(len(LETTERS) + 1, HIDDEN, generator=generator)
        width = (HEADS + 2 * KV_HEADS) * DIM
        self._into = torch.randn(LAYERS, HIDDEN, width, generator=generator) * HIDDEN**-0.5
        self._out = torch.randn(LAYERS, HEADS * DIM, HIDDEN, generator=generator) * 0.3
        self.heard: list[str] = []  # questions

    @property
    def signature(self) -> Signature:
        digest = hashlib.sha256(self._into.numpy().tobytes()).hexdigest()
        return Signature(
            weights=digest,
            tokenizer="letters",
            architecture={},
            kv_dtype=str(self.shape.kv_dtype).removeprefix("torch."),
            num_layers=LAYERS,
            memory_layers=self.shape.memory_layers,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            block_size=BLOCK,
        )

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
        x = self._embedding[ids]
        for layer in range(LAYERS)[:layers]:
            if enter is not None:
                enter(layer, x)
            heads = (x @ self._into[layer]).unflatten(-1, (-1, DIM)).transpose(1, 2)
            q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
            x = x + attend(layer, q, k, v).transpose(1, 2).flatten(2) @ self._out[layer]
        return x

    def logits(self, states: Tensor, *, quantized: bool = False) -> Tensor:
        logits = states @ self._embedding.T
        logits[..., self.landmark_id] = -1e9
        return logits

    def question_ids(self, question: str) -> list[int]:
        self.heard.append(question)
        return self.tokenizer.encode(f"asked {question}\nanswer ")
