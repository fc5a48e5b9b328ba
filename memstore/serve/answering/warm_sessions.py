"""Warm sessions: a question goes on in one that has read the turns before it, or in one made from
what is stored. All of it happens on the model's thread.
"""

import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from memstore.errors import BudgetExceeded
from memstore.model.model_api import ModelAPI
from memstore.model.session import AskSession
from memstore.model.texts.source_text import Text
from memstore.serve.answering.long_prompts import Plan, Window
from memstore.serve.answering.trace import Trace
from memstore.serve.api_errors import ApiError
from memstore.serve.settings import ServeSettings
from memstore.serve.state.turns import Turn, keys_of
from memstore.store.memory_store import MemoryStore


@dataclass(eq=False)
class WarmSession:
    """An open session. owner: whose; scope: ids of the documents it reads; key: of what was said in
    it; documents: names of those that hold what did not fit into prompts, document_tokens of them
    all.
    """

    session: AskSession
    trace: Trace
    owner: str
    scope: tuple[int, ...]
    key: bytes = b""
    documents: list[str] = field(default_factory=list)
    document_tokens: int = 0
    cached_tokens: int = 0  # of this prompt, those that were read before it came
    question: str = ""  # what is asked: of a long prompt its end
    used: float = 0.0

    def close(self) -> None:
        """Let its blocks go."""
        self.session.__exit__(None, None, None)

    @property
    def prompt_tokens(self) -> int:
        """All that it has read."""
        return self.document_tokens + self.session.read_tokens


Opening = Generator[str, None, WarmSession]
"""Steps, each an empty piece of an answer, that end with a session."""


