"""Tokenizers over the `tokenizers` library: the text of token ids and its place in a document; and
the byte-level BPE of landmark models, with two ids that no text can produce (landmark and context
miss token).

Every digit is a token, so that a number is copied digit by digit and never is an unseen merge.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from memstore.disk.files import replacement
from memstore.errors import InvalidInput, InvalidWeights
from memstore.paths import read_file

SEGMENT_CHARACTERS = 1 << 16  # text is tokenised in segments of at most this many characters
_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes of UTF-8 that begin no character


class TokenText:
    """A tokenizer over a backend, with the bytes of each token.

    text_ids: number of text ids, which come first; higher ids have no text. character_counts: for
    each id, the number of characters that begin in it; the last entry is for all higher ids.
    """

    def __init__(self, backend: Backend, tokens: Sequence[bytes]) -> None:
        """tokens: the bytes of each token; none for tokens that are not text."""
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

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; an incomplete character is shown as U+FFFD."""
        return self._joined(ids).decode("utf-8", "replace")

    def characters(self, ids: Sequence[int]) -> int:
        """The number of characters that begin in these ids. For a prefix of a text this is its
        length, even if a token splits a character.
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


SPECIAL_IDS = 2  # landmark and context miss token, the two highest ids


class Tokenizer(TokenText):
    """Text to token ids and back; ids 0..vocab_size-3 are text, then the landmark id, then the CMT
    id.
    """

    def __init__(self, backend: Backend) -> None:
        # Set here, not taken from a file: with them fixed, tokens and merges alone decide every id.
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        super().__init__(backend, _token_bytes(backend))
        self.vocab_size: int = backend.get_vocab_size() + SPECIAL_IDS
        self.landmark_id: int = self.vocab_size - 2
        self.fingerprint: str = _fingerprint(backend)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Learn merges from `texts`; `vocab_size` counts all ids, the two special ones included.

        Raises InvalidInput when `vocab_size` cannot hold the 256 bytes and the special ids.
        """
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        if vocab_size < len(alphabet) + SPECIAL_IDS:
            raise InvalidInput(
                f"vocab_size is {vocab_size}; a byte-level tokenizer needs at least "
                f"{256 + SPECIAL_IDS}"
            )
        tokenizer = cls(Backend(models.BPE()))
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - SPECIAL_IDS,
            initial_alphabet=alphabet,
            special_tokens=[],
            show_progress=False,
        )
        tokenizer._backend.train_from_iterator(texts, trainer)
        return cls(tokenizer._backend)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a tokenizer saved by `save`. Raises InvalidWeights if the file is missing or is not
        a tokenizer.
        """
        path = Path(path)
        data = read_file(path)
        try:
            return cls(Backend.from_str(data.decode()))
        except Exception as error:  # the library raises Exception itself
            raise InvalidWeights(f"{path} is not a byte-level tokenizer: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the tokenizer as one JSON file, whole or not at all. Raises OSError."""
        with replacement(Path(path), mode=0o644) as file:
            file.write(self._backend.to_str().encode())

    @staticmethod
    def segments(text: str) -> Iterator[str]:
        """The segments of a text, which are tokenised one by one: each ends after the last newline
        of its first 65,536 characters, else before the last white space, else there.
        """
        start = 0
        while len(text) - start > SEGMENT_CHARACTERS:
            end = start + _segment_end(text[start : start + SEGMENT_CHARACTERS])
            yield text[start:end]
            start = end
        if start < len(text):
            yield text[start:]

    def encode(self, text: str) -> list[int]:
        """The ids of a text, segment by segment."""
        return [
            token for segment in self.segments(text) for token in TokenText.encode(self, segment)
        ]


def _fingerprint(backend: Backend) -> str:
    """Hex digest of the tokens and merges: equal in all versions of the library, whose file format
    changes.
    """
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    return hashlib.blake2b(json.dumps([tokens, merges]).encode(), digest_size=16).hexdigest()


def _token_bytes(backend: Backend) -> list[bytes]:
    """The bytes of every token."""
    vocab = backend.get_vocab()
    byte_of = {ord(symbol): byte for byte, symbol in enumerate(byte_symbols())}
    tokens = sorted(vocab, key=vocab.__getitem__)
    return [token.translate(byte_of).encode("latin-1") for token in tokens]
