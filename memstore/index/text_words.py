"""The words of a text, as a memory keeps and finds them."""

import re
from collections import Counter
from unicodedata import normalize

from xxhash import xxh32_intdigest

_WORD = re.compile(r"[^\W_]+")


def split(text: str) -> list[int]:
    """The words of a text in their order, as 32-bit hashes: runs of letters and digits of any
    script, in lower case.

    Text and question must be split alike. Compatible forms of a character count as one (NFKC).
    """
    words = _WORD.findall(normalize("NFKC", text).lower())
    return [xxh32_intdigest(word.encode("utf-8", "surrogatepass")) for word in words]


def count(text: str) -> list[tuple[int, int]]:
    """The distinct words of a text and how often each is there: what a memory keeps of a block."""
    return sorted(Counter(split(text)).items())
