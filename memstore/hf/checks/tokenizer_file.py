"""A `tokenizers` file, tried: ids, what its normalizer may make of a text, and texts of which a
pattern that searches for ever would do so; for a process with bounds.
"""

import base64
import string
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from tokenizers import Tokenizer

from memstore.decode import from_json

_Id = Annotated[int, Meta(ge=0, lt=1 << 22)]
_MOST_PARTS, _MOST_GROWTH, _LONGEST = 64, 64, 256
_MOST_CHARSMAP = 4 << 20
_PROBES = (
    "Zoë's 3 naïve cafés — 12,345 §; 記憶\n\n\tend  of   it. " * 64,
    string.printable * 16,
    *(letter * 256 + "!" for letter in string.printable),
    *(letter * 4096 for letter in "a 1\n-é記"),
)


class _Added(msgspec.Struct):
    id: _Id
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, _Id] | list[tuple[str, float]] = {}


class _File(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []
    normalizer: Any = None
    pre_tokenizer: Any = None


def check_tokenizer(path: str) -> str:
    """What is wrong with a tokenizer's file; nothing for one that may be loaded."""
    data = Path(path).read_bytes()
    try:
        described = from_json(data, _File)
    except ValueError as error:
        return f"is no tokenizer: {error}"
    parts = [part for value in (described.normalizer, described.pre_tokenizer)
             for part in _parts(value)]  # fmt: skip
    if len(parts) > _MOST_PARTS or _growth(parts) > _MOST_GROWTH:
        return "may make a text much longer before it is cut; get the model's files again"
    del described
    try:
        tokenizer = Tokenizer.from_str(data.decode())
        tokenizer.no_padding()
        tokenizer.no_truncation()
        for text in _PROBES:
            if len(tokenizer.encode(text, add_special_tokens=False).ids) > 64 * len(text):
                return "cuts a text into far more tokens than it has characters"
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # what Rust panics with is no Exception
        return f"cannot be used: {' '.join(str(error).split())[:160]}"
    return ""


def _parts(value: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or what comes behind it, and those inside them."""
    if isinstance(value, list):
        return [part for inner in value for part in _parts(inner)]
    if not isinstance(value, dict):
        return []
    inner = [part for part in value.values() if isinstance(part, list)]
    return [value, *_parts(inner)] if "type" in value else _parts(inner)


def _growth(parts: list[dict[str, Any]]) -> int:
    """By how much steps one after the other may make a text longer, at most."""
    growth = 1
    for part in parts:
        if part.get("type") == "Replace":
            growth *= max(1, len(str(part.get("content", ""))))
        elif part.get("type") == "Precompiled":
            growth *= _longest(str(part.get("precompiled_charsmap") or "")) // _LONGEST + 1
    return growth


def _longest(charsmap: str) -> int:
    """The longest text that a SentencePiece table puts in the place of another."""
    if len(charsmap) > _MOST_CHARSMAP:
        return len(charsmap) * _LONGEST
    data = base64.b64decode(charsmap)
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(map(len, texts.split(b"\0")))
