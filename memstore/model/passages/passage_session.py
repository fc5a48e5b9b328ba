"""Sessions of a passage model, and its API. The selector captures the question without memory and
chooses passages; every memory layer then reads them with the question, at the positions of a
prompt.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, get_args

import torch
from torch import Tensor

from memstore.disk.format.document import IngestSettings
from memstore.disk.tables.runs import IndexSpec
from memstore.disk.tables.texts import Keep
from memstore.errors import InvalidInput, WrongModel
from memstore.index.block_rows import Scope, locator
from memstore.index.word_index import split_words
from memstore.model.answer import Found, Ranked
from memstore.model.lookup_settings import AnswerSettings, LookupSettings
from memstore.model.model_api import ModelAPI
from memstore.model.passages.adaptation import Evidence, Refusal
from memstore.model.passages.passage_encoding import read_passages
from memstore.model.passages.passage_fetch import Fetched, PassageFetch
from memstore.model.passages.repositioned_attention import (
    STEP,
    DialogueBuffer,
    KeysValues,
    PassageModel,
    RepositionedAttention,
    StepMasses,
    capture,
    computed,
    pieces,
)
from memstore.model.passages.selector import Candidates, Chosen, Query, confidence, score_blocks
from memstore.model.passages.step_graph import StepGraph
from memstore.model.questions import asks, leans, query_of, resolved, spelled
from memstore.model.session import AskSession, Lookups, OnRead, ReadUnit, attached, check_device
from memstore.model.source_text import Ingesting, Text, ingest
from memstore.store.committed import Mode
from memstore.store.memory_store import MemoryStore, Names

_CLOSEST = 5  # passages that a refusal names
_MOST_SEARCHED = 4096  # tokens of a question: memory and time grow with their square


class PassageSession(AskSession):
    """Local text after the model's prefix, and the passages that it reads now.

    Prefix, passages in document order, separator and local text are at the positions of a prompt.
    Keys and values of passages come from the memory; those of the separator are computed after the
    passages, with the first turn that follows. Of more local text than settings.local_tokens, the
    oldest tokens are dropped.
    """

    def __init__(
        self,
        reader: PassageModel,
        settings: LookupSettings,
        store: MemoryStore,
        documents: Sequence[tuple[int, int]],
        *,
        retrieve: bool = True,
        on_read: OnRead | None = None,
    ) -> None:
        """documents: those to search, as (id, blocks), in the order in which their passages are
        read. retrieve: choose passages for every question; otherwise only `read` sets them.

        Raises InvalidConfig if the memory's blocks are on another device.
        """
        check_device(reader.device, store)
        self.reader: PassageModel = reader
        self.settings, self.store = settings, store
        self.lookups = Lookups()
        self.chosen: list[Chosen] = []  # that are read now, in the order of the text
        self.evidence: Evidence | None = None  # by which `doubt` is told
        self.candidates: Candidates | None = None  # of the last choice; None before the first
        self._asked = ""  # the last question
        self._best: tuple[int, int] | None = None  # document and block of the best passage for it
        self._near = 0  # Evidence.near of it
        self._retrieve = retrieve
        layers = reader.shape.memory_layers
        self._told = None if on_read is None else StepMasses(layers, on_read)
        self._begin()
        self._local = DialogueBuffer(reader, settings.local_tokens)
        self.attach(documents)
        self._passages = PassageFetch(reader, store)
        self._behind: list[int] = []  # tokens after stored passages that are still to be computed

    def _begin(self) -> None:
        """Begin an attention with the prefix alone."""
        self.attention = RepositionedAttention(self.reader, observe=self._told, adapt=self.adapt)
        on_gpu = self.reader.device.type == "cuda" and torch.cuda.is_available()
        self._graph = StepGraph(self.reader, self.attention) if on_gpu else None

    def attach(self, documents: Sequence[tuple[int, int]]) -> None:
        """As AskSession.attach; the passages read now stay until the next choice."""
        self._scope = tuple((document, 0, blocks) for document, blocks in documents if blocks)

    # The text

    def ask(self, question: str, answering: Callable[[], None]) -> Tensor:
        judged: Refusal | None = None
        if self._retrieve and self._scope:
            if asks(question):
                question, query, before = self._meant(question)
                self._choose_for(query, before)
                judged = self.reader.refusal
            else:  # what is read now stays: "make that shorter" is about it
                self.answered = True
        ids, _ = self.reader.turn_ids(question, first=not self._local.tokens)
        answering()
        self.first_logits = self.doubt = self.evidence = None
        state = self.feed(ids)[-1]
        if judged is not None and self.adapt:
            self._judge(judged, state)
        return state

    @torch.no_grad()
    def _judge(self, refusal: Refusal, state: Tensor) -> None:
        """Decide whether the passages answer; the answer's first token may not be a refusal."""
        logits = self.reader.logits(state[None], quantized=True)[0].clone()
        unknown = float(logits.float().softmax(-1)[refusal.token])
        found = self.candidates
        assert found is not None  # a question is judged only where passages were chosen for it
        self.evidence = Evidence(unknown, confidence(found.scores), self._near, found.blocks)
        self.doubt = refusal.probability(self.evidence)
        self.answered = self.doubt <= refusal.threshold(self.settings.caution)
        logits[refusal.token] = -torch.inf
        self.first_logits = logits

    @torch.no_grad()
    def unread(self) -> Tensor | None:
        if not self.chosen:
            return None
        self.first_logits = None
        states = self.read([])
        return None if states is None else states[-1]

    def _choose_for(self, query: str, before: str) -> None:
        """Choose passages by a question. before: the question that it follows."""
        ids, words = self.reader.turn_ids(query, first=not self._local.tokens)
        _check_length(words)
        self.choose(query, ids, words, before)
        self._asked = query  # now, since a choice that fails may be repeated

    def _meant(self, message: str) -> tuple[str, str, str]:
        """The message that the model reads, the question in it, and the question that this one
        follows. Misspelt words of the question are corrected, but not those of code and quotes. A
        question about another thing is completed, and follows none.
        """
        typed = query_of(message)
        meant = resolved(typed, self._asked)
        query = spelled_as_held(self.reader, self.store, self._scope, meant)
        if meant != typed:
            return query, query, ""
        return message.replace(typed, query), query, self._asked

    def tell(self, question: str, answer: str) -> int:
        if asks(question):
            question, self._asked, _ = self._meant(question)
            self._best = None
        ids, _ = self.reader.turn_ids(question, first=not self._local.tokens)
        ids = [*ids, *self.reader.tokenizer.encode(answer)]
        self.feed(ids)
        return len(ids)

    @torch.no_grad()
    def feed(self, ids: Sequence[int]) -> Tensor:
        shape, attention = self.reader.shape, self.attention
        none = torch.zeros(0, shape.hidden_size, dtype=self.reader.dtype, device=self.reader.device)
        states = [none]
        self.read_tokens += len(ids)
        for piece in pieces(ids, attention.local, self.settings.local_tokens) if ids else []:
            self._make_room(len(piece))
            states.append(self._compute(piece))
            self._local.extend(piece)
        return states[1] if len(states) == 2 else torch.cat(states)

    def _compute(self, ids: Sequence[int]) -> Tensor:
        """Read ids, after the tokens that are still to be computed after stored passages; return
        the states of `ids` [n, hidden_size].
        """
        before, self._behind = self._behind, []
        given = torch.tensor([[*before, *ids]], device=self.reader.device)
        self.attention.begin()
        self.attention.computed = len(before)
        try:
            return self.reader.hidden(given, self.attend, adapt=self.adapt)[0, len(before) :]
        finally:
            self.attention.computed = 0

    def _make_room(self, coming: int) -> None:
        """Drop the oldest tokens of the local text if so many more would be too many."""
        held, most = self.attention.local, self.settings.local_tokens
        over = held + coming - most
        if over <= 0 or not held:
            return
        leaving = min(held, max(over, STEP))
        self.attention.let_go(leaving)
        self._local.let_go(leaving)

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention.attend(layer_idx, q, k, v)

    def ends_turn(self, token: int) -> bool:
        return self.reader.ends_turn(token)

    def recorded(self, token: int) -> Tensor | None:
        return None if self._graph is None else self._graph.read(token)

    # One token, in a forward pass that other sessions' tokens share: session.read_pending

    def begin_token(self) -> bool:
        """Make room for a token; False while tokens after stored passages are to be computed."""
        self._make_room(1)
        return not self._behind

    def end_token(self, token: int) -> None:
        self._local.extend([token])
        self.read_tokens += 1

    # What is read

    def choose(
        self, question: str, ids: Sequence[int], words: range, before: str = ""
    ) -> list[Chosen]:
        """Choose passages for the next turn, and read them from now on; none if no passage answers.

        question: as typed; ids: of the turn, `words` those of the question itself; before: the
        question that it follows, if it is not about another thing. The choice depends on the local
        turns before it, never on the memory.
        """
        selector, gate, refusal = self.reader.selector, self.reader.gate, self.reader.refusal
        caution, earlier, refers = self.settings.caution, None, leans(question)
        if before and (refers or self._best is None):
            theirs, own = self.reader.turn_ids(before, first=True)
            earlier = Query(capture(self.reader, theirs).part(own), before)
            if self._best is None:  # it was told, without a choice
                self._best = score_blocks(selector, earlier, self.store, self._scope).best
        captured = self._local.look_ahead(ids, words)
        query = Query(captured, question, earlier if refers else None)
        place = self._best if before else None
        found = score_blocks(selector, query, self.store, self._scope, place)
        if place is not None:
            found = found.after(place, refers=refers)
        adds, content = partial(selector.adds, query, found.store), self._passages.content
        best = self.candidates = Candidates(found, self.settings.top_k, adds, content)
        alone = gate is None or gate.answers(found.scores, found.blocks, caution)
        self.answered, self.needed = True, None
        if gate is not None and refusal is None:  # else the model decides, once it has read
            self.needed = gate.threshold(found.blocks, caution)
            self.answered = alone or gate.answer_together(best.together, found.blocks, caution)
        self._near = len(best.meant(self.reader.usual, parts=not alone))
        self.read(best.meant(self.settings, parts=not alone) if self.answered else [])
        self.lookups.done += self.answered
        self.lookups.skipped += not self.answered
        self._best = found.best
        return self.chosen

    @torch.no_grad()
    def read(self, passages: Sequence[Chosen]) -> Tensor | None:
        """Read these passages, in this order, from now on; [] reads none. Returns the states [n,
        hidden_size] of the local text if it was computed again, because the reading adapter was
        switched on or off.

        Raises InvalidInput for more passages than top_k, BudgetExceeded, DocumentNotFound,
        BlocksUnavailable, CorruptBlock.
        """
        if len(passages) > self.settings.top_k:
            raise InvalidInput(
                f"{len(passages)} passages; top_k allows {self.settings.top_k} at most"
            )
        reader = self.reader
        # a passage that is not stored is computed as it would be stored. Without an adapter it is
        # read as text instead: a stock model reads independently encoded passages less well
        with self._passages.fetch(passages, compute=reader.adapted_passages) as fetched:
            computed_now = [self._passages.ids(one) for one in passages[len(fetched.lengths) :]]
            tiers = [*fetched.tiers, *["computed"] * len(computed_now)]
            behind = [token for ids in computed_now for token in ids]
            if passages:
                behind += reader.separator_ids
            adapt, again = bool(passages) and reader.adapted_turns, list[int]()
            if adapt is not self.adapt:
                self.adapt, again = adapt, self._local.ids
                self._begin()
            parts = [*fetched.lengths, *map(len, computed_now)]
            self.attention.divide(parts, [one.bias for one in passages])
            for layers, k, v in fetched.of_layers():
                self.attention.remember(layers, k, v)
            self.chosen, self._behind = list(passages), behind
            if self._told is not None:
                first = reader.shape.memory_layers[0]
                self._told.units = [
                    ReadUnit(first, 0, one.document, one.block, tier)
                    for one, tier in zip(passages, tiers)
                ]
            if self.attention.local and behind and not again:
                self._insert(behind, fetched)
        return self._compute(again) if again else None

    def _insert(self, behind: Sequence[int], fetched: Fetched) -> None:
        """Compute tokens between the stored passages and the existing local text."""
        self._behind = []
        context = replace(self.attention, layers={}, observe=None)
        for layers, k, v in fetched.of_layers():
            context.remember(layers, k, v)
        more = computed(context, behind)
        for layers, *both in fetched.of_layers():
            new = map(torch.stack, zip(*(more[layer] for layer in layers)))
            k, v = (torch.cat((half.to(last), last), 2) for half, last in zip(both, new))
            self.attention.remember(layers, k, v)

    @property
    def closest(self) -> list[tuple[int, int, float]]:
        if self.answered or self.candidates is None:
            return []
        return [(one.document, one.block, one.score) for one in self.candidates.distinct(_CLOSEST)]

    @property
    def same(self) -> dict[tuple[int, int], tuple[tuple[int, int], ...]]:
        return {(one.document, one.block): one.same for one in self.chosen if one.same}

    def close(self) -> None:
        self.chosen, self.candidates, self._behind = [], None, []
        self._begin()


