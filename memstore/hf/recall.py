"""A memory for a pipeline of one's own: `model.generate` with what a prompt should read."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from memstore.errors import InvalidInput
from memstore.hf.attention_seam import ForwardCache, cache_argument
from memstore.model.passages.passage_session import PassageSession


class Recall(AbstractContextManager["Recall"]):
    """What a prompt reads of a memory, as `generate` takes it: `model.generate(**recall.inputs)`.
    For one prompt, greedy or sampled.
    """

    def __init__(
        self, model: Any, session: PassageSession, local: Sequence[int], words: range
    ) -> None:
        """Use HuggingFacePassageModel.recall. local: the prompt behind the prefix, of which `words`
        are the question's own; session: closed with this.
        """
        self.session = session
        question = session.reader.tokenizer.decode(local[words.start : words.stop])
        session.choose(question, local, words)
        session.settle()
        given = torch.tensor([list(local)], device=session.reader.device)
        self.cache: ForwardCache = ForwardCache(session.attend)
        self.inputs = {
            "input_ids": given,
            "attention_mask": torch.ones_like(given),
            **cache_argument(model, self.cache),
        }

    def __exit__(self, *args: object) -> None:
        self.session.close()


def behind_prefix(input_ids: Tensor | Sequence[int], prefix: Sequence[int]) -> list[int]:
    """The ids of one prompt that stand behind the prefix. Raises InvalidInput for a batch, or a
    prompt with another beginning.
    """
    ids = _one_prompt(input_ids)
    if ids[: len(prefix)] != prefix:
        raise InvalidInput(
            "the prompt does not begin as the memory's texts do (the chat template's beginning, "
            "with its own system prompt); put another system prompt into the question"
        )
    local = ids[len(prefix) :]
    if not local:
        raise InvalidInput("the prompt has nothing behind the chat template's beginning")
    return local


def _one_prompt(input_ids: Tensor | Sequence[int]) -> list[int]:
    """Raises InvalidInput for a batch."""
    given = torch.as_tensor(input_ids)
    if given.dim() == 2 and len(given) == 1:
        given = given[0]
    if given.dim() != 1 or given.is_floating_point():
        raise InvalidInput(
            f"input_ids of shape {list(given.shape)}; a memory is recalled for one prompt at a "
            "time, [1, tokens]"
        )
    return [int(token) for token in given.tolist()]
