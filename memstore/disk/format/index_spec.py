"""What a memory keeps for a selector that chooses its blocks: a landmark of every token, words, or
both.
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

Name = Annotated[str, Meta(min_length=1, max_length=128)]


@dataclass(frozen=True)
class IndexSpec:
    """What a selector keeps of every token and block; a memory keeps it for one selector."""

    name: Name
    digest: Name  # of all that its landmarks depend on: other weights, another digest
    # numbers of a token's landmark, a unit vector times 127 in int8; 0: tokens have none
    width: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    words: bool = False  # are the words of every block kept