def _check_length(words: range) -> None:
    """Raises InvalidInput for a question of too many tokens."""
    if len(words) > _MOST_SEARCHED:
        raise InvalidInput(
            f"the question has {len(words):,} tokens; shorten it to {_MOST_SEARCHED:,}"
        )


# Passages of a scope whose words are looked up by the hundred. Larger scopes are searched by lists,
# so that their words need not be read.
_MOST_SPELLED = 1 << 14


def spelled_as_held(reader: PassageModel, store: MemoryStore, scope: Scope, question: str) -> str:
    """Correct a question's misspelt words to words of the scope's passages: see `spelled`. A word
    that is one token of the model is not misspelt. Large scopes, and selectors without words, leave
    the question unchanged.
    """
    index = store.retrieval.selected
    if index is None or sum(end - first for _, first, end in scope) > _MOST_SPELLED:
        return question

    def holding(words: Sequence[str]) -> Sequence[int]:
        counts = index.holding([split_words(word)[0] for word in words], scope)
        return [1] * len(words) if counts is None else counts  # not known: nothing is changed

    encode = reader.tokenizer.encode
    return spelled(question, lambda word: len(encode(f" {word}")) == 1, holding)


# The API


class PassageAPI(ModelAPI, PassageModel):
    """The API of a model that reads passages by a selector and RepositionedAttention."""

    answering = AnswerSettings(max_new_tokens=64, until_sentence=False)
    codec = "int8"  # the answers are the same: docs/results.md

    @property
    def keeps(self) -> IndexSpec:
        """The search data that the selector needs."""
        return self.selector.spec

    @cached_property
    def _prefixes(self) -> dict[object, Sequence[KeysValues]]:
        """What `prefix` has computed, by ids, device, dtype and adapt."""
        return {}

    def prefix(self, adapt: bool = False) -> Sequence[KeysValues]:
        state = (*self.prefix_ids, self.device, self.dtype, adapt)
        if state not in self._prefixes:
            context = RepositionedAttention(self, [], adapt=adapt)
            self._prefixes[state] = [
                (self.rotate(layer, k[None], range(k.shape[1])), v[None])
                for layer, (k, v) in enumerate(computed(context, self.prefix_ids))
            ]
        return self._prefixes[state]

    def ingesting(
        self,
        text: Text,
        store: MemoryStore,
        *,
        mode: Mode = "new",
        keep: Keep | None = None,
        **lookup: Any,
    ) -> Ingesting:
        """As ModelAPI.ingesting; no setting changes what is stored. keep: "text" stores no keys and
        values, which is the default for a model without a reading adapter: it reads stored passages
        less well than text. Raises InvalidInput for chunk_blocks, because passages are computed one
        by one.
        """
        keep = keep or ("kv" if self.adapted_passages else "text")
        if keep not in get_args(Keep):
            raise InvalidInput(f"keep is {' or '.join(get_args(Keep))}, not {keep!r}")
        self.check(store)
        if self.lookup.changed(**lookup).chunk_blocks != self.lookup.chunk_blocks:
            raise InvalidInput("this model computes passages one by one; leave chunk_blocks out")
        settings = IngestSettings(passage_tokens=self.passage_tokens)
        return ingest(store, text, settings, mode, partial(read_passages, self, text, keep))

    def build_index(
        self, store: MemoryStore, progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Any]:
        """Build the lists of token landmarks with which a large memory is searched in two stages;
        return {"engines": what was built}.

        progress: called with (tokens done, tokens). Raises WrongModel, and what
        MemoryStore.build_index raises.
        """
        self.check(store)
        return {"engines": store.build_index(progress=progress)}

    def check(self, store: MemoryStore) -> None:
        found = store.selector
        if found != self.keeps:
            name = "trained landmarks" if found is None else f"{found.name} {found.digest[:12]}"
            raise WrongModel(
                f"{store.place} was indexed with the selector {name}; this model uses "
                f"{self.keeps.name} {self.keeps.digest[:12]}: ingest the documents again into a "
                "new memory"
            )

    def session(
        self,
        store: MemoryStore,
        documents: Names = None,
        *,
        retrieve: bool = True,
        on_read: OnRead | None = None,
        **lookup: Any,
    ) -> PassageSession:
        self.check(store)
        there = attached(store, documents, retrieve=retrieve)
        settings = self.lookup.changed(**lookup)
        return PassageSession(self, settings, store, there, retrieve=retrieve, on_read=on_read)

    def ranked(self, phrase: str, store: MemoryStore, scope: Sequence[tuple[int, int]]) -> Ranked:
        """As ModelAPI.ranked, by the selector's scores for the question in a message."""
        self.check(store)
        runs = [(document, 0, blocks) for document, blocks in scope if blocks]
        phrase = spelled_as_held(self, store, runs, query_of(phrase))
        ids, words = self.turn_ids(phrase, first=True)
        _check_length(words)
        captured = capture(self, ids).part(words)
        found = score_blocks(self.selector, Query(captured, phrase), store, runs)
        gate, caution = self.gate, self.lookup.caution
        answered = gate is None or gate.answers(found.scores, found.blocks, caution)
        place = locator(found.scope)
        best = torch.sort(found.scores, descending=True, stable=True)
        ranked = zip(best.indices.tolist(), best.values.tolist())
        return (Found(*place(at), score) for at, score in ranked), answered
