"""The API of a passage model, which chooses passages once for a question."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from memstore.disk.format.index_spec import IndexSpec
from memstore.disk.format.text_parts import Keep
from memstore.errors import InvalidInput, WrongModel
from memstore.model.answer import Found, Ranking
from memstore.model.document_ingest import Ingesting
from memstore.model.lookup_settings import AnswerSettings
from memstore.model.model_api import ModelAPI
from memstore.model.passages.passage_choice import spelled_as_held
from memstore.model.passages.passage_ingest import ingest_passages
from memstore.model.passages.passage_protocol import PassageModel
from memstore.model.passages.passage_session import PassageSession, capture
from memstore.model.passages.selector import Query, Scored, score_blocks
from memstore.model.session import OnRead, attached
from memstore.model.texts.questions import query_of
from memstore.model.texts.source_text import Text
from memstore.store.memory_store import MemoryStore
from memstore.store.write.admission import Mode


class PassageAPI(ModelAPI, PassageModel):
    """The API by a selector and RepositionedAttention in every layer."""

    answering = AnswerSettings(max_new_tokens=64, until_sentence=False)
    codec = "int8"  # the answers are the same: docs/results.md

    @property
    def keeps(self) -> IndexSpec:
        """What its selector needs."""
        return self.selector.spec

    def ingesting(
        self,
        source: Text | Path | str,
        store: MemoryStore,
        *,
        name: str | None = None,
        mode: Mode = "new",
        keep: Keep | None = None,
        **lookup: Any,
    ) -> Ingesting:
        """As ModelAPI.ingesting; none of the settings changes what is stored. keep: "text" stores
        no keys and values; None does so for a model without a reading adapter, which reads stored
        passages less well than text. Raises InvalidInput for chunk_blocks: passages are read each
        alone.
        """
        keep = keep or ("kv" if self.adapted_passages else "text")
        if keep not in get_args(Keep):
            raise InvalidInput(f"keep is {' or '.join(get_args(Keep))}, not {keep!r}")
        self._check(store)
        if self.lookup.changed(**lookup).chunk_blocks != self.lookup.chunk_blocks:
            raise InvalidInput("this model reads passages, each alone; leave chunk_blocks out")
        text = source if isinstance(source, Text) else Text(source, name)
        return ingest_passages(self, store, text, mode=mode, keep=keep)

    def build_index(
        self, store: MemoryStore, progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Any]:
        """Make lists of a memory's token landmarks, by which it is searched in two stages where it
        is large; {"engines": what was made}.

        progress: called with (tokens done, tokens). Raises WrongModel, and what
        MemoryStore.build_index raises.
        """
        self._check(store)
        return {"engines": store.build_index(progress=progress)}

    def _check(self, store: MemoryStore) -> None:
        """Raises WrongModel for a memory that another selector wrote."""
        found = store.selector
        if found != self.keeps:
            name = "trained landmarks" if found is None else f"{found.name} {found.digest[:12]}"
            raise WrongModel(
                f"{store.place} is found by {name}, this model's selector is {self.keeps.name} "
                f"{self.keeps.digest[:12]}; ingest the documents again into a new memory"
            )

    def session(
        self,
        store: MemoryStore,
        documents: Sequence[str] | None = None,
        *,
        retrieve: bool = True,
        on_read: OnRead | None = None,
        **lookup: Any,
    ) -> PassageSession:
        """As ModelAPI.session."""
        self._check(store)
        there = attached(store, documents, retrieve=retrieve)
        settings = self.lookup.changed(**lookup)
        return PassageSession(self, settings, store, there, retrieve=retrieve, on_read=on_read)

    def ranked(self, phrase: str, store: MemoryStore, scope: Sequence[tuple[int, int]]) -> Ranking:
        """As ModelAPI.ranked, by the selector's scores; of a message, by the question in it."""
        self._check(store)
        runs = [(document, 0, blocks) for document, blocks in scope if blocks]
        phrase = spelled_as_held(self, store, runs, query_of(phrase))
        ids, words = self.turn_ids(phrase, first=True)
        captured = capture(self, ids).part(words)
        found = score_blocks(self.selector, Query(captured, phrase), store, runs)
        caution = self.lookup.caution
        answered = self.gate is None or self.gate.answers(
            found.scores, caution, blocks=found.blocks
        )
        return Ranking(_best_first(found), answered)


def _best_first(found: Scored) -> Iterator[Found]:
    places = [(number, block) for number, first, end in found.scope for block in range(first, end)]
    best = torch.sort(found.scores, descending=True, stable=True)
    for score, place in zip(best.values.tolist(), best.indices.tolist()):
        document, block = places[place]
        yield Found(document, block, score, {})
