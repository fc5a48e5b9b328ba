"""The first of two stages of a search over very many token landmarks: inverted lists of rounded
landmarks say which passages are worth an exact score.

A question's score of a passage is a sum over its tokens, weighted, of the greatest product with the
passage's landmarks, and few of its tokens weigh anything. Each of these looks at the lists nearest
to it. What it finds above a bound counts; a passage of which it finds nothing counts as much as
passages below the bound do in the mean, which a sample tells (lists and residuals: PLAID, arXiv
2205.09707; what is not found is imputed: XTR, arXiv 2304.01982; codes of 4 bits that are summed in
registers: FAISS's FastScan).
"""

from typing import Any, NamedTuple

import numpy as np

from memstore.errors import CorruptMemory
from memstore.index.faiss_head import faiss
from memstore.index.late_interaction import INT8_STEPS

SAMPLED = 2048  # passages by which bounds are told
LEAST_SAMPLED = 256  # of them in a scope: fewer tell nothing
CODE = 16  # bytes of a landmark in a list; its passage takes 8 more

_TRAINED = 64  # landmarks a list that k-means sees
_ROUNDS = 8  # of k-means
_HEAVY = 0.95  # of a question's weight: the heaviest tokens that hold it are looked up
_MOST_HEAVY = 24  # of them; more are as dear as an exact search
# The share of all passages that a token with all the weight looks for, and of all lists that it
# looks at; one with a quarter of it half as many.
_SOUGHT, _PROBED = 0.1, 0.1


class Sample(NamedTuple):
    """Some passages, evenly spread."""

    rows: np.ndarray  # int64 [m], ascending
    landmarks: np.ndarray  # int8 [tokens, width]
    lengths: np.ndarray  # int64 [m]: tokens of each


class ProposedRows(NamedTuple):
    """What is worth an exact score."""

    rows: np.ndarray  # int64 [n], ascending
    spread: tuple[float, float]  # mean and standard deviation of the scores of all, by the sample


class TokenLists:
    """Lists of the token landmarks of passages 0, 1, .., in the order in which they were added."""

    def __init__(self, index: Any, lengths: np.ndarray, sample: Sample) -> None:
        """index: FAISS's, whose ids are passages; lengths: int64 [passages], tokens of each."""
        self.index, self.lengths, self.sample = index, lengths, sample
        self.ends = np.cumsum(lengths)  # where each passage's tokens end, counted over all
        self._near = sample.landmarks.astype(np.float32) / INT8_STEPS

    @property
    def passages(self) -> int:
        """How many were added."""
        return len(self.lengths)

    @property
    def bytes(self) -> int:
        """Main memory that they take."""
        return int(self.index.ntotal) * (CODE + 8) + self._near.nbytes + 2 * self.lengths.nbytes

    def propose(
        self, q: np.ndarray, weights: np.ndarray, most: int, inside: np.ndarray | None
    ) -> ProposedRows | None:
        """The passages that are probably best.

        q: float32 [T, width], a question's tokens; weights: float32 [T], which sum to 1; inside:
        bool [passages], which may be proposed (None: all). None where too few of these are in the
        sample to tell anything, or too many tokens weigh alike. Raises CorruptMemory.
        """
        starts = np.cumsum(self.sample.lengths) - self.sample.lengths
        in_scope = slice(None) if inside is None else inside[self.sample.rows]
        heaviest = np.argsort(-weights)
        heavy = heaviest[: 1 + int((np.cumsum(weights[heaviest]) < _HEAVY).sum())]
        told = len(self.sample.rows[in_scope]) >= LEAST_SAMPLED and np.isfinite(weights).all()
        if not told or len(heavy) > _MOST_HEAVY:
            return None
        q, weights = q[heavy], weights[heavy]
        maxima = np.maximum.reduceat(q @ self._near.T, starts, axis=1)[:, in_scope]
        # beyond what is imputed: of one row, and of all by weight
        best, total = np.zeros((2, self.passages), np.float32)
        for row, of_sample, weight in zip(q, maxima, weights):
            bound = np.quantile(of_sample, 1 - _SOUGHT * weight**0.5)
            imputed = float(of_sample[of_sample <= bound].mean())
            found, products = self._above(row, float(bound), _PROBED * weight**0.5)
            beyond = products - np.float32(imputed)
            np.maximum.at(best, found, beyond)
            found = found[beyond == best[found]]
            total[found] += weight * best[found]
            best[found] = 0
        if inside is not None:
            total[~inside] = 0
        rows = np.flatnonzero(total)
        if len(rows) > most:
            rows = rows[np.argpartition(total[rows], len(rows) - most)[-most:]]
        scores = weights @ maxima / weights.sum()
        return ProposedRows(np.sort(rows), (float(scores.mean()), float(scores.std())))

    def _above(self, row: np.ndarray, bound: float, share: float) -> tuple[np.ndarray, np.ndarray]:
        """Passages (repeated) of landmarks whose product with a row [width] is above a bound, in
        the nearest lists, a share of all, and the products. Raises CorruptMemory.
        """
        probed = faiss().SearchParametersIVF(nprobe=max(1, round(share * int(self.index.nlist))))
        _, products, found = self.index.range_search(row[None], bound, params=probed)
        if len(found) and not 0 <= found.min() <= found.max() < self.passages:
            raise CorruptMemory(
                "index/passages.lists names passages that there are not; run `memstore index`"
            )
        return found, products


