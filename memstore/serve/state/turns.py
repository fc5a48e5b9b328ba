"""Turns of a conversation, each a question and an answer, and digests that identify a history."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """A question and what was answered."""

    question: str
    answer: str


def root_key(owner: str) -> bytes:
    """The key of an empty history."""
    return _digest(b"", owner)


def next_key(key: bytes, turn: Turn) -> bytes:
    """The key of a history, and a turn behind it."""
    return _digest(key, turn.question, turn.answer)


def keys_of(owner: str, turns: Sequence[Turn]) -> list[bytes]:
    """The keys of the history before the first turn, and after each."""
    keys = [root_key(owner)]
    for turn in turns:
        keys.append(next_key(keys[-1], turn))
    return keys


def _digest(before: bytes, *texts: str) -> bytes:
    """Of parts, told apart by their lengths."""
    digest = hashlib.blake2b(before, digest_size=20)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.digest()
