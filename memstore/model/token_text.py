"""Text of token ids, and where it stands: what tokenizers over the `tokenizers` library share."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from tokenizers import Tokenizer as Backend

from memstore.errors import InvalidInput

SEGMENT_CHARACTERS = 1 << 16  # text is tokenised in segments of at most this many characters
_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes of UTF-8 that begin no character


class TokenText:
    """A TextTokenizer (memstore.model.adapter) over a backend, by the bytes of each of its tokens.

    text_ids: ids of text, the first ones; higher ids have no text. character_counts: by id, how
    many characters begin in it; the last entry is that of all higher ids.
    """

    def __init__(self, backend: Backend, tokens: Sequence[bytes]) -> None:
        """tokens: the bytes of each token; none for those that are no text."""
        self._backend = backend
        self.text_ids = len(tokens)
        self._bytes = [*tokens, b""]
        self.character_counts = np.array(
            [len(data.translate(None, _CONTINUATION)) for data in self._bytes], dtype=np.int64
        )

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special ones. Raises InvalidInput for lone surrogates."""
        with _unicode():
            return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts, on RAYON_NUM_THREADS threads. Raises what `encode` raises."""
        with _unicode():
            found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def encode_stream(self, pieces: Iterable[str]) -> Iterator[list[int]]:
        """The ids of a text that arrives in pieces, one list for each segment (see `segments`)."""
        for segment in self.segments(pieces):
            yield TokenText.encode(self, segment)

    @staticmethod
    def segments(pieces: Iterable[str]) -> Iterator[str]:
        """Cut a text that arrives in pieces into the segments that are tokenised one by one.

        They depend on the text alone, never on the size of the pieces: each ends after the last
        newline of its first 65,536 characters, else before the last white space, else there. Holds
        one segment in memory (and the piece it came from).
        """
        buffer = ""
        for piece in pieces:
            buffer += piece
            start = 0
            while len(buffer) - start > SEGMENT_CHARACTERS:
                end = start + _segment_end(buffer[start : start + SEGMENT_CHARACTERS])
                yield buffer[start:end]
                start = end
            buffer = buffer[start:]
        if buffer:
            yield buffer

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; a character that is cut shows as U+FFFD."""
        return self._joined(ids).decode("utf-8", "replace")

    def characters(self, ids: Sequence[int]) -> int:
        """How many characters begin in these ids: those of a prefix of a text count its characters
        exactly, even where a token splits one.
        """
        known = np.minimum(np.asarray(ids, dtype=np.int64), self.text_ids)
        return int(self.character_counts[known].sum())

    def whole_characters(self, ids: Sequence[int], following: Sequence[int]) -> str:
        """The characters that begin in these ids; the last one may end in the ids that follow."""
        data, after = self._joined(ids).lstrip(_CONTINUATION), self._joined(following)
        if data:
            data += after[: len(after) - len(after.lstrip(_CONTINUATION))]
        return data.decode("utf-8", "replace")

    def _joined(self, ids: Sequence[int]) -> bytes:
        return b"".join(self._bytes[min(int(token), self.text_ids)] for token in ids)


@contextmanager
def _unicode() -> Iterator[None]:
    try:
        yield
    except (TypeError, UnicodeEncodeError) as error:
        raise InvalidInput(
            "the text holds a lone surrogate and is not valid Unicode; read it again as UTF-8"
        ) from error


def _segment_end(window: str) -> int:
    """Length of the segment that opens `window`, at least 1."""
    newline = window.rfind("\n")
    if newline >= 0:
        return newline + 1
    # Before the space, not after it: a word and the space before it are one token.
    for position in range(len(window) - 1, 0, -1):
        if window[position].isspace():
            return position
    return len(window)


def byte_symbols() -> list[str]:
    """The printable character that stands for each of the 256 bytes in a byte-level vocabulary
    (GPT-2's table).
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(hidden)) for byte in range(256)]
