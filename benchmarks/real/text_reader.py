"""Reading passages as text in the prompt: what a memory's answers are compared with."""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.model.passages.adaptation import Evidence
from memstore.model.passages.repositioned_attention import RepositionedAttention


class TextReader:
    """Reads passages as text, with the weights, the reading adapter and the rule for refusals that
    a session uses.
    """

    def __init__(self, reader: HuggingFacePassageModel) -> None:
        self.reader, self.adapt = reader, reader.adapted_turns

    @torch.no_grad()
    def answer(
        self,
        passages: Sequence[Sequence[int]],
        question: str,
        most: int,
        known: Evidence | None = None,
    ) -> tuple[str, float, float]:
        """The answer, the probability that the passages do not answer, and the seconds to the first
        token.

        most: tokens of the answer at most. known: how well the passages of the memory suit the
        question, which a session takes into account too.
        """
        began = time.perf_counter()
        reader = self.reader
        attention, states = self._read(passages, question)
        said: list[int] = []
        doubt = first = 0.0
        for _ in range(most):
            logits = reader.logits(states[-1], quantized=True).clone()
            if self.adapt and reader.refusal is not None and not said:
                doubt = float(logits.float().softmax(-1)[reader.refusal.token])
                if known is not None:
                    doubt = reader.refusal.probability(replace(known, unknown=doubt))
                logits[reader.refusal.token] = -torch.inf
            token = int(logits.argmax())
            first = first or time.perf_counter() - began
            if reader.ends_turn(token):
                break
            said.append(token)
            states = reader.hidden(
                torch.tensor([[token]]), attention.attend, quantized=True, adapt=self.adapt
            )[0]
        return reader.tokenizer.decode(said).strip(), doubt, first

    @torch.no_grad()
    def goes_on(
        self, passages: Sequence[Sequence[int]], question: str, primed: str, following: str
    ) -> bool:
        """Does greedy decoding go on with `following` after the words that begin the answer?"""
        encode = self.reader.tokenizer.encode
        begun, expected = encode(primed), encode(following)
        _, states = self._read(passages, question, [*begun, *expected[:-1]])
        best = self.reader.logits(states[-len(expected) :]).argmax(-1)
        return bool(best.tolist() == expected)

    def _read(
        self, passages: Sequence[Sequence[int]], question: str, begun: Sequence[int] = ()
    ) -> tuple[RepositionedAttention, Tensor]:
        """The attention to continue the prompt with, and the states [n, hidden] of the prompt."""
        reader = self.reader
        attention = RepositionedAttention(reader, reader.prefix(self.adapt), adapt=self.adapt)
        turn, _ = reader.turn_ids(question, first=True)
        ids = [token for one in passages for token in one]
        ids = [*ids, *(reader.separator_ids if ids else ()), *turn, *begun]
        states = reader.hidden(torch.tensor([ids]), attention.attend, adapt=self.adapt)
        return attention, states[0]
