"""API keys, and their scopes: who may read and write which documents."""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from memstore.errors import InvalidInput

_LEAST = 16  # characters of a key: fewer can be guessed


@dataclass(frozen=True)
class Access:
    """What one asker may do. name: whose conversations and turns in the queue are his; only: the
    documents that he sees (fnmatch patterns; none = every one).
    """

    name: str = "local"
    write: bool = True
    only: tuple[str, ...] = ()

    def sees(self, document: str) -> bool:
        """May he read, and with `write` change, a document of this name?"""
        return not self.only or any(fnmatchcase(document, pattern) for pattern in self.only)


@dataclass(frozen=True)
class Keys:
    """The keys of a key file, with what each may do."""

    known: tuple[tuple[str, Access], ...] = ()

    @classmethod
    def of_file(cls, file: Path) -> "Keys":
        """Lines `KEY [read|write] [only=PATTERN ...]`; # begins a comment. Raises InvalidInput."""
        try:
            lines = file.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"cannot read {file}: {error}") from None
        known = []
        for number, line in enumerate(lines, 1):
            words = line.split("#", 1)[0].split()
            if words:
                known.append((words[0], _scope(words, f"{file}:{number}")))
        if not known:
            raise InvalidInput(f"{file} holds no key; write one a line")
        if len({key for key, _ in known}) < len(known):
            raise InvalidInput(f"{file} holds a key twice; leave one of them out")
        return cls(tuple(known))

    @property
    def count(self) -> int:
        """How many may ask, each for itself: without keys all are one."""
        return max(1, len(self.known))

    def access(self, key: str | None) -> Access | None:
        """What a key may do; None for one that is not known. Every key is compared, in constant
        time.
        """
        granted = None
        given = (key or "").encode()
        for known, access in self.known:
            if hmac.compare_digest(given, known.encode()):
                granted = access
        return granted


def _scope(words: Sequence[str], line: str) -> Access:
    key, *scopes = words
    if len(key) < _LEAST:
        raise InvalidInput(f"{line}: a key needs {_LEAST} characters at least")
    write, only = False, []
    for scope in scopes:
        if scope.startswith("only="):
            only.append(scope.removeprefix("only="))
        elif scope in ("read", "write"):
            write = scope == "write"
        else:
            raise InvalidInput(f"{line}: {scope!r} is no scope; write read, write or only=PATTERN")
    # not by its line: what is stored for a key stays its own where the file is edited
    digest = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    return Access(f"key-{digest}", write, tuple(only))
