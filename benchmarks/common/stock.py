"""A decoder of transformers with its own cache, which memories are compared with."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memstore.hf.attention_seam import cache_argument


class Stock:
    """A model on its own device that continues prompts. chunk: tokens read at once."""

    def __init__(self, model: Any, chunk: int) -> None:
        self.model, self.chunk = model, chunk

    @torch.no_grad()
    def read(self, ids: Sequence[int]) -> tuple[dict[str, Any], int]:
        """Read a prompt. Returns the arguments of the next forward and the first token of the
        answer.
        """
        from transformers import DynamicCache

        cache, logits = DynamicCache(config=self.model.config), None
        behind = cache_argument(self.model, cache)
        for at in range(0, len(ids), self.chunk):
            given = torch.tensor([ids[at : at + self.chunk]], device=self.model.device)
            logits = self.model(given, **behind, logits_to_keep=1).logits
        assert logits is not None
        return behind, int(logits[0, -1].argmax())

    @torch.no_grad()
    def decode(
        self, ids: Sequence[int], tokens: int, clock: Callable[[], float] = time.perf_counter
    ) -> float:
        """Seconds a token, by a clock, of the `tokens` tokens after the first one of an answer."""
        behind, token = self.read(ids)
        began = clock()
        for _ in range(tokens):
            given = torch.tensor([[token]], device=self.model.device)
            token = int(self.model(given, **behind).logits[0, -1].argmax())
        return (clock() - began) / tokens

    @torch.no_grad()
    def compiled_decode(self, ids: Sequence[int], tokens: int) -> float:
        """Seconds a token of the fastest way that transformers' documentation has: a static cache,
        the forward compiled and run as CUDA graphs (on a CUDA device). The model shall be attached
        to nothing.
        """
        given = torch.tensor([ids], device=self.model.device)

        def seconds(count: int) -> float:
            began = time.perf_counter()
            self.model.generate(
                given,
                attention_mask=torch.ones_like(given),
                min_new_tokens=count,
                max_new_tokens=count,
                do_sample=False,
                cache_implementation="static",
            )
            return time.perf_counter() - began

        few, many = 2, 2 + tokens
        for count in (many, many, few):  # compiles
            seconds(count)
        return (seconds(many) - seconds(few)) / tokens
