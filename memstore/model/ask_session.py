"""What a session is to who asks: it reads a question and generates what follows."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from memstore.errors import InvalidConfig
from memstore.model.generation import Continuation
from memstore.model.reads import Lookups
from memstore.store.memory_store import MemoryStore


class AskSession(AbstractContextManager["AskSession"], Protocol):
    """A session as a chat uses it: LandmarkSession, or PassageSession."""

    store: MemoryStore
    answered: bool  # False: nothing in the memory answers the last question
    needed: float | None  # the score that a passage needs to answer it; None where there is no gate
    read_tokens: int  # since it was opened

    @property
    def same(self) -> Mapping[tuple[int, int], Sequence[tuple[int, int]]]:
        """Of blocks (document, block) that are read now, others that say the same."""

    @property
    def closest(self) -> Sequence[tuple[int, int, float]]:
        """The best passages of a question that nothing answers, best first: document, block and
        score.
        """

    @property
    def absent(self) -> set[int]:
        """Documents that were left out, or of which blocks were, since they could not be had."""

    @property
    def lookups(self) -> Lookups:
        """How often blocks were looked for."""

    def attach(self, documents: Sequence[tuple[int, int]]) -> None:
        """Look up in these documents from now on, (id, blocks) each, in place of those before."""

    def ask(self, question: str, answering: Callable[[], None]) -> Tensor:
        """Read a question; the state [hidden_size] that its answer begins with. answering: called
        before that state is computed.
        """

    def tell(self, question: str, answer: str) -> int:
        """Read a turn that was said before, without looking up; how many tokens it has."""

    def feed(self, ids: Sequence[int]) -> Tensor:
        """Read tokens -> states [n, hidden_size]."""

    def logits(self, states: Tensor) -> Tensor:
        """Next-token logits [n, vocabulary]."""

    def generate(
        self,
        state: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Callable[[int], bool] | None = None,
    ) -> Continuation:
        """The tokens that follow `state`."""


def attached(
    store: MemoryStore, names: Sequence[str] | None, *, retrieve: bool
) -> tuple[list[tuple[int, int]], set[int]]:
    """The documents that a session is about, as (id, blocks), and the ids of those that it leaves
    out, since they cannot be had. names: None for all; without `retrieve` none is left out. Raises
    what MemoryStore.ready and MemoryStore.attached raise.
    """
    wanted = store.ready(names)
    there = store.retrieval.attached(wanted) if retrieve else wanted
    absent = set[int]()
    if len(there) < len(wanted):
        absent = {row.id for row in wanted} - {row.id for row in there}
    return [(row.id, row.blocks) for row in there], absent


def check_device(device: torch.device, store: MemoryStore) -> None:
    """Raises InvalidConfig where the memory's blocks are on another device than the model."""
    if store.tiers.lengths.device.type != device.type:
        raise InvalidConfig(
            f"the model is on {device.type} and the memory's blocks on "
            f"{store.tiers.lengths.device.type}; open the memory with device={str(device)!r}, or "
            "load the model with the memory's"
        )
