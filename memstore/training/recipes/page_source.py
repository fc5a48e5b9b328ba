"""What pages are written from: sentences as token ids, and text of the corpus."""

import re
from random import Random

import numpy as np

from memstore.model.landmark.byte_tokenizer import Tokenizer
from memstore.training.corpus import CorpusTokenizer, TokenCorpus
from memstore.training.recipes import facts as language

# Where the pre-tokenizer cuts the sentences of facts.py: before a space, around a digit, around a
# newline. Pieces between such cuts are encoded apart, and so from a cache, with the same ids as the
# whole sentence.
_PIECES = re.compile(r" ?[^ \n0-9]+|[0-9\n]| (?=[0-9])")
_CACHED_PIECES = 200_000


class Source:
    """What pages are written from: the tokenizer, the corpus and the one random stream that decides
    everything.
    """

    def __init__(self, tokenizer: CorpusTokenizer, corpus: TokenCorpus, rng: Random) -> None:
        self.rng = rng
        self.corpus = corpus
        self._tokenizer = tokenizer
        # a plain view: slicing a memory map costs ten times as much
        self._tokens = np.asarray(corpus.tokens)
        # another tokenizer may cut across the pieces
        self._by_pieces = isinstance(tokenizer, Tokenizer)
        self._pieces: dict[str, list[int]] = {}
        texts = [tokenizer.decode([token]) for token in range(tokenizer.text_ids)]
        self.space = tokenizer.encode(" ")
        self.ends_line = [text.endswith("\n") for text in texts]
        self.ends_sentence = np.array([text[-1:] in (".", "!", "?", "\n") for text in texts])
        self.grass = [
            self.encode(f" {sentence.removesuffix('.')}.")
            for sentence in language.GRASS.split(". ")
        ]

    def encode(self, text: str) -> list[int]:
        """Ids of a sentence of facts.py: what the tokenizer gives for the whole sentence, from a
        cache of pieces.
        """
        if not self._by_pieces:
            return self._tokenizer.encode(text)
        ids: list[int] = []
        for piece in _PIECES.findall(text):
            known = self._pieces.get(piece)
            if known is None:
                known = self._tokenizer.encode(piece)
                if len(self._pieces) < _CACHED_PIECES:
                    self._pieces[piece] = known
            ids += known
        return ids

    def text(self, offset: int, length: int) -> np.ndarray:
        """Ids of the corpus from `offset` on, fewer than `length` at its end."""
        return self._tokens[offset : offset + length]