class Building:
    """Lists that are being made: trained with some landmarks, then given all, passage by
    passage.
    """

    def __init__(self, some: np.ndarray, tokens: int, passages: int) -> None:
        """some: int8 [n, width], landmarks at random, `wanted` of them if there are; tokens,
        passages: how many there are in all. Raises InvalidInput where FAISS is missing.
        """
        library = faiss()
        vectors = some.astype(np.float32) / INT8_STEPS
        width, count = some.shape[1], lists_of(tokens)
        means = library.Kmeans(width, count, niter=_ROUNDS, spherical=True, seed=1234)
        means.train(vectors)
        quantizer = library.IndexFlatIP(width)
        quantizer.add(means.centroids)
        self.index = library.IndexIVFPQFastScan(
            quantizer, width, count, 2 * CODE, 4, library.METRIC_INNER_PRODUCT
        )
        self.index.by_residual = True
        self.index.own_fields = True  # the index frees the quantizer, not Python
        quantizer.this.disown()
        self.index.train(vectors)
        self._stride = max(1, passages // SAMPLED)
        self._lengths: list[np.ndarray] = []
        self._sampled: list[np.ndarray] = []
        self._passages = 0

    @staticmethod
    def wanted(tokens: int) -> int:
        """How many landmarks of so many to train with."""
        return min(tokens, lists_of(tokens) * _TRAINED)

    def add(self, landmarks: np.ndarray, lengths: np.ndarray) -> None:
        """The next passages: landmarks int8 [tokens, width], lengths int64 [n] their tokens."""
        rows = np.arange(self._passages, self._passages + len(lengths))
        vectors = landmarks.astype(np.float32) / INT8_STEPS
        self.index.add_with_ids(vectors, np.repeat(rows, lengths))
        ends = np.cumsum(lengths)
        for at in np.flatnonzero(rows % self._stride == 0):
            self._sampled.append(landmarks[ends[at] - lengths[at] : ends[at]].copy())
        self._lengths.append(lengths)
        self._passages += len(lengths)

    def end(self) -> TokenLists:
        """What was made."""
        lengths = np.concatenate([np.zeros(0, np.int64), *self._lengths])
        rows = np.arange(0, self._passages, self._stride)
        return TokenLists(
            self.index, lengths, Sample(rows, np.concatenate(self._sampled), lengths[rows])
        )


def lists_of(tokens: int) -> int:
    """How many lists so many landmarks are put into: up to the square root."""
    return min(1 << int(np.log2(max(1, tokens)) / 2), max(1, tokens // _TRAINED))
