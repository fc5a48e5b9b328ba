"""What a memory's selector finds consecutive blocks by, as it was given: checked, and not stored
yet.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from memstore.disk.format.block_words import BlockWords, Words
from memstore.disk.format.index_spec import IndexSpec
from memstore.disk.format.runs import Kind, Run, TokenRun, WordRun, kinds_of
from memstore.errors import InvalidInput


class IndexEntries(NamedTuple):
    """What a selector keeps of consecutive blocks."""

    lengths: np.ndarray  # int64 [blocks]: tokens of each
    landmarks: np.ndarray | None  # [tokens, heads, width]
    words: BlockWords | None

    @classmethod
    def of(
        cls,
        landmarks: Tensor | None,
        words: Sequence[Words] | None,
        spec: IndexSpec,
        lengths: Sequence[int] | np.ndarray,
    ) -> "IndexEntries":
        """What a caller gives of blocks of so many tokens each. Raises InvalidInput for what is not
        as the spec says.
        """
        of_blocks = np.array(lengths, dtype=np.int64)
        blocks, shape = len(of_blocks), (int(of_blocks.sum()), spec.heads, spec.width)
        if (landmarks is not None) != (spec.heads > 0) or (words is not None) != spec.words:
            needs = {"token": "landmarks of its tokens", "words": "the words of its blocks"}
            wanted = " and ".join(needs[kind] for kind in kinds_of(spec)) or "neither"
            raise InvalidInput(f"selector {spec.name} keeps {wanted}; give that")
        bits = None
        if landmarks is not None:
            dtype = str(landmarks.dtype).removeprefix("torch.")
            if tuple(landmarks.shape) != shape or dtype != spec.dtype:
                raise InvalidInput(
                    f"expected token landmarks {list(shape)} {spec.dtype}, got "
                    f"{list(landmarks.shape)} {dtype}"
                )
            bits = landmarks.detach().cpu().numpy().copy()
            if bits.dtype.kind == "f" and not np.isfinite(bits).all():
                raise InvalidInput("token landmarks must be finite numbers; these are not")
        if words is not None and len(words) != blocks:
            raise InvalidInput(f"expected the words of {blocks} blocks, got those of {len(words)}")
        return cls(of_blocks, bits, None if words is None else BlockWords.of(words))

    def runs(self, first_block: int) -> dict[Kind, Run]:
        """What is kept of the blocks, which begin with first_block, by kind."""
        found: dict[Kind, Run] = {}
        if self.landmarks is not None:
            found["token"] = TokenRun(first_block, self.landmarks, self.lengths)
        if self.words is not None:
            found["words"] = WordRun(first_block, self.words)
        return found
