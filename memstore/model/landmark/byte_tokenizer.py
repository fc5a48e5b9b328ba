"""Byte-level BPE over the `tokenizers` library, with two ids that no text can produce: landmark and
context miss token.

Every digit is a token of its own, so that a number is copied digit by digit and never met as an
unseen merge.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from memstore.disk.files import replacement
from memstore.errors import InvalidInput, InvalidWeights
from memstore.model.model_files import read_file
from memstore.model.token_text import TokenText, byte_symbols

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
        self.cmt_id: int = self.vocab_size - 1
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
        """Read a tokenizer saved by `save`. Raises InvalidWeights when the file is missing or is no
        tokenizer.
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

    def encode(self, text: str) -> list[int]:
        """The ids of a text, the same as `encode_stream` gives in segments."""
        return [token for ids in self.encode_stream([text]) for token in ids]


def _fingerprint(backend: Backend) -> str:
    """Hex digest of the tokens and merges: the same in every version of the library, whose file
    format changes.
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
