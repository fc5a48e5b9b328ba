"""The local text of a session as its selector sees it: the question's rows, what is read behind it,
and the landmarks of blocks that leave.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from memstore.model.compact import KeysValues, Window
from memstore.model.reader import ChoosingReader
from memstore.model.tap import TapWalk
from memstore.model.tapped import Tapped


class LocalText:
    """Ids behind the prefix, read without memory when that is first needed, every token once."""

    def __init__(
        self, reader: ChoosingReader, beginning: Sequence[KeysValues], window: Window
    ) -> None:
        self.ids: list[int] = []  # that have not left, oldest first
        self.tokens = 0  # read so far, with those that left
        self._reader, self._window = reader, window
        self._walk = TapWalk(reader, beginning, window)
        self._seen = 0  # of `ids`, how many the walk has read
        self._landmarks: Tensor | None = None  # of these
        self._asked = Tapped([])  # the last question's words
        self._since: list[Tapped] = []  # seen behind its turn, as long as a window at most
        self._ahead: tuple[list[int], TapWalk, Tapped] | None = None

    def look_ahead(self, ids: Sequence[int], words: range) -> Tapped:
        """What the words of a turn show that is about to be read."""
        self.see()
        walk = self._walk.fork()
        shown = walk.read(ids)
        self._ahead = list(ids), walk, shown
        self._asked, self._since = shown.part(words), []
        return self._asked

    def extend(self, ids: Sequence[int]) -> None:
        """These ids are read."""
        ahead, self._ahead = self._ahead, None
        self.ids.extend(ids)
        self.tokens += len(ids)
        if ahead is not None and ahead[0] == list(ids):
            _, self._walk, shown = ahead
            self._take(shown)

    def see(self) -> None:
        """Have seen all that was read."""
        if self._seen < len(self.ids):
            shown = self._walk.read(self.ids[self._seen :])
            self._take(shown)
            self._since.append(shown)
            while sum(len(part.ids) for part in self._since[1:]) >= self._window.tokens:
                del self._since[0]

    @property
    def rows(self) -> Tapped:
        """What the last question's words show, and all that was read behind its turn."""
        self.see()
        return Tapped.joined([self._asked, *self._since])

    @property
    def said(self) -> list[int]:
        """The ids that were read behind the last question's turn."""
        self.see()
        return [token for part in self._since for token in part.ids]

    def let_go(self, tokens: int) -> tuple[list[int], Tensor | None]:
        """Take the oldest tokens away; their ids, and their landmarks if the selector keeps any."""
        self.see()
        ids = self.ids[:tokens]
        landmarks = None if self._landmarks is None else self._landmarks[:tokens]
        self.forget(tokens)
        return ids, landmarks

    def forget(self, tokens: int) -> None:
        """Take the oldest tokens away, whether they were seen or not."""
        self.ids, self._seen = self.ids[tokens:], max(0, self._seen - tokens)
        if self._landmarks is not None:
            self._landmarks = self._landmarks[tokens:].clone()

    def _take(self, shown: Tapped) -> None:
        first = self.tokens - len(self.ids) + self._seen
        landmarks = self._reader.selector.landmarks(shown, first)
        if landmarks is not None:
            held = self._landmarks
            self._landmarks = landmarks if held is None else torch.cat((held, landmarks))
        self._seen += len(shown.ids)