class WarmSessions:
    """The sessions that are warm, and how others are opened."""

    def __init__(
        self, reader: ModelAPI, store: MemoryStore, settings: ServeSettings, *, most_bytes: int
    ) -> None:
        """most_bytes: that one document of a prompt may take."""
        self._reader, self._store, self._settings = reader, store, settings
        self._most_bytes = most_bytes
        most = settings.max_tokens if store.read_only else None
        self.window = Window(reader, settings.window_tokens, most=most)
        self._warm: list[WarmSession] = []  # the one used last at the end
        self._cold: deque[tuple[str, bytes]] = deque()  # owner and key of those that had their time
        # names of documents of prompts that are being read: for who waits, and in the background
        self._read_now: set[str] = set()
        self._read_behind: dict[str, Generator[object, None, object]] = {}
        shape = reader.shape
        layers = shape.num_layers if reader.keeps is None else len(shape.memory_layers)
        open_at_once = settings.warm_sessions + settings.active
        share = store.tiers.host.capacity // (2 * layers * shape.num_kv_heads * open_at_once)
        self._own_blocks = max(reader.lookup.top_k, share)

    def begin(
        self,
        owner: str,
        turns: Sequence[Turn],
        question: str,
        documents: Sequence[str],
        plan: Plan | None = None,
    ) -> Opening:
        """A session that has read these turns, for a question about these documents: a warm one,
        which reads the turns that it has not yet, or one that reads them anew. plan: of that, if it
        is made already.
        """
        scope = tuple(document.id for document in self._store.ready(documents))
        keys = keys_of(owner, turns) if plan is None else plan.keys
        taken = self._take(keys, turns, question, scope)
        if taken is None:
            plan = plan or self.window.plan(owner, turns, question)
            return (yield from self._read_anew(owner, plan, documents, scope))
        warm, known = taken
        warm.cached_tokens, warm.question = warm.prompt_tokens, question
        yield from self._tell(warm, turns[known:])
        return warm

    def end(self, warm: WarmSession, key: bytes) -> None:
        """Take back a session that has read the history of this key. One that could not have all
        of its documents is closed: the next may.
        """
        if warm.session.absent:
            warm.close()
            return
        warm.key, warm.used = key, time.monotonic()
        self._warm.append(warm)
        self.evict()

    def forget(self, keys: Sequence[bytes] | None = None) -> None:
        """Close the warm sessions that ended with one of these turns; None = all."""
        for warm in [warm for warm in self._warm if keys is None or warm.key in keys]:
            self._warm.remove(warm)
            warm.close()

    def evict(self) -> None:
        """Close those that were not used for long, and, of who has most, those beyond the quota."""
        now, settings = time.monotonic(), self._settings
        for warm in [warm for warm in self._warm if now - warm.used > settings.warm_seconds]:
            self._warm.remove(warm)
            warm.close()
            self._cold.append((warm.owner, warm.key))
        while len(self._warm) > settings.warm_sessions:
            counts = Counter(warm.owner for warm in self._warm)
            warm = max(self._warm, key=lambda warm: counts[warm.owner])  # the first of equals
            self._warm.remove(warm)
            warm.close()

    def cold(self) -> Iterator[tuple[str, bytes]]:
        """The owners and keys of sessions that were closed since the last call because they were
        not used for long. Any thread may call.
        """
        while self._cold:
            yield self._cold.popleft()

    @property
    def count(self) -> int:
        """How many are warm and not in use."""
        return len(self._warm)

    @property
    def documents(self) -> set[str]:
        """Names of those that hold what did not fit into prompts of warm sessions."""
        return {name for warm in list(self._warm) for name in warm.documents}

    def _take(
        self, keys: Sequence[bytes], turns: Sequence[Turn], question: str, scope: tuple[int, ...]
    ) -> tuple[WarmSession, int] | None:
        """The warm session that has read most of the turns and nothing else, and how many, if what
        is left fits into its window.
        """
        self.evict()
        for known in range(len(turns), 0, -1):
            for warm in reversed(self._warm):
                if warm.key == keys[known] and warm.scope == scope:
                    if not self.window.takes(turns[known:], question):
                        return None
                    self._warm.remove(warm)
                    return warm, known
        return None

    def _read_anew(
        self, owner: str, plan: Plan, documents: Sequence[str], scope: tuple[int, ...]
    ) -> Opening:
        names, tokens, cached = plan.names, 0, 0
        for name, text in {text.name: text for text in plan.documents}.items():
            there = self._store.has(name) and self._store.document(name).state == "ready"
            if not there:
                yield from self._read(text)
            read = self._store.document(name).tokens
            tokens, cached = tokens + read, cached + read * there
        warm = self._opened(owner, [*documents, *names], scope)
        warm.documents, warm.document_tokens, warm.cached_tokens = names, tokens, cached
        warm.question = plan.question
        yield from self._tell(warm, plan.recent)
        return warm

    def _read(self, text: Text) -> Generator[str, None, None]:
        """Read a document of a prompt, which somebody waits for, or go on where it stood. Raises
        ApiError for one that takes more than its owner may have.
        """
        behind = self._read_behind.pop(text.name, None)
        if behind is not None:
            behind.close()
        self._read_now.add(text.name)
        try:
            with closing(self._reader.ingesting(text, self._store)) as chunks:
                for _ in chunks:
                    if not self._fits(text.name):
                        break
                    yield ""
        finally:
            self._read_now.discard(text.name)
        if not self._fits(text.name):
            self._store.forget(text.name)
            raise ApiError(
                413,
                f"the prompt takes more than {self._most_bytes:,} bytes in the memory, which is "
                "what the conversations of a key may; ask with less text",
                code="quota_exceeded",
            )

    def _fits(self, name: str) -> bool:
        return self._store.document(name).bytes <= self._most_bytes

    def read_behind(self, text: Text) -> Generator[None, None, None]:
        """The same when nobody waits for it: it ends early where somebody comes to read it."""
        if text.name in self._read_now:
            return
        with closing(self._reader.ingesting(text, self._store)) as chunks:
            self._read_behind[text.name] = chunks
            try:
                for _ in chunks:
                    yield
                    if not self._fits(text.name):
                        break
            finally:
                if self._read_behind.get(text.name) is chunks:
                    del self._read_behind[text.name]

    def _opened(self, owner: str, documents: Sequence[str], scope: tuple[int, ...]) -> WarmSession:
        trace = Trace(self._reader)

        def opened() -> AskSession:
            return self._reader.session(
                self._store, documents, on_read=trace, own_blocks=self._own_blocks
            )

        try:
            session = opened()
        except BudgetExceeded:
            self.forget()  # they hold blocks of their own
            session = opened()
        return WarmSession(session, trace, owner, scope)

    def _tell(self, warm: WarmSession, turns: Sequence[Turn]) -> Generator[str, None, None]:
        try:
            for turn in turns:
                warm.session.tell(turn.question, turn.answer)
                yield ""
        except BaseException:
            warm.close()
            raise
