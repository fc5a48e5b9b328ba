"""The incremental detokenizer: what of an answer's text can be sent while it is generated."""

from collections.abc import Sequence

from memstore.model.adapter import TextTokenizer
from memstore.model.session import ends_sentence


class Detokenizer:
    """The text so far of tokens that are generated one by one, without the space around it.

    What may still turn out to be cut off (a character's first bytes, space at the end, a full stop
    that ends the answer, the beginning of a stop text) is held back.
    """

    def __init__(
        self, tokenizer: TextTokenizer, *, stop: Sequence[str] = (), sentence: bool = False
    ) -> None:
        """stop: texts that end it and are no part of it; sentence: so does the end of its first
        sentence or line.
        """
        self._tokenizer, self._stop, self._sentence = tokenizer, stop, sentence
        self.tokens: list[int] = []
        self.ended = False  # by a stop text, or by the end of a sentence
        self.cut = False  # a stop text was generated, which is no part of the answer
        self._text = ""  # of all tokens, up to a stop text, without the space before it
        self._sent = 0

    @property
    def text(self) -> str:
        """All of it, as it is sent in the end."""
        text = self._text.strip()
        return text.removesuffix(".") if self._sentence else text

    def add(self, token: int) -> str:
        """What can be sent now that this token is there."""
        self.tokens.append(token)
        self._text = self._tokenizer.decode(self.tokens).lstrip()
        found = [at for stop in self._stop if (at := self._text.find(stop)) >= 0]
        if found:
            self._text, self.ended, self.cut = self._text[: min(found)], True, True
            return self.rest()
        if self._sentence and self.text and ends_sentence(self._tokenizer.decode([token])):
            self.ended = True
            return self.rest()
        return self._send(self._text[: len(self._text) - self._held(self._text)])

    def rest(self) -> str:
        """What is left to be sent when nothing follows."""
        return self._send(self.text)

    def _send(self, text: str) -> str:
        piece, self._sent = text[self._sent :], max(self._sent, len(text))
        return piece

    def _held(self, text: str) -> int:
        """Characters at the end of a text that wait for what follows."""
        kept = text.rstrip("\ufffd").rstrip()
        if self._sentence:
            kept = kept.rstrip(".").rstrip()
        held = len(text) - len(kept)
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(text)), held, -1):
                if text.endswith(stop[:size]):
                    held = size
                    break
        return held
