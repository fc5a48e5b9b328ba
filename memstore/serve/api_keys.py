"""API keys, and their scopes: who may read and write which documents."""

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from memstore.errors import InvalidInput

_LEAST = 16  # characters of a key; fewer could be guessed


@dataclass(frozen=True)
class Access:
    """What a client may do. only: patterns (fnmatch) of the names of documents that it may see;
    none for all.
    """

    write: bool = True
    only: tuple[str, ...] = ()

    def sees(self, document: str) -> bool:
        """May it read, and with `write` change, a document of this name?"""
        return not self.only or any(fnmatchcase(document, pattern) for pattern in self.only)


Keys = Mapping[str, Access]
"""What each key may do; empty where the server asks for none."""


def read_keys(file: Path) -> Keys:
    """Lines `KEY [read|write] [only=PATTERN ...]`; # begins a comment. Raises InvalidInput."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidInput(f"cannot read {file}: {why}") from None
    keys = dict[str, Access]()
    for number, line in enumerate(lines, 1):
        words = line.split("#", 1)[0].split()
        if words and words[0] in keys:
            raise InvalidInput(f"{file} holds a key twice; remove one of them")
        if words:
            keys[words[0]] = _scope(words, f"{file}:{number}")
    if not keys:
        raise InvalidInput(f"{file} holds no key; write one on each line")
    return keys


def granted(keys: Keys, key: str) -> Access | None:
    """What a key may do; None for an unknown one. Every key is compared, in constant time."""
    found = None
    for known, access in keys.items():
        if hmac.compare_digest(key.encode(), known.encode()):
            found = access
    return found


def _scope(words: Sequence[str], line: str) -> Access:
    key, *scopes = words
    if len(key) < _LEAST:
        raise InvalidInput(f"{line}: a key needs at least {_LEAST} characters")
    write, only = False, []
    for scope in scopes:
        if scope.startswith("only="):
            only.append(scope.removeprefix("only="))
        elif scope in ("read", "write"):
            write = scope == "write"
        else:
            raise InvalidInput(f"{line}: {scope!r} is no scope; use read, write or only=PATTERN")
    return Access(write, tuple(only))
