"""Training text: documents from files, and their token ids as one array on disk."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import msgspec
import numpy as np
import zstandard

from memstore.decode import from_json
from memstore.disk.files import replacement
from memstore.errors import InvalidInput
from memstore.model.tokenizer import Tokenizer

ENTITY_WORDS = 6000  # words collected from a corpus to name things with
HELD_OUT_PERCENT = 15  # of the entity words, kept from training
_WORDS_PER_DOCUMENT = 200_000  # characters of each document that words are collected from
_COMMONEST_SKIPPED = 150  # "that", "with", ...: too frequent to name anything
# segments tokenised at once: bounds memory at about 100 MB, enough for every core
_SLICE_SEGMENTS = 16
T = TypeVar("T")


def read_documents(paths: Iterable[str | Path]) -> Iterator[str]:
    """Yield the documents of `.txt` files (one each) and `.jsonl.zst` files (the field "text" of
    each line).

    Raises InvalidInput, naming the file, for one that is missing, empty, binary or of another kind.
    """
    for path in map(Path, paths):
        if not path.is_file():
            raise InvalidInput(f"no such file: {path}")
        if path.stat().st_size == 0:
            raise InvalidInput(f"{path} is empty")
        if path.name.endswith(".jsonl.zst"):
            yield from _read_json_lines(path)
        elif path.suffix == ".txt":
            yield _read_text(path)
        else:
            raise InvalidInput(f"{path} is neither .txt nor .jsonl.zst")


def passages(documents: Iterable[str], rng: Random, length: int = 24_000) -> Iterator[str]:
    """Two random passages of `length` characters of every document, to train a tokenizer on."""
    for text in documents:
        for _ in range(2):
            start = rng.randrange(max(1, len(text) - length))
            yield text[start : start + length]


def _read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"{path} is not UTF-8 text (byte {error.start}); convert it first"
        ) from error
    if "\0" in text:
        raise InvalidInput(f"{path} is a binary file; give it plain text")
    if not text.strip():
        raise InvalidInput(f"{path} holds no text")
    return text


def records_of(path: Path, form: type[T]) -> Iterator[tuple[int, T]]:
    """Decode the non-blank lines of a UTF-8 file as JSON of a form, and yield them with their
    numbers from 1; `.zst` is decompressed. Raises OSError, and InvalidInput for other content,
    which names the line.
    """
    with path.open("rb") as file:
        stream: Any = file
        if path.suffix == ".zst":
            # The corpus files are written with long-distance matching: a window of 128 MiB.
            stream = zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(file)
        try:
            for number, line in enumerate(io.TextIOWrapper(stream, encoding="utf-8-sig"), 1):
                if line.strip():
                    yield number, from_json(line, form)
        except (zstandard.ZstdError, UnicodeDecodeError) as error:
            kind = "zstandard-compressed UTF-8 text" if path.suffix == ".zst" else "UTF-8 text"
            raise InvalidInput(f"{path} is no {kind}: {error}") from error
        except ValueError as error:
            raise InvalidInput(f"{path} line {number}: {error}") from None


class _Record(msgspec.Struct):
    text: str


def _read_json_lines(path: Path) -> Iterator[str]:
    found = False
    for _, record in records_of(path, _Record):
        found = True
        yield record.text
    if not found:
        raise InvalidInput(f"{path} holds no documents")


@dataclass(frozen=True)
class TokenCorpus:
    """Documents of files as one array of token ids, and words that occur in them.

    `tokens` is uint16 [n] (a memory map), document after document. `words` are lower-case words of
    4-10 letters to name things with, without those that are held out for evaluation.
    """

    tokens: np.ndarray
    words: tuple[str, ...] = field(repr=False)

    @classmethod
    def build(
        cls, paths: Sequence[str | Path], tokenizer: Tokenizer, cache_dir: str | Path
    ) -> TokenCorpus:
        """Tokenise the files into `cache_dir`, or reuse the result for the same files and
        tokenizer.

        Cached under the tokenizer's fingerprint and the files' names and sizes. Uses
        RAYON_NUM_THREADS threads. Raises InvalidInput for unreadable files (see `read_documents`).
        """
        files = [Path(path) for path in paths]
        if not files:
            raise InvalidInput("no files to read; give at least one .txt or .jsonl.zst file")
        cache = Path(cache_dir)
        cache.mkdir(parents=True, exist_ok=True)
        named = [tokenizer.fingerprint, *(f"{path.name}:{path.stat().st_size}" for path in files)]
        key = hashlib.blake2b("\n".join(named).encode(), digest_size=12).hexdigest()
        ids_file, words_file = cache / f"{key}.tokens", cache / f"{key}.json"
        if not words_file.exists():  # written last: its presence says that both are whole
            counts = _write_tokens(files, tokenizer, ids_file)
            with replacement(words_file, mode=0o644) as file:
                file.write(json.dumps(_entity_words(counts)).encode())
        tokens = np.memmap(ids_file, dtype=np.uint16, mode="r")
        return cls(tokens, tuple(json.loads(words_file.read_text())))

    def __len__(self) -> int:
        return len(self.tokens)

    def offset(self, rng: Random, length: int) -> int:
        """A random offset with at least `length` tokens after it. Raises InvalidInput for a shorter
        corpus.
        """
        if length > len(self.tokens):
            raise InvalidInput(
                f"the corpus holds {len(self.tokens)} tokens, fewer than the {length} asked for"
            )
        return rng.randrange(len(self.tokens) - length + 1)


def _write_tokens(paths: Sequence[Path], tokenizer: Tokenizer, target: Path) -> Counter[str]:
    """Write the ids of all documents to `target` and count the words met."""
    counts: Counter[str] = Counter()

    def documents() -> Iterator[str]:
        for text in read_documents(paths):
            counts.update(re.findall(r"\b[a-z]{4,10}\b", text[:_WORDS_PER_DOCUMENT]))
            yield text

    with replacement(target, mode=0o644) as file:
        segments = (segment for text in documents() for segment in tokenizer.segments(text))
        while batch := list(islice(segments, _SLICE_SEGMENTS)):
            for ids in tokenizer.encode_batch(batch):
                file.write(np.asarray(ids, dtype=np.uint16).tobytes())
    return counts


def _entity_words(counts: Counter[str]) -> list[str]:
    """Words for names: frequent to medium ones, without the most common and the held-out ones."""
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    first = min(_COMMONEST_SKIPPED, len(ranked) // 10)
    return [word for word in ranked[first : first + ENTITY_WORDS] if not is_held_out(word)]


def is_held_out(word: str) -> bool:
    """Whether a word is reserved for evaluation; equal for all corpora."""
    digest = hashlib.blake2b(word.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % 100 < HELD_OUT_PERCENT
