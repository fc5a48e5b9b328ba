"""The text that benchmarks read: books as token ids."""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from memstore.model.tokenizer import Tokenizer
from memstore.training.corpus import is_held_out, read_documents

CHARACTERS = 4.4  # of a token, about


def part(texts: Sequence[str], tokens: float, seed: int) -> str:
    """About `tokens` tokens in a row of a text that is long enough. Raises SystemExit."""
    characters = int(tokens * CHARACTERS)
    long = [text for text in read_documents(texts) if len(text) >= characters]
    if not long:
        raise SystemExit(f"no text has {characters:,} characters; ask for fewer tokens")
    rng = Random(seed)
    text = rng.choice(long)
    start = rng.randrange(len(text) - characters + 1)
    return text[start : start + characters]


@dataclass(frozen=True)
class Books:
    """The books of some files as token ids, and words held out from training that occur in them."""

    books: list[np.ndarray]
    words: tuple[str, ...]

    @classmethod
    def read(cls, paths: Sequence[str], tokenizer: Tokenizer, cache: Path) -> "Books":
        """Tokenise the files, or take what was tokenised into the directory `cache` before."""
        named = [
            f"{Path(path).name} {Path(path).stat().st_size}"
            for path in paths
            if Path(path).exists()
        ]
        digest = hashlib.blake2b(
            "\n".join([tokenizer.fingerprint, *named]).encode(), digest_size=8
        ).hexdigest()
        file = cache / f"books-{digest}.npz"
        if not file.exists():
            counts: Counter[str] = Counter()
            books = []
            for text in read_documents(paths):
                counts.update(re.findall(r"\b[a-z]{4,10}\b", text))
                books.append(np.asarray(tokenizer.encode(text), dtype=np.uint32))
            # Frequent to middling words, those alone that training keeps for evaluation.
            words = sorted(word for word, _ in counts.most_common(6000)[150:] if is_held_out(word))
            cache.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(f".{os.getpid()}.npz")
            arrays: dict[str, Any] = {f"book{n}": book for n, book in enumerate(books)}
            np.savez(
                partial, words=np.array(words), lengths=np.array(list(map(len, books))), **arrays
            )
            partial.replace(file)
        stored = np.load(file)
        books = [stored[f"book{n}"].astype(np.int64) for n in range(len(stored["lengths"]))]
        return cls(books, tuple(str(word) for word in stored["words"]))

    @property
    def tokens(self) -> int:
        """Tokens in all books."""
        return sum(len(book) for book in self.books)

    def place(self, rng: Random, length: int) -> np.ndarray:
        """`length` consecutive tokens of one book, from a random place; books weighed by their
        length.
        """
        room = [max(0, len(book) - length + 1) for book in self.books]
        if not any(room):
            raise SystemExit(f"no book has {length:,} tokens; give longer texts")
        book = rng.choices(self.books, room)[0]
        start = rng.randrange(len(book) - length + 1)
        return book[start : start + length]

    def run(self, rng: Random, length: int) -> np.ndarray:
        """`length` tokens: books in a random order, from a random place of the first, begun again
        at their end.
        """
        order = list(self.books)
        rng.shuffle(order)
        skip = rng.randrange(max(1, len(order[0]) // 2))
        pieces, total = [order[0][skip:]], len(order[0]) - skip
        turn = 1
        while total < length:
            book = order[turn % len(order)]
            pieces.append(book)
            total += len(book)
            turn += 1
        return np.concatenate(pieces)[:length]
