"""The method under test: a memory that a model has read into before, asked in a process of its
own.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.real.blocks import Blocks
from benchmarks.real.methods import Method, standing
from benchmarks.real.plan import Question
from benchmarks.real.prompting import Prompted
from benchmarks.real.results import Row
from memstore import MemoryStore
from memstore.disk.format.text_parts import Keep
from memstore.model.passages.passage_choice import Chosen
from memstore.model.passages.passage_session import PassageSession
from memstore.model.passages.selector import confidence
from memstore.model.source_text import Text


class Memory(AbstractContextManager["Memory"]):
    """A memory on disk with a plan's documents, and the reader that it belongs to."""

    def __init__(self, reader: Any, directory: Path, blocks: Blocks) -> None:
        """Opens the memory, or begins one. reader: a HuggingFacePassageModel."""
        self.reader, self.blocks = reader, blocks
        reader.selector = self.seen = _Seen(reader.selector)
        self.directory = directory
        known = (directory / "data.mdb").exists()
        open_or_create = MemoryStore.open if known else MemoryStore.create
        more = {} if known else {"selector": reader.keeps}
        self.store = open_or_create(directory, reader.signature, **more)

    def reopen(self) -> None:
        """Hold nothing of it in main memory any more."""
        self.store.close()
        self.store = MemoryStore.open(self.directory, self.reader.signature)

    def read_in(self, documents: Iterable[str], keep: Keep = "kv") -> None:
        """Ingest documents that are not there yet, by name; says how fast that was. keep: as
        HuggingFacePassageModel.ingest takes it.
        """
        known = {document.name for document in self.store.ready()}
        missing = [name for name in documents if name not in known]
        began, tokens = time.perf_counter(), 0
        for number, name in enumerate(missing, 1):
            text = Text(self.blocks.documents[name], name)
            tokens += self.reader.ingest(text, self.store, keep=keep).tokens
            if number % 10 == 0 or number == len(missing):
                seconds = time.perf_counter() - began
                print(
                    f"  {number}/{len(missing)} documents read, {tokens:,} tokens, "
                    f"{tokens / seconds:.0f} a second",
                    flush=True,
                )

    def __exit__(self, *error: object) -> None:
        self.store.close()

    def method(self, name: str) -> Method:
        """memory: the reader's own settings; memory@K: the best K passages; memory-right: the right
        ones. Raises SystemExit for another name.
        """
        kind, _, number = name.partition("@")
        if kind not in ("memory", "memory-right") or (number and not number.isdigit()):
            raise SystemExit(f"no method {name!r}")
        settings = {"top_k": int(number), "score_range": 1e9} if number else {}
        return _Asked(self, settings, given=kind == "memory-right")

    def as_text(self, prompted: Prompted) -> Method:
        """The passages that the memory chooses by the reader's own settings, as text in a prompt of
        the stock model.
        """
        return _AsText(self, prompted)

    def names(self, chosen: list[Chosen]) -> list[tuple[str, int]]:
        """Blocks by their documents' names."""
        name_of = {document.id: document.name for document in self.store.documents()}
        return [(name_of[block.document], block.block) for block in chosen]

    def given(self, question: Question) -> list[Chosen]:
        """The right blocks of a question."""
        return [
            Chosen(self.store.document(name).id, block, 0.0)
            for name, block in self.blocks.right(question)
        ]


class _Seen:
    """A selector whose last scores are kept to be looked at."""

    def __init__(self, selector: Any) -> None:
        self.selector = selector
        self.last = torch.zeros(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.selector, name)

    def scores(self, *given: Any) -> torch.Tensor:
        self.last = self.selector.scores(*given)
        return self.last


class _Asked:
    """Asks a memory with some settings. given: the right blocks are read, nothing is chosen."""

    def __init__(self, memory: Memory, settings: dict[str, Any], *, given: bool) -> None:
        self.memory, self.settings, self.given = memory, settings, given

    def ask(self, questions: Sequence[Question]) -> list[Row]:
        return [self._ask(question) for question in questions]

    def _ask(self, question: Question) -> Row:
        memory = self.memory
        blocks = memory.given(question) if self.given else []
        settings = self.settings
        if self.given:
            settings = {"top_k": max(1, len(blocks))} | self.settings
        with memory.reader.session(
            memory.store, question.documents, retrieve=not self.given, **settings
        ) as session:
            if self.given:
                session.read(blocks)
            right, said = answer(memory.reader, session, question)
            row: Row = {"right": right, "said": said, "answered": session.answered}
            row["read"] = memory.names(session.chosen)
        if not self.given:
            scores = memory.seen.last.cpu()
            scope = memory.blocks.scope(question.documents)
            row |= standing(np.asarray(scores), scope, memory.blocks, question)
            row["best"] = confidence(scores)
        return row


class _AsText:
    """Reads what a memory chooses as text."""

    def __init__(self, memory: Memory, prompted: Prompted) -> None:
        self.memory, self.prompted = memory, prompted

    def ask(self, questions: Sequence[Question]) -> list[Row]:
        rows = [self._choose(question) for question in questions]
        texts = [self.memory.blocks.texts(row["read"]) for row in rows]
        asked = [(q, some) for q, some, row in zip(questions, texts, rows) if row["answered"]]
        answers = iter(self.prompted.answers(asked))
        nothing: Row = {"right": 0.0, "said": ""}
        return [row | (next(answers)._asdict() if row["answered"] else nothing) for row in rows]

    def _choose(self, question: Question) -> Row:
        reader = self.memory.reader
        with reader.session(self.memory.store, question.documents) as session:
            chosen = session.choose(question.text, *reader.turn_ids(question.text, first=True))
            return {"answered": session.answered, "read": self.memory.names(chosen)}


def answer(reader: Any, session: PassageSession, question: Question) -> tuple[float, str]:
    """How right a session's answer is, 0..1, and what was generated ("" where it was forced);
    nothing is said where nothing in the memory answers.
    """
    encode = reader.tokenizer.encode
    state = session.ask(question.text, lambda: None)
    if not session.answered:
        return 0.0, ""
    if question.primed:
        state = session.feed(encode(question.primed))[-1]
    if question.rule != "forced":
        said = reader.tokenizer.decode(list(session.generate(state, question.most)))
        return question.marks(said), said
    if not question.answers:
        return 0.0, ""
    ids = encode(question.following)
    states = torch.cat([state[None], session.feed(ids[:-1])])
    return float(session.logits(states).argmax(-1).tolist() == ids), ""
