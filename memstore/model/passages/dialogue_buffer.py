"""The dialogue buffer of a session: ids of its local text, and what its selector sees."""

from collections.abc import Sequence

from memstore.model.passages.activation_capture import CapturingForward
from memstore.model.passages.passage_protocol import PassageModel
from memstore.model.passages.selectors.captured_activations import Captured

_FURTHER = 64  # tokens that are looked through for the end of a sentence


class DialogueBuffer:
    """Ids behind the prefix; the selector reads them without memory when that is first needed,
    every token once.
    """

    def __init__(self, reader: PassageModel, most: int) -> None:
        """most: tokens that are held at most."""
        self.ids: list[int] = []  # that have not left, oldest first
        self.tokens = 0  # read so far, with those that left
        self._reader = reader
        self._forward = CapturingForward(reader, most)
        self._seen = 0  # of `ids`, how many that has read
        self._ahead: tuple[list[int], CapturingForward] | None = None

    def look_ahead(self, ids: Sequence[int], words: range) -> Captured:
        """What the words of a turn show that is about to be read."""
        if self._seen < len(self.ids):
            self._forward.read(self.ids[self._seen :])
            self._seen = len(self.ids)
        forward = self._forward.fork()
        shown = forward.read(ids)
        self._ahead = list(ids), forward
        return shown.part(words)

    def extend(self, ids: Sequence[int]) -> None:
        """These ids are read."""
        ahead, self._ahead = self._ahead, None
        self.ids.extend(ids)
        self.tokens += len(ids)
        if ahead is not None and ahead[0] == list(ids):
            self._forward, self._seen = ahead[1], len(self.ids)

    def sentences(self, least: int) -> int:
        """How many of the oldest tokens, at least so many, are whole sentences; `least` where no
        sentence ends soon behind it.
        """
        decode = self._reader.tokenizer.decode
        for end in range(least, min(len(self.ids), least + _FURTHER) + 1):
            if (
                decode(self.ids[end - 1 : end])
                .rstrip("\"'\u2019\u201d)*_ ")
                .endswith((".", "!", "?", "\n"))
            ):
                return end
        return least

    def let_go(self, tokens: int) -> list[int]:
        """Take the oldest tokens away; their ids."""
        gone, self.ids = self.ids[:tokens], self.ids[tokens:]
        self._seen = max(0, self._seen - tokens)
        return gone
