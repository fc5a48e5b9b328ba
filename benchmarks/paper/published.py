"""The numbers of arXiv 2305.16300 (landmark attention), to compare shapes with: 12 layers, hidden
size 1024, context 512, blocks of 50, 240 thousand steps on PG-19 and arXiv mathematics.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A row of table 1. In tokens: length of the text, local (read at once), cache; blocks kept and
    retrieved; perplexities.
    """

    length: int
    local: int
    cache: int | None
    kept: int | None
    top_k: int | None
    pg19: float
    arxiv: float | None

    @property
    def memory(self) -> str:
        """The memory of the model."""
        return "landmark" if self.kept else "transformer-xl" if self.cache else "none"


TABLE_1 = (
    Row(512, 512, None, None, None, 16.32, 4.01),
    Row(512, 360, None, None, None, 16.80, 4.31),
    Row(512, 250, None, 10, 2, 16.24, 4.01),
    Row(2048, 256, 256, None, None, 14.72, None),
    Row(2048, 250, None, 40, 2, 15.14, 3.43),
    Row(2048, 350, None, 40, 2, 15.07, 3.41),
    Row(2048, 300, None, 40, 3, 14.97, 3.36),
    Row(2048, 250, None, 20, 4, 15.02, 3.37),
    Row(2048, 250, None, 40, 4, 14.92, 3.35),
    Row(4096, 256, 256, None, None, 14.55, None),
    Row(4096, 250, None, 40, 4, 14.79, 3.19),
    Row(4096, 250, None, 80, 2, 15.00, 3.29),
    Row(4096, 250, None, 80, 4, 14.72, 3.18),
)

# PG-19, by granularity and (length, blocks retrieved)
TABLE_2 = {
    "per_token_per_head": {(2048, 2): 15.14, (2048, 4): 14.92, (4096, 4): 14.72},
    "per_head": {(2048, 2): 15.48, (2048, 4): 15.10, (4096, 4): 14.95},
    "per_token": {(2048, 2): 15.44, (2048, 4): 15.04, (4096, 4): 14.89},
}

# PG-19, length 2048, 4 blocks retrieved: by cutoff (None = trained without the context miss token),
# perplexity and the share of lookups dropped
TABLE_3 = {
    None: (16.28, None),
    0.0: (16.38, 0.0),
    0.1: (16.38, 0.23),
    0.3: (16.43, 0.57),
    0.5: (16.86, 0.84),
    1.0: (19.49, 1.0),
}

FIGURE_3B = {32_768: 0.98}  # share of pass keys right, by length of the prompt (LLaMA 7B)


def blocks(tokens: int) -> int:
    """The paper's tokens in our blocks: eight for 512, which is what both were trained with."""
    return math.ceil(tokens / 64)


def kept(count: int) -> int:
    """The paper's blocks in our blocks: eight for ten."""
    return max(1, round(count * 0.8))
