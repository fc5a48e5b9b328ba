"""Training batches: windows of book text that state facts and ask for them; memories of such
windows, with chunks that ask for the facts; and the loss weight of every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, TypeVar

import torch

from memstore.model.tokenizer import Tokenizer
from memstore.training.corpus import TokenCorpus
from memstore.training.curriculum import RecallConfig
from memstore.training.facts import Pools, draw_pass_key
from memstore.training.pages import PLAIN, Known, Page, Source, StatedFact, forms

_VISIBLE = 2  # windows that a chunk may read
_PASS_KEYS = 0.15  # of the windows, with a pass key
_PASS_KEY_ASKED = 0.2  # chunks that may read the window of the pass key, and ask for it
_OWN_GAP = 20  # tokens of filler in windows of a memory that ask for their own facts


Batch = TypeVar("Batch", "WindowBatch", "MemoryBatch", "QuestionBatch")


@dataclass(frozen=True)
class WindowBatch:
    """Windows with landmarks: T = blocks * (block_size + 1), and every (block_size + 1)-th token is
    a landmark.
    """

    ids: torch.Tensor  # int64 [B, T]
    weights: torch.Tensor  # float32 [B, T]: loss weight of each id as a target; 0 for landmarks


@dataclass(frozen=True)
class MemoryBatch:
    """Windows that the model stores as memory, and the facts stated in them."""

    ids: torch.Tensor  # int64 [W, T], as in WindowBatch
    weights: torch.Tensor  # float32 [W, T]
    facts: list[list[StatedFact]]  # of each window, whole statements only
    text_windows: dict[int, int]  # plain windows, each with the corpus offset of the text after it
    # of a memory of plain text only: its windows, those of one place together; else empty
    runs: list[list[int]]
    pass_key_window: int | None
    contents: list[list[int]] = field(repr=False)  # content ids of each window, without landmarks
    pools: Pools = field(repr=False)


@dataclass(frozen=True)
class QuestionBatch:
    """Chunks that read a memory."""

    ids: torch.Tensor  # int64 [B, T], as in WindowBatch
    weights: torch.Tensor  # float32 [B, T]
    # int64 [B, V]: windows whose content the chunk may read; oldest first, but see `continues`
    visible: torch.Tensor
    continues: torch.Tensor  # bool [B]: the chunk directly follows the end of window visible[:, 0]


def moved(batch: Batch, device: torch.device) -> Batch:
    """The same batch with its tensors on a device."""
    tensors: dict[str, Any] = {
        n: x.to(device) for n, x in vars(batch).items() if isinstance(x, torch.Tensor)
    }
    return replace(batch, **tensors)


class RecallData:
    """A reproducible source of batches: equal states give equal batches, in any process.

    `config` may be replaced between batches (a curriculum); the state does not contain it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        corpus: TokenCorpus,
        config: RecallConfig,
        block_size: int,
        seed: int,
    ) -> None:
        """block_size: content tokens in a block; a landmark follows each."""
        self.config, self._block_size = config, block_size
        self._landmark_id = tokenizer.landmark_id
        self._rng = Random(seed)
        self._source = Source(tokenizer, corpus, self._rng)
        self._words = corpus.words

    def state(self) -> dict[str, Any]:
        """State for `restore`, as tensors and numbers."""
        version, numbers, gauss = self._rng.getstate()
        return {"version": version, "numbers": torch.tensor(numbers), "gauss": gauss}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue exactly like the source that returned `state`."""
        self._rng.setstate((state["version"], tuple(state["numbers"].tolist()), state["gauss"]))

    def windows(self, batch: int, blocks: int, *, gap: float) -> WindowBatch:
        """Draw `batch` windows of `blocks` blocks: facts, questions about them, and about `gap`
        tokens of filler after each.

        Shares of the windows (RecallConfig) hold repeated spans or plain text instead, or also a
        pass key.
        """
        config, rng = self.config, self._rng
        pages = []
        for _ in range(batch):
            page = self._page(blocks)
            pools = self._pools(config.hard)
            u = rng.random()
            if u < config.plain_share:
                page.plain()
            elif u < config.plain_share + config.copy_share:
                page.copies(gap)
            else:
                pass_key = u < config.plain_share + config.copy_share + _PASS_KEYS
                page.asked_facts(gap, pools, pass_key, {})
            pages.append(page)
        return WindowBatch(*self._with_landmarks(pages, blocks))

    def memory(self, num_windows: int, blocks: int) -> MemoryBatch:
        """Draw `num_windows` windows of `blocks` blocks to remember, later ones newer.

        Two windows give the same thing different values only if the newer one states an update.
        """
        config, rng = self.config, self._rng
        if rng.random() < config.readings:
            return self._reading(num_windows, blocks)
        gap = rng.choice(config.gaps)
        pools = self._pools(config.hard)
        statements = forms("STATEMENTS", pools)
        if rng.random() < config.one_form:
            statements = (rng.choice(statements),)
        pass_key_window = rng.randrange(num_windows) if rng.random() < config.pass_key else None
        known: Known = {}
        facts: list[list[StatedFact]] = [[] for _ in range(num_windows)]
        text_windows: dict[int, int] = {}
        pages = []
        for window in range(num_windows):
            page = self._page(blocks)
            u = 1.0 if window == pass_key_window else rng.random()
            if u < config.plain:
                text_windows[window] = page.plain()
            elif u < config.plain + config.copies:
                page.copies(_OWN_GAP)
            elif u < config.plain + config.copies + config.own_questions:
                page.asked_facts(_OWN_GAP, self._pools(0.0), False, known)
            else:
                key = draw_pass_key(rng, config.repeats) if window == pass_key_window else None
                facts[window] = page.stated_facts(window, gap, pools, statements, key, known)
            pages.append(page)
        ids, weights = self._with_landmarks(pages, blocks)
        contents = [page.ids for page in pages]
        return MemoryBatch(ids, weights, facts, text_windows, [], pass_key_window, contents, pools)

    def _reading(self, num_windows: int, blocks: int) -> MemoryBatch:
        """Windows of plain text only, in runs of consecutive windows of the corpus."""
        windows = range(num_windows)
        run = min(self.config.run, num_windows)
        runs = [list(windows[last - run : last]) for last in range(run, num_windows + 1, run)]
        text_windows: dict[int, int] = {}
        pages = []
        for window in windows:
            page = self._page(blocks)
            text_windows[window] = page.plain(text_windows[window - 1] if window % run else None)
            pages.append(page)
        ids, weights = self._with_landmarks(pages, blocks)
        contents = [page.ids for page in pages]
        facts: list[list[StatedFact]] = [[] for _ in windows]
        pools = self._pools(0.0)
        return MemoryBatch(ids, weights, facts, text_windows, runs, None, contents, pools)

    def questions(
        self, memory: MemoryBatch, num_chunks: int, blocks: int, recents: int = 4
    ) -> QuestionBatch:
        """Draw `num_chunks` chunks of `blocks` blocks; each asks for facts of the two windows that
        it may read.

        Half of the chunks that directly continue a window ask first for facts of its last `recents`
        blocks. In a memory of runs, each chunk continues the text of a window and may read its run.
        """
        config, rng = self.config, self._rng
        visible = len(memory.runs[0]) if memory.runs else min(_VISIBLE, len(memory.contents))
        pages, views, continues = [], [], []
        for _ in range(num_chunks):
            page = self._page(blocks)
            view, purpose = self._view(memory, visible)
            if purpose == "text":
                follows = rng.random() < config.text_follows
                text = self._source.text(memory.text_windows[view[0]], blocks * self._block_size)
                page.put(text.tolist(), PLAIN)
            else:
                follows = rng.random() < config.question_follows
                if not follows:
                    view.sort()
                asked = self._asked(memory, view, purpose, recents if follows else 0)
                page.questions(
                    [stated.fact for stated in asked],
                    [memory.contents[w] for w in view],
                    memory.pools,
                )
            pages.append(page)
            views.append(view)
            continues.append(follows)
        ids, weights = self._with_landmarks(pages, blocks)
        return QuestionBatch(ids, weights, torch.tensor(views), torch.tensor(continues))

    def _view(self, memory: MemoryBatch, visible: int) -> tuple[list[int], str]:
        """Windows that a chunk may read, beginning with the one that it may continue; and the
        chunk's purpose: text, pass key, update or facts.
        """
        config, rng = self.config, self._rng
        windows = range(len(memory.contents))
        if memory.runs:
            run = rng.choice(memory.runs)
            last = rng.choice(run)
            return [last, *(w for w in run if w != last)], "text"
        moved = [
            (stated.window, stated.replaces)
            for facts in memory.facts
            for stated in facts
            if stated.current and stated.replaces is not None and stated.replaces != stated.window
        ]
        if memory.text_windows and rng.random() < config.continuations:
            view, purpose = [rng.choice(list(memory.text_windows))], "text"
        elif memory.pass_key_window is not None and rng.random() < _PASS_KEY_ASKED:
            view, purpose = [memory.pass_key_window], "pass key"
        elif visible > 1 and moved and rng.random() < config.updates_asked:
            view, purpose = list(rng.choice(moved)), "update"
        else:
            view, purpose = (
                [rng.choice([w for w in windows if memory.facts[w]] or windows)],
                "facts",
            )
        view += rng.sample([w for w in windows if w not in view], visible - len(view))
        # A chunk of questions follows any of its windows, but of an update the newer one.
        if purpose in ("pass key", "facts"):
            rng.shuffle(view)
        return view, purpose

    def _asked(
        self, memory: MemoryBatch, view: Sequence[int], purpose: str, recents: int
    ) -> list[StatedFact]:
        """Facts of the visible windows that no hidden window contradicts, in the order of the
        questions.
        """
        rng, size = self._rng, len(memory.contents[0])
        known = [
            stated
            for window in view
            for stated in memory.facts[window]
            if stated.current and (stated.replaces is None or stated.replaces in view)
        ]
        rng.shuffle(known)
        recent_from = size - recents * self._block_size
        recents_first = recents > 0 and rng.random() < 0.5
        pass_key_first = purpose == "pass key" or rng.random() < 0.5

        def later(stated: StatedFact) -> bool:
            if stated.fact.is_pass_key:
                return not pass_key_first
            if (
                purpose == "update"
                and stated.replaces is not None
                and stated.replaces != stated.window
            ):
                return False
            return not (recents_first and stated.window == view[0] and stated.start >= recent_from)

        return sorted(known, key=later)

    def _pools(self, hard: float) -> Pools:
        config, rng = self.config, self._rng
        simple = rng.random() < config.simple
        pools = Pools.of("train", self._words, simple=simple, repeats=config.repeats)
        return pools.narrowed(rng) if rng.random() < hard else pools

    def _page(self, blocks: int) -> Page:
        return Page(self._source, self.config, blocks, self._block_size)

    def _with_landmarks(
        self, pages: Sequence[Page], blocks: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Finish the pages and put a landmark after each block: ids and weights [len(pages), blocks
        * (l + 1)].
        """
        for page in pages:
            page.finish()
        size = self._block_size
        shape = (len(pages), blocks, size)
        ids = torch.full((len(pages), blocks, size + 1), self._landmark_id, dtype=torch.int64)
        weights = torch.zeros((len(pages), blocks, size + 1), dtype=torch.float32)
        ids[:, :, :size] = torch.tensor([page.ids for page in pages]).view(shape)
        weights[:, :, :size] = torch.tensor([page.weights for page in pages]).view(shape)
        return ids.flatten(1), weights.flatten(1)
